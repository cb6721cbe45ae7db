"""Ridge, logistic and Poisson regression with a cross-validated penalty, for few samples and without randomness.

All models minimise the sum of the samples' losses and penalty / 2 times the squared weights; the intercept is not
penalised.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Kind = Literal["squared", "logistic", "poisson"]
PENALTIES: Floats = np.array([10.0**power for power in range(4, -2, -1)])
"""In units of the inputs' mean square; of equally good ones, the largest is chosen."""
FOLDS = 5
MOST_ROWS = 1000
"""With more training samples, the penalty is chosen with so many of them."""
LARGEST = 30.0
"""Bound of a logit or logarithm of a rate, as these have no bound for classes that can be separated."""
STEPS = 30
PRECISION = 1e-9


@dataclass(frozen=True)
class Inputs:
    """The inputs of a client, rotated to as many columns as its training samples can distinguish."""

    train: Floats
    """[n, r + 1]; the last column is 1."""
    test: Floats
    """[m, r + 1]"""

    @classmethod
    def of(cls, train: Floats, test: Floats) -> "Inputs":
        """Centre and scale the inputs, and rotate them if there are more columns than samples.

        Predictions of models with a penalty depend on inner products of samples only, so the rotation changes none.
        """
        mean = train.mean(axis=0)
        train, test = train - mean, test - mean
        size = float(np.sqrt(np.square(train).mean())) or 1.0
        train, test = train / size, test / size
        if train.shape[1] > len(train):
            _, _, axes = np.linalg.svd(train, full_matrices=False)
            train, test = train @ axes.T, test @ axes.T
        return cls(*(np.hstack([part, np.ones((len(part), 1))]) for part in (train, test)))

    def rows(self, chosen: NDArray[np.bool_]) -> "Inputs":
        """Return the inputs with some of the training samples."""
        return Inputs(self.train[chosen], self.test)


def work_of(samples: int, columns: int) -> float:
    """Return about how many operations a logistic or Poisson regression takes."""
    rank = min(samples, columns) + 1
    chosen = min(samples, MOST_ROWS)
    return 8.0 * rank**2 * (len(PENALTIES) * FOLDS * (chosen + rank) + samples)


def predict(inputs: Inputs, y: Floats, kind: Kind, order: NDArray[np.int64]) -> Floats | None:
    """Fit a model with the penalty that cross-validation chooses, and return its predictions for the test samples [m].

    They are means (squared), logits (logistic), or logarithms of rates (poisson). `order` is a random permutation of
    the training samples, which determines the folds. None if there are too few samples: fewer than two of a class, or
    fewer than two with an event.
    """
    if len(y) < 3 or _rarest(y, kind) < 2:
        return None
    losses = np.zeros(len(PENALTIES))
    rows, fold = _folds(y, kind, order)
    for number in range(fold.max() + 1):
        held = rows[fold == number]
        weights = _fit(inputs.train[rows[fold != number]], y[rows[fold != number]], PENALTIES, kind)
        losses += _losses(weights @ inputs.train[held].T, y[held], kind).sum(axis=1)
    best = PENALTIES[[int(np.argmin(losses))]]
    found: Floats = (_fit(inputs.train, y, best, kind) @ inputs.test.T)[0]
    return found if kind == "squared" else np.clip(found, -LARGEST, LARGEST)


def _rarest(y: Floats, kind: Kind) -> int:
    """Return the number of samples of the rarer class, or with an event; of quantities, all."""
    present = int((y > 0).sum())
    return {"squared": len(y), "logistic": min(present, len(y) - present), "poisson": present}[kind]


def _folds(y: Floats, kind: Kind, order: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the samples with which the penalty is chosen, and their folds: each outcome is spread over all folds."""
    rows = order[np.argsort(y[order], kind="stable")]
    if len(rows) > MOST_ROWS:
        fewer = rows[:: -(-len(rows) // MOST_ROWS)]
        rows = fewer if _rarest(y[fewer], kind) >= FOLDS else rows
    return rows, np.arange(len(rows)) % min(FOLDS, len(rows))


def _fit(x: Floats, y: Floats, penalties: Floats, kind: Kind) -> Floats:
    """Return the weights for each penalty [penalties, r + 1], by Newton's method with shorter steps where necessary."""
    ridge = np.zeros((len(penalties), x.shape[1]))
    ridge[:, :-1] = penalties[:, None]
    weights = np.zeros_like(ridge)
    share = float(y.mean())
    weights[:, -1] = share if kind == "squared" else np.log(share / (1 - share) if kind == "logistic" else share)
    diagonal = np.arange(x.shape[1])
    loss = _penalised(x, y, weights, ridge, kind)
    for _ in range(STEPS):
        mean, curvature = _derivatives(weights @ x.T, kind)
        gradient = (mean - y) @ x + ridge * weights
        hessian = (x.T[None] * curvature[:, None, :]) @ x
        hessian[:, diagonal, diagonal] += ridge + 1e-10 * len(x)
        step = np.linalg.solve(hessian, gradient[..., None])[..., 0]
        size = np.ones((len(penalties), 1))
        for _ in range(STEPS):
            tried = weights - size * step
            new = _penalised(x, y, tried, ridge, kind)
            worse = new > loss + PRECISION * np.abs(loss)
            if not worse.any():
                break
            size[worse] /= 2
        weights, before, loss = np.where(worse[:, None], weights, tried), loss, np.where(worse, loss, new)
        if (before - loss <= PRECISION * (1 + np.abs(loss))).all():
            break
    return weights


def _penalised(x: Floats, y: Floats, weights: Floats, ridge: Floats, kind: Kind) -> Floats:
    with np.errstate(over="ignore"):  # of steps that are too long, which are shortened
        total: Floats = (ridge * np.square(weights)).sum(axis=1) / 2 + _losses(weights @ x.T, y, kind).sum(axis=1)
    return total


def _losses(scores: Floats, y: Floats, kind: Kind) -> Floats:
    """Return the loss of each sample [penalties, n]."""
    if kind == "squared":
        return np.square(scores - y) / 2
    if kind == "logistic":
        return np.logaddexp(0, scores) - y * scores
    return np.exp(np.minimum(scores, 700)) - y * scores


def _derivatives(scores: Floats, kind: Kind) -> tuple[Floats, Floats]:
    """Return the predicted means, and the second derivatives of the losses [penalties, n]."""
    if kind == "squared":
        return scores, np.ones_like(scores)
    if kind == "logistic":
        mean = 1 / (1 + np.exp(-np.clip(scores, -700, 700)))
        return mean, mean * (1 - mean)
    mean = np.exp(np.minimum(scores, 700))
    return mean, mean
