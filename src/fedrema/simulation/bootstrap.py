"""Bootstrap intervals of metrics, and of the difference between two models' metrics on the same samples."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from fedrema.base.random import Part, numpy_generator
from fedrema.engine.devices import torch_threads
from fedrema.tasks import Metric, Predictions

RESAMPLES = 2000
CONFIDENCE = 0.95
FEWEST_SAMPLES = 10
"""With fewer test samples, no conclusion is drawn."""
CELLS = 2**21
"""Resampled numbers that are held in memory at once."""
ROUNDING = 1e-12
"""Relative difference below which two values are equal: sums in another order differ in their last bits."""

Conclusion = Literal["gain", "loss", "no difference shown", "too few samples"]
CONCLUSIONS: tuple[Conclusion, ...] = ("gain", "loss", "no difference shown", "too few samples")


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
    """Lower end of the 95 % interval; None with too few samples."""
    high: float | None
    conclusion: Conclusion


def paired_gains(metric: Metric, models: Sequence[Predictions], baseline: Predictions, *key: Part) -> list[Gain]:
    """Compare several models with a baseline on the samples of one client [1, n, ...].

    Samples are drawn with replacement, the same ones for all models. The interval is between the 2.5 and the 97.5 %
    quantile of the gain over the resamples in which the metric is defined. `key` keys the random numbers.
    """
    with torch_threads(1):  # measured: with two threads, these small operations take up to four times as long
        return _paired_gains(metric, models, baseline, *key)


def _paired_gains(metric: Metric, models: Sequence[Predictions], baseline: Predictions, *key: Part) -> list[Gain]:
    together = [baseline, *models]
    count = int(baseline.mask.sum())
    values = np.array([_whole(metric, each) for each in together])
    drawn = (
        _resampled(metric, together, count, *key) if count >= FEWEST_SAMPLES else np.full((len(together), 1), np.nan)
    )
    return [
        _gain(metric, count, values[place], values[0], differences(metric, drawn[place], drawn[0]))
        for place in range(1, len(together))
    ]


def metric_interval(metric: Metric, model: Predictions, *key: Part) -> tuple[float, float] | None:
    """Return the bootstrap interval of a metric over the samples of one client [1, n, ...]; None with too few samples.

    Samples are drawn with replacement; resamples in which the metric is undefined are left out.
    """
    count = int(model.mask.sum())
    if count < FEWEST_SAMPLES:
        return None
    (drawn,) = _resampled(metric, [model], count, *key)
    defined = drawn[~np.isnan(drawn)]
    return None if 2 * len(defined) < len(drawn) else _interval(defined)


def mean_interval(gains: Sequence[float], *key: Part) -> tuple[float, float] | None:
    """Return the bootstrap interval of the mean over clients, which are drawn with replacement; None for one client."""
    if len(gains) < 2:
        return None
    means = [np.asarray(gains)[index].mean(axis=1) for index in _drawn(len(gains), *key)]
    return _interval(np.concatenate(means))


def differences(metric: Metric, mine: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Return by how much values are better than others; 0 where they differ by rounding only."""
    found = (mine - theirs) if metric.higher_is_better else (theirs - mine)
    size = np.maximum(np.maximum(np.abs(mine), np.abs(theirs)), 1)
    return np.where(np.abs(found) <= ROUNDING * size, 0.0, found)


def _gain(metric: Metric, count: int, value: float, baseline: float, resampled: np.ndarray) -> Gain:
    gain = float(differences(metric, np.array(value), np.array(baseline)))
    defined = resampled[~np.isnan(resampled)]
    shown = (_known(value), _known(baseline), _known(gain))
    if math.isnan(gain) or 2 * len(defined) < len(resampled):
        return Gain(count, *shown, None, None, "too few samples")
    low, high = _interval(defined)
    conclusion: Conclusion = "gain" if low > 0 else "loss" if high < 0 else "no difference shown"
    return Gain(count, *shown, low, high, conclusion)


def _interval(values: np.ndarray) -> tuple[float, float]:
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _drawn(count: int, *key: Part) -> Iterator[np.ndarray]:
    """Yield the resamples as indices [b, count], in blocks whose size depends on the count only."""
    generator = numpy_generator("verdict", *key)
    block = max(1, CELLS // max(1, count))
    for start in range(0, RESAMPLES, block):
        yield generator.integers(0, count, (min(block, RESAMPLES - start), count))


def _whole(metric: Metric, model: Predictions) -> float:
    """Return the metric over all samples; NaN where it is undefined."""
    return float(_values(metric, *(part.numpy() for part in metric.quotients(model)))[0])


def _resampled(metric: Metric, models: Sequence[Predictions], count: int, *key: Part) -> np.ndarray:
    """Return the metric of each model in each resample [models, resamples]."""
    additive = metric.is_mean_over_samples
    quotients = np.stack([_per_sample(metric, model) for model in models], -1) if additive else None
    blocks = []
    for index in _drawn(count, *key):
        if quotients is not None:
            times = _times_drawn(index, count)
            numerators, denominators = times @ quotients[0], times @ quotients[1]  # [b, models]
            blocks.append(_values(metric, numerators.T, denominators.T))
        else:
            blocks.append(np.stack([_each(metric, model, index) for model in models]))
    return np.concatenate(blocks, axis=1)


def _per_sample(metric: Metric, model: Predictions) -> np.ndarray:
    """Return numerators and denominators of single samples [2, n], as if each were a client."""
    outputs, target = model.outputs[0][:, None], model.target[0][:, None]
    single = Predictions(model.task, outputs, target, torch.ones(len(outputs), 1, dtype=torch.bool))
    return torch.stack(metric.quotients(single)).numpy()


def _times_drawn(index: np.ndarray, count: int) -> np.ndarray:
    """Return how often each sample is part of each resample [b, count]."""
    resamples = len(index)
    places = index + count * np.arange(resamples)[:, None]
    return np.bincount(places.ravel(), minlength=resamples * count).reshape(resamples, count).astype(np.float64)


def _each(metric: Metric, model: Predictions, index: np.ndarray) -> np.ndarray:
    """Return the metric in each resample, computed from its samples, as if each resample were a client."""
    found = []
    outputs, target = model.outputs[0], model.target[0]
    at_once = max(1, len(index) // outputs.shape[-1])  # as much memory as an additive metric takes
    for rows in torch.split(torch.from_numpy(index), at_once):
        drawn = Predictions(model.task, outputs[rows], target[rows], torch.ones_like(rows, dtype=torch.bool))
        found.append(_values(metric, *(part.numpy() for part in metric.quotients(drawn))))
    return np.concatenate(found)


def _values(metric: Metric, numerators: np.ndarray, denominators: np.ndarray) -> np.ndarray:
    """Return the metric from numerators and denominators; NaN where it is undefined."""
    known = denominators > 0
    quotients = np.full(numerators.shape, np.nan)
    np.divide(numerators, denominators, out=quotients, where=known)
    return quotients if metric.transform is None else metric.transform(quotients)
