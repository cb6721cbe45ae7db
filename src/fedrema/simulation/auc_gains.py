"""The difference between two models' AUC on the same samples: DeLong's variance, and a test that exchanges ranks.

With several classes or labels, the AUC is the mean of one against the rest. Everything here is a sum over rows, so that
the mean over classes needs nothing of its own.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedrema.base.random import numpy_generator
from fedrema.simulation.row_gains import ROUNDING, Pair
from fedrema.tasks import Predictions

Array = NDArray[np.float64]
PERMUTATIONS = 999
CELLS = 2**21
"""Signs that are held in memory at once."""


@dataclass(frozen=True)
class AucDifference:
    """The AUC of a model minus that of a baseline on the samples of one client."""

    difference: float
    """NaN if no class has rows inside and outside of it."""
    weights: Array
    """[n] The difference after exchanging the models of some rows is the sum of these, with a minus for those rows."""
    variance: float
    """DeLong's variance of the difference; NaN where an outcome has one row only."""
    freedom: float
    """Degrees of freedom of the variance: Welch's over classes; with labels, the rows of the rarest one minus one."""
    fewest: int
    """Rows of the rarest outcome, among the outcomes that occur."""


def auc_difference(pair: Pair) -> AucDifference:
    """Compare the AUC of two models on the samples of one client.

    Each model's scores are replaced by their ranks, which makes the models' scores exchangeable. A positive row i and a
    negative row j then contribute h(mᵢ, mⱼ) − h(bᵢ, bⱼ) to the difference, where h is 1, ½ or 0. Exchanging the models
    of a row replaces its m by b and the reverse. With signs s = −1 for exchanged rows, the contribution of the pair is
    ½(sᵢ + sⱼ)·(h(mᵢ, mⱼ) − h(bᵢ, bⱼ)) + ½(sᵢ − sⱼ)·(h(mᵢ, bⱼ) − h(bᵢ, mⱼ)). This is linear in s, so that a permutation
    costs one product of n numbers instead of a sort.
    """
    scores, positive = _scores(pair[0])
    others, _ = _scores(pair[1])
    rows = scores.shape[1]
    weights, influence, fewest, defined, known = np.zeros(rows), np.zeros(rows), rows, 0, True
    for mine, theirs, flags in zip(_ranks(scores), _ranks(others), positive, strict=True):
        first, second = np.flatnonzero(flags), np.flatnonzero(~flags)
        if not (len(first) and len(second)):
            continue
        defined += 1
        fewest = min(fewest, len(first), len(second))
        pairs = len(first) * len(second)
        for inside, outside, sign in ((first, second, 1), (second, first, -1)):
            same = _wins(mine[inside], mine[outside]) - _wins(theirs[inside], theirs[outside])
            crossed = _wins(mine[inside], theirs[outside]) - _wins(theirs[inside], mine[outside])
            weights[inside] += sign * (same + crossed) / (2 * pairs)
            size = len(inside)
            known &= size > 1
            # Σ influence² is the sum of var(gains of rows) / rows over both outcomes: DeLong's variance.
            influence[inside] += sign * (same - same.mean()) / len(outside) / np.sqrt(size * max(size - 1, 1))
    if not defined:
        return AucDifference(np.nan, weights, np.nan, 1, 0)
    squares = np.square(influence / defined)
    variance = float(squares.sum()) if known else np.nan
    freedom = _freedom(squares, pair[0], fewest) if known and variance else 1.0
    return AucDifference(float(weights.sum() / defined), weights / defined, variance, freedom, fewest)


def _freedom(squares: Array, model: Predictions, fewest: int) -> float:
    """Return the degrees of freedom of a sum over rows, the rows of each class having a mean of their own."""
    if model.task.name == "multilabel":
        return fewest - 1
    _, group = np.unique(model.target[0].numpy(), return_inverse=True)
    parts, counts = np.bincount(group, squares), np.bincount(group)
    return float(parts.sum() ** 2 / (parts**2 / np.maximum(counts - 1, 1)).sum())


def exchange_p(found: AucDifference, name: str) -> float:
    """Return the p-value of exchanging the models' ranks of random rows; `name` keys the random numbers."""
    generator, rows = numpy_generator("verdict", "exchange", name), len(found.weights)
    block, larger = max(1, CELLS // rows), 0
    for start in range(0, PERMUTATIONS, block):
        signs = 1.0 - 2.0 * generator.integers(0, 2, (min(block, PERMUTATIONS - start), rows), np.int8)
        # Permutations that give the same difference can differ in the last bits.
        larger += int((np.abs(signs @ found.weights) >= abs(found.difference) - ROUNDING).sum())
    return (1 + larger) / (1 + PERMUTATIONS)


def _scores(model: Predictions) -> tuple[Array, NDArray[np.bool_]]:
    """Return the scores of each class or label, and which rows belong to it [C, n]."""
    probabilities, target = model.probabilities[0].numpy().T, model.target[0].numpy()
    if model.task.name == "binary":
        return probabilities[1:], target[None] == 1
    if model.task.name == "multilabel":
        return probabilities, target.T == 1
    return probabilities, target == np.arange(len(probabilities))[:, None]


def _ranks(scores: Array) -> Array:
    """Return mean ranks [C, n]."""
    from scipy import stats

    return np.asarray(stats.rankdata(scores, axis=1), np.float64)


def _wins(values: Array, against: Array) -> Array:
    """Return how many of the others each value exceeds; equal ones count half."""
    ascending = np.sort(against)
    return (np.searchsorted(ascending, values, "left") + np.searchsorted(ascending, values, "right")) / 2
