"""Intervals of a metric of each client's model over the client's own test samples."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedrema.simulation.auc_gains import auc_difference
from fedrema.simulation.gains import (
    FEWEST_DEGREES,
    FEWEST_OF_OUTCOME,
    FEWEST_SAMPLES,
    LEVEL,
    half_width,
    pooled_deviation,
)
from fedrema.simulation.row_gains import per_row
from fedrema.tasks import Metric, Predictions

Interval = tuple[float, float]


def metric_intervals(metric: Metric, models: Sequence[Predictions]) -> list[Interval | None]:
    """Return the 95 % interval of the metric of each client; None with too few samples and for other metrics.

    Accuracy has Clopper and Pearson's exact interval. A mean over rows has a t interval whose standard deviation is at
    least that of all clients, so give all of them. AUC has DeLong's, with t of the rarer outcome's rows minus one.
    """
    if metric.name == "auc":
        return [_auc_interval(model) for model in models]
    if not metric.is_mean_over_samples:
        return [None] * len(models)
    rows = [per_row(metric, model) for model in models]
    if metric.name == "accuracy" and all(model.target.dim() == 2 for model in models):
        return [_exact(int(each.sum()), len(each)) for each in rows]
    finite = [each for each in rows if np.isfinite(each).all()]
    pooled, degrees = pooled_deviation(finite)
    return [_t_interval(metric, each, pooled) if degrees >= FEWEST_DEGREES else None for each in rows]


def _exact(right: int, count: int) -> Interval | None:
    from scipy import stats

    if count < FEWEST_SAMPLES:
        return None
    low, high = stats.binomtest(right, count).proportion_ci(1 - LEVEL, "exact")
    return float(low), float(high)


def _t_interval(metric: Metric, rows: np.ndarray, pooled: float) -> Interval | None:
    if len(rows) < FEWEST_SAMPLES or not np.isfinite(rows).all():
        return None
    half = half_width(rows, pooled)
    bounds = np.clip([rows.mean() - half, rows.mean() + half], 0.0, metric.highest)
    low, high = bounds if metric.transform is None else metric.transform(bounds)
    return float(low), float(high)


def _auc_interval(model: Predictions) -> Interval | None:
    from scipy import stats

    # Against a model that gives every sample the same score, and so has an AUC of 0.5 with no variance.
    found = auc_difference((model, replace(model, outputs=model.outputs.new_zeros(()).expand_as(model.outputs))))
    if found.fewest < FEWEST_OF_OUTCOME or model.mask.sum() < FEWEST_SAMPLES:
        return None
    half = float(stats.t.ppf(1 - LEVEL / 2, found.fewest - 1)) * np.sqrt(found.variance)
    value = found.difference + 0.5
    return max(value - half, 0.0), min(value + half, 1.0)
