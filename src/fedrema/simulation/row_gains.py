"""What single test samples contribute to the gain of a model over a baseline, and how much that varies."""

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from fedrema.tasks import Metric, Predictions

Array = NDArray[np.float64]
Pair = tuple[Predictions, Predictions]
"""The predictions of a model and of the baseline on the samples of one client [1, n, ...]."""
ROUNDING = 1e-12
"""Relative difference below which two values are equal: sums in another order differ in their last bits."""


@dataclass(frozen=True)
class RowGains:
    """The gain of one client, and the gains of its rows; positive is better for every metric."""

    samples: int
    value: float
    """The metric of the model; NaN where it is undefined."""
    baseline: float
    gain: float
    groups: tuple[Array, ...] = ()
    """Gains of single rows. The gain is the mean over groups of their means: one group for a mean over rows, one for
    each class for balanced accuracy. For RMSE, the gains in squared error. Empty for other metrics."""
    classes: tuple[int, ...] = ()
    """The class of each group; empty for one group."""
    scale: float = 1.0
    """What an interval of the mean row gain is divided by."""
    variance: float = field(default=np.nan)
    """Variance of a row's contribution to the gain; for balanced accuracy, variance of the gain. NaN if unknown."""

    @property
    def is_defined(self) -> bool:
        """Whether both metrics are defined and finite."""
        return bool(np.isfinite(self.gain))


def row_gains(metric: Metric, pair: Pair) -> RowGains:
    """Return the gain of a client and of its rows."""
    model, baseline = pair
    count = int(model.mask.sum())
    value, other = (_value(metric, each) for each in pair)
    gain = float(differences(metric, np.array(value), np.array(other)))
    if not np.isfinite(gain):
        return RowGains(count, value, other, np.nan)
    if metric.name == "balanced_accuracy":
        return _by_class(count, value, other, gain, pair)
    if not metric.is_mean_over_samples:
        return RowGains(count, value, other, gain)
    mine, theirs = per_row(metric, model), per_row(metric, baseline)
    rows = differences(metric, mine, theirs)
    if metric.name == "rmse":
        # The derivative of a root: a row changes the RMSE by the deviation of its squared error / (2 RMSE).
        linear = _ratio(theirs, 2 * other) - _ratio(mine, 2 * value)
        return RowGains(count, value, other, gain, (rows,), (), value + other or 1.0, _variance(linear))
    is_ternary = metric.name == "accuracy" and model.target.dim() == 2
    variance = ternary_variance(rows) if is_ternary else _variance(rows)
    return RowGains(count, value, other, gain, (rows,), (), 1.0, variance)


def _by_class(count: int, value: float, other: float, gain: float, pair: Pair) -> RowGains:
    target = pair[0].target[0].numpy()
    correct = [(each.predicted[0].numpy() == target).astype(np.float64) for each in pair]
    classes = tuple(int(label) for label in np.unique(target))
    groups = tuple((correct[0] - correct[1])[target == label] for label in classes)
    variance = sum(ternary_variance(rows) / len(rows) for rows in groups) / len(groups) ** 2
    return RowGains(count, value, other, gain, groups, classes, 1.0, variance)


def per_row(metric: Metric, model: Predictions) -> Array:
    """Return a metric that is a mean over rows for each row [n], before its transform."""
    outputs, target = model.outputs[0][:, None], model.target[0][:, None]
    single = Predictions(model.task, outputs, target, torch.ones(len(outputs), 1, dtype=torch.bool))
    return np.asarray(metric.quotients(single)[0].numpy(), np.float64)


def differences(metric: Metric, mine: Array, theirs: Array) -> Array:
    """Return by how much values are better than others; 0 where they differ by rounding only."""
    found = (mine - theirs) if metric.higher_is_better else (theirs - mine)
    size = np.maximum(np.maximum(np.abs(mine), np.abs(theirs)), 1)
    return np.where(np.abs(found) <= ROUNDING * size, 0.0, found)


def ternary_variance(rows: Array) -> float:
    """Return the variance of rows that gain, lose or do neither; positive also where no row differs."""
    gained, lost, count = (rows > 0).sum(), (rows < 0).sum(), len(rows)
    return float((gained + lost + 1) / (count + 2) - ((gained - lost) / (count + 2)) ** 2)


def _variance(rows: Array) -> float:
    return float(rows.var(ddof=1)) if len(rows) > 1 else 0.0


def _ratio(values: Array, divisor: float) -> Array:
    return values / divisor if divisor else values


def _value(metric: Metric, model: Predictions) -> float:
    numerators, denominators = metric.quotients(model)
    found = metric.value(float(numerators[0]), float(denominators[0]))
    return np.nan if found is None else found
