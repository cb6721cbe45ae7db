"""Gains of single clients over a baseline on the same test samples, with intervals and conclusions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from fedrema.engine.devices import torch_threads
from fedrema.simulation.auc_gains import AucDifference, auc_difference, exchange_p
from fedrema.simulation.mean_gains import NO_MEAN, MeanGain, mean_gain
from fedrema.simulation.row_gains import Pair, RowGains, row_gains
from fedrema.tasks import Metric

# scipy.stats is imported where it is used: importing it is slow, and most commands do not need it.

LEVEL = 0.05
FEWEST_SAMPLES = 10
"""With fewer test samples, no conclusion is drawn."""
FEWEST_OF_OUTCOME = 5
"""With fewer rows of an outcome, no conclusion is drawn that depends on it."""
FEW_EVENTS = 10
"""With fewer rows of an outcome, a conclusion carries a note; with fewer in the federation, there is no mean gain."""
FEWEST_DEGREES = 100
"""Degrees of freedom on which the federation's standard deviation must rest."""
RARE = 0.1
"""Share of the rows below which one of two outcomes is rare."""

Conclusion = Literal["gain", "loss", "no difference shown", "too few samples", "not tested"]
CONCLUSIONS: tuple[Conclusion, ...] = ("gain", "loss", "no difference shown", "too few samples", "not tested")


@dataclass(frozen=True)
class Gain:
    """By how much a model is better than another one on the same samples; positive is better for every metric."""

    samples: int
    value: float | None
    """The metric of the model; None where it is undefined."""
    baseline: float | None
    """The metric of the model that it is compared with."""
    gain: float | None
    low: float | None
    """Lower end of the 95 % interval; None without a conclusion."""
    high: float | None
    conclusion: Conclusion
    p: float | None = None
    """P-value of exchanging the ranks of an AUC, which must agree with the interval; None for other metrics."""
    events: int | None = None
    """Rows of the rarest outcome, if the conclusion depends on them."""
    spread: float | None = None
    """Standard deviation of the client's row gains divided by the federation's; None for other metrics."""


@dataclass(frozen=True)
class Gains:
    """The gains of all clients, in their order, and their mean."""

    clients: tuple[Gain, ...]
    mean: MeanGain


def compare_models(metric: Metric, pairs: Mapping[str, Pair | None]) -> Gains:
    """Compare two models of each client; None is a client without predictions. Names key random numbers."""
    with torch_threads(1):  # measured: with two threads, these small operations take up to four times as long
        known = {name: pair for name, pair in pairs.items() if pair is not None}
        found = {name: row_gains(metric, pair) for name, pair in known.items()}
        events = _rare_events(known)
        gains = {name: _untested(rows) for name, rows in found.items()}
        variances = {name: rows.variance for name, rows in found.items()}
        if metric.name == "auc":
            for name, rows in found.items():
                compared = auc_difference(known[name])
                variances[name] = compared.variance
                gains[name] = _auc_gain(rows, compared, name)
        elif metric.name == "balanced_accuracy":
            floors = _floors_of_classes(list(found.values()))
            gains = {name: _gain_over_classes(rows, floors) for name, rows in found.items()}
        elif metric.is_mean_over_samples:
            floor = pooled_deviation([rows.groups[0] for rows in found.values() if rows.is_defined])
            gains = {name: _gain_over_rows(metric, rows, floor) for name, rows in found.items()}
        if events is not None:
            gains = {name: _with_events(gain, events[name]) for name, gain in gains.items()}
        nobody = Gain(0, None, None, None, None, None, "too few samples")
        enough = events is None or sum(events.values()) >= FEW_EVENTS
        mean = mean_gain(metric, list(found.values()), list(variances.values())) if enough else NO_MEAN
        return Gains(tuple(gains.get(name, nobody) for name in pairs), mean)


def _rare_events(pairs: Mapping[str, Pair]) -> dict[str, int] | None:
    """Return each client's rows of the rarer of two outcomes, if it is rare in the federation; otherwise None."""
    tasks = [model.task for model, _ in pairs.values()]
    if not tasks or not tasks[0].has_softmax or tasks[0].classes != 2:
        return None
    counts = {name: int((model.target == 1).sum()) for name, (model, _) in pairs.items()}
    rows = {name: model.target.shape[1] for name, (model, _) in pairs.items()}
    share = sum(counts.values()) / max(1, sum(rows.values()))
    if RARE <= share <= 1 - RARE:
        return None
    return counts if share < RARE else {name: rows[name] - counts[name] for name in counts}


def _with_events(gain: Gain, events: int) -> Gain:
    gain = replace(gain, events=events)
    if events >= FEWEST_OF_OUTCOME or gain.conclusion == "not tested":
        return gain
    return replace(gain, low=None, high=None, p=None, conclusion="too few samples")


def _untested(rows: RowGains) -> Gain:
    """Return a gain without a conclusion: for F1, R² and the calibration error there is no test known to be valid."""
    conclusion: Conclusion = "not tested" if rows.is_defined else "too few samples"
    return _gain(rows, None, None, conclusion)


def _gain(rows: RowGains, low: float | None, high: float | None, conclusion: Conclusion) -> Gain:
    value, baseline, gain = (
        float(number) if np.isfinite(number) else None for number in (rows.value, rows.baseline, rows.gain)
    )
    return Gain(rows.samples, value, baseline, gain, low, high, conclusion)


def _conclusion(low: float, high: float) -> Conclusion:
    return "gain" if low > 0 else "loss" if high < 0 else "no difference shown"


def pooled_deviation(groups: Sequence[np.ndarray]) -> tuple[float, int]:
    """Return the pooled standard deviation of several clients' rows, and its degrees of freedom."""
    known = [rows for rows in groups if len(rows) > 1]
    degrees = sum(len(rows) - 1 for rows in known)
    squares = sum(float(np.square(rows - rows.mean()).sum()) for rows in known)
    return (float(np.sqrt(squares / degrees)), degrees) if degrees else (0.0, 0)


def half_width(rows: np.ndarray, pooled: float) -> float:
    """Return half the width of the t interval of a mean over rows, with a standard deviation of at least `pooled`."""
    from scipy import stats

    deviation = max(float(rows.std(ddof=1)), pooled)
    return float(stats.t.ppf(1 - LEVEL / 2, len(rows) - 1)) * deviation / float(np.sqrt(len(rows)))


def _gain_over_rows(metric: Metric, rows: RowGains, floor: tuple[float, int]) -> Gain:
    """Conclude from a t interval whose standard deviation is at least that of the federation.

    A client with few rows seldom has the rare large losses that would widen its own interval; the other clients have.
    """
    from scipy import stats

    pooled, degrees = floor
    # In a small federation the floor is uncertain. McNemar's exact test needs none, but counts correct rows only.
    is_exact = metric.name == "accuracy" and degrees < FEWEST_DEGREES and _is_ternary(rows)
    if not rows.is_defined or rows.samples < FEWEST_SAMPLES or (degrees < FEWEST_DEGREES and not is_exact):
        return _gain(rows, None, None, "too few samples")
    (values,) = rows.groups
    own = float(values.std(ddof=1))
    half = half_width(values, pooled)
    low, high = ((float(values.mean()) + sign * half) / rows.scale for sign in (-1, 1))
    if is_exact:
        differing = int((values != 0).sum())
        if not differing or stats.binomtest(int((values > 0).sum()), differing).pvalue > LEVEL:
            low, high = min(low, 0.0), max(high, 0.0)
    # Without any variation, there is nothing to judge a difference by: all rows of a constant model can be alike.
    conclusion = _conclusion(low, high) if own > 0 or is_exact else "no difference shown"
    spread = own / pooled if pooled else None
    return replace(_gain(rows, low, high, conclusion), spread=spread)


def _is_ternary(rows: RowGains) -> bool:
    return all(bool(np.isin(group, (-1.0, 0.0, 1.0)).all()) for group in rows.groups)


def _floors_of_classes(found: Sequence[RowGains]) -> dict[int, tuple[float, int]]:
    labels = {label for rows in found for label in rows.classes}
    return {
        label: pooled_deviation([rows.groups[rows.classes.index(label)] for rows in found if label in rows.classes])
        for label in labels
    }


def _gain_over_classes(rows: RowGains, floors: Mapping[int, tuple[float, int]]) -> Gain:
    """Conclude on a mean of independent means, one per class, with Welch's degrees of freedom and the same floor."""
    from scipy import stats

    if not rows.is_defined:
        return _gain(rows, None, None, "too few samples")
    counts = np.array([len(group) for group in rows.groups])
    pooled = [floors[label] for label in rows.classes]
    # With one of two classes, balanced accuracy is the recall of that class: equally good models can differ in it.
    fewest = 0 if len(floors) == 2 and len(counts) == 1 else int(counts.min())
    few = rows.samples < FEWEST_SAMPLES or fewest < FEWEST_OF_OUTCOME
    if few or min(degrees for _, degrees in pooled) < FEWEST_DEGREES:
        return replace(_gain(rows, None, None, "too few samples"), events=fewest)
    deviations = [max(float(group.std(ddof=1)), one) for group, (one, _) in zip(rows.groups, pooled, strict=True)]
    squares = np.square(deviations) / counts / len(counts) ** 2
    total = float(squares.sum())
    freedom = total**2 / float((squares**2 / (counts - 1)).sum()) if total else 1.0
    half = float(stats.t.ppf(1 - LEVEL / 2, freedom)) * np.sqrt(total)
    low, high = rows.gain - half, rows.gain + half
    conclusion = _conclusion(low, high) if total else "no difference shown"
    return replace(_gain(rows, low, high, conclusion), events=fewest)


def _auc_gain(rows: RowGains, compared: AucDifference, name: str) -> Gain:
    """Conclude from an exchange of ranks, if DeLong's interval agrees.

    The exchange alone supposes equal ROC curves. If they differ while the areas are equal, it is wrong in up to 9 % of
    cases with 10 % positive rows.
    """
    from scipy import stats

    if not rows.is_defined or rows.samples < FEWEST_SAMPLES or compared.fewest < FEWEST_OF_OUTCOME:
        return replace(_gain(rows, None, None, "too few samples"), events=compared.fewest)
    p = exchange_p(compared, name)
    half = float(stats.t.ppf(1 - LEVEL / 2, compared.freedom)) * np.sqrt(compared.variance)
    low, high = max(rows.gain - half, -1.0), min(rows.gain + half, 1.0)
    gain = _gain(rows, low, high, "no difference shown" if p > LEVEL else _conclusion(low, high))
    return replace(gain, p=p, events=compared.fewest)
