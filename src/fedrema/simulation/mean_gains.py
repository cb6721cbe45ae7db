"""The mean of the clients' gains, each counted once, with an interval for these clients or for clients like these."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedrema.simulation.row_gains import RowGains
from fedrema.tasks import Metric

CONFIDENCE = 0.95
FEWEST_CLIENTS = 5
"""With fewer clients, their variation says too little about further clients."""
PRIOR_ROWS = 4
"""Rows that the federation's variance counts for in a client's: a few rows that do not differ have a variance of 0."""
UNKNOWN_AUC = 0.25 / 0.21
"""Variance of an AUC difference times the number of rows, where DeLong's is undefined."""

Scope = Literal["clients like these", "these clients", ""]
Interval = tuple[float, float]


@dataclass(frozen=True)
class MeanGain:
    """The mean over the clients whose gain is defined."""

    mean: float | None
    clients: int
    """The number of these clients."""
    interval: Interval | None = None
    """95 % interval; None with one client, and where there is no valid one."""
    scope: Scope = ""
    """What the interval is for. From five clients: for clients like these, by their variation. With two to four: for
    the mean of the true gains of these clients, by the variation of their test rows."""
    over_clients: Interval | None = None
    """The interval for clients like these, also with two to four clients."""


NO_MEAN = MeanGain(None, 0)


def mean_gain(metric: Metric, found: Sequence[RowGains], variances: Sequence[float]) -> MeanGain:
    """Return the mean gain; `variances` are those of `RowGains.variance`, or DeLong's for AUC."""
    chosen = [(rows, variance) for rows, variance in zip(found, variances, strict=True) if rows.is_defined]
    gains = [rows.gain for rows, _ in chosen]
    if not gains:
        return NO_MEAN
    mean = float(np.mean(gains))
    if len(gains) == 1:
        return MeanGain(mean, 1)
    over = interval_over_clients(gains)
    if len(gains) >= FEWEST_CLIENTS:
        return MeanGain(mean, len(gains), over, "clients like these", over)
    counts = np.array([rows.samples for rows, _ in chosen])
    within = _variances_of_gains(metric, counts, np.array([variance for _, variance in chosen]))
    if within is None:
        return MeanGain(mean, len(gains), over_clients=over)
    return MeanGain(mean, len(gains), interval_within_clients(gains, within, counts), "these clients", over)


def interval_over_clients(values: Sequence[float]) -> Interval:
    """Return the t interval of the mean over at least two clients, each counted once."""
    from scipy import stats

    count = len(values)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * float(np.std(values, ddof=1)) / np.sqrt(count)
    return float(np.mean(values)) - half, float(np.mean(values)) + half


def interval_within_clients(gains: Sequence[float], variances: np.ndarray, counts: np.ndarray) -> Interval:
    """Return the interval of the mean of these clients' true gains, with Welch and Satterthwaite's degrees of freedom.

    `variances` are those of the gains, `counts` the numbers of rows.
    """
    from scipy import stats

    mean, total = float(np.mean(gains)), float(variances.sum())
    if total == 0:
        return mean, mean
    freedom = total**2 / float((variances**2 / np.maximum(counts - 1, 1)).sum())
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * np.sqrt(total) / len(gains)
    return mean - half, mean + half


def _variances_of_gains(metric: Metric, counts: np.ndarray, variances: np.ndarray) -> np.ndarray | None:
    """Return the variance of each client's gain; None if it is not known for this metric."""
    if metric.name == "auc":
        return np.where(np.isfinite(variances), variances, UNKNOWN_AUC / counts)
    if metric.name == "balanced_accuracy":
        return variances
    degrees = counts - 1
    if not np.isfinite(variances).all() or not degrees.sum():
        return None
    pooled = (degrees * variances).sum() / degrees.sum()
    shrunk: np.ndarray = (degrees * variances + PRIOR_ROWS * pooled) / (counts - 1 + PRIOR_ROWS) / counts
    return shrunk
