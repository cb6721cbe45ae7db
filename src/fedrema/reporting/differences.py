"""How much better one group of runs is than another, and how sure that is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedrema.errors import BadInput
from fedrema.reporting.groups import Group, group_runs
from fedrema.runs.run import Run

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Difference:
    """A group minus the reference, over the training seeds that both have."""

    label: str
    reference: str
    pairs: int
    """How many seeds they have in common."""
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    reason: str = ""
    """Why there is no interval, where there is none."""


def paired_differences(
    runs: Sequence[Run], quantity: str = "honest_accuracy", reference: str | None = None
) -> list[Difference]:
    """Compare every group with the reference: mean paired difference and its 95 % t interval.

    The same seed gives all methods the same initial network and the same batches, so that pairs tell more than
    two separate means. There is an interval only where two groups share at least two seeds and the data.

    Parameters
    ----------
    runs
        Runs of any number of methods, settings and seeds.
    quantity
        best_accuracy, honest_accuracy, final_accuracy or worst_tenth, as in summary.json.
    reference
        A method's name or a group's label; default: the group with the best mean.

    Returns
    -------
    list[Difference]
        One for every group but the reference; empty if there is no other, or if no run has been scored.
    """
    groups = group_runs(runs)
    against = _reference(groups, quantity, reference)
    if against is None:
        return []
    return [_difference(group, against, quantity) for group in groups if group is not against]


def _reference(groups: Sequence[Group], quantity: str, wanted: str | None) -> Group | None:
    if wanted is None:
        means = [(statistic.mean, group) for group in groups if (statistic := group.statistic(quantity))]
        return max(means, key=lambda pair: pair[0])[1] if means else None
    name = wanted.casefold()
    found = [group for group in groups if group.label.casefold() == name]
    found = found or [group for group in groups if name in (group.method.casefold(), group.title.casefold())]
    if len(found) != 1:
        problem = "stands for several groups" if found else "is not among the groups"
        labels = ", ".join(repr(group.label) for group in found or groups)
        raise BadInput(f"--reference {wanted!r} {problem}; valid are {labels}.")
    return found[0]


def _difference(group: Group, against: Group, quantity: str) -> Difference:
    if group.fingerprint != against.fingerprint:
        return Difference(group.label, against.label, 0, reason="other data")
    if not (group.counted[0].finished and against.counted[0].finished):
        return Difference(group.label, against.label, 0, reason="still running")
    mine, theirs = group.values(quantity), against.values(quantity)
    common = sorted(mine.keys() & theirs.keys())
    if not common:
        return Difference(group.label, against.label, 0, reason="no seed in common")
    differences = [mine[seed] - theirs[seed] for seed in common]
    mean = float(np.mean(differences))
    if len(common) == 1:
        return Difference(group.label, against.label, 1, mean, reason="one seed in common: no interval")
    low, high = interval(differences)
    return Difference(group.label, against.label, len(common), mean, low, high)


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the t interval of the mean of paired differences."""
    # Imported here: it takes a moment that the table after every run need not wait for.
    from scipy import stats

    mean, error = float(np.mean(differences)), float(stats.sem(differences))
    if error == 0:  # the same difference for every seed: scipy would answer NaN
        return mean, mean
    low, high = stats.t.interval(CONFIDENCE, df=len(differences) - 1, loc=mean, scale=error)
    return float(low), float(high)


def welch_interval(difference: float, first: tuple[float, int], second: tuple[float, int]) -> tuple[float, float]:
    """Return the 95 % interval of a difference of two means by Welch's t test.

    Each of the two is given by its standard deviation and its number of values, at least two; they need be neither
    paired nor equally scattered. Degrees of freedom are Welch and Satterthwaite's.
    """
    from scipy import stats

    squares = [deviation**2 / count for deviation, count in (first, second)]
    error = math.sqrt(sum(squares))
    if error == 0:
        return difference, difference
    freedom = error**4 / sum(
        square**2 / (count - 1) for square, (_, count) in zip(squares, (first, second), strict=True)
    )
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * error
    return difference - half, difference + half
