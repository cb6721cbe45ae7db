"""Compute metrics: correct predictions are counted, rounds are scored, and runs are summarised."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedrema.simulation.records import MetricRecord, MetricSummary, RoundRecord, Summary


def count_correct(predicted: Tensor, labels: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return how many predictions are correct, and how many samples there are: [k, 2] each, by half.

    `predicted` [k, n] is -1 where there is no sample. Test samples are in random order, so every second sample makes
    a fair half.
    """
    is_sample = predicted >= 0
    is_correct = (predicted == labels) & is_sample
    counts = [flags[:, start::2].sum(1) for flags in (is_correct, is_sample) for start in (0, 1)]
    found = torch.stack(counts, dim=1).cpu().numpy()  # one transfer: each one waits for the GPU
    return found[:, :2], found[:, 2:]


def concatenate_counts(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the counts of several groups of clients as those of one group."""
    correct, samples = zip(*parts, strict=True)
    return np.concatenate(correct), np.concatenate(samples)


def metric_record(correct: np.ndarray, samples: np.ndarray, rows: Sequence[int], clients: int) -> MetricRecord:
    """Return the accuracy in a round from counts [k, 2] of correct predictions and of samples, by half.

    `rows` are the clients that were scored, of `clients` in all.
    """
    values: list[float | None] = [None] * clients
    for row, right, total in zip(rows, correct.sum(axis=1), samples.sum(axis=1), strict=True):
        values[row] = ratio(right, total)
    scored = sorted(value for value in values if value is not None)
    worst = scored[: math.ceil(len(scored) / 10)]
    first, second = (ratio(correct[:, half].sum(), samples[:, half].sum()) for half in (0, 1))
    return MetricRecord(
        ratio(correct.sum(), samples.sum()), (first, second), float(np.mean(worst)) if worst else None, values
    )


def ratio(correct: Any, samples: Any) -> float | None:
    """Return an accuracy; None without samples."""
    return float(correct / samples) if samples else None


def summarise(rounds: Sequence[RoundRecord], period: str | None = None) -> Summary:
    """Reduce the records of a run to its headline numbers; `period` is the name of the method's period, if any."""
    seconds = {part: sum(record.seconds[part] for record in rounds) for part in rounds[0].seconds} if rounds else {}
    names = dict.fromkeys(name for record in rounds for name in record.metrics)
    metrics = {name: found for name in names if (found := _metric_summary(rounds, name)) is not None}
    inside = [record.trace[period] for record in rounds if period is not None and period in record.trace]
    return Summary(
        len(rounds),
        metrics,
        _alternatives([record for record in rounds if record.metrics]),
        {period: sum(map(bool, inside))} if period is not None and inside else {},
        seconds,
        sum(record.bytes_up for record in rounds),
        sum(record.bytes_down for record in rounds),
    )


def _metric_summary(rounds: Sequence[RoundRecord], name: str) -> MetricSummary | None:
    scored = [(record, found) for record in rounds if (found := record.metrics.get(name)) and found.value is not None]
    if not scored:
        return None
    best_record, best = max(scored, key=lambda pair: _number(pair[1].value))
    last = scored[-5:]
    trained = [
        _number(found.value) for record, _ in last if (found := record.trained.get(name)) and found.value is not None
    ]
    return MetricSummary(
        _number(best.value),
        best_record.round,
        float(np.mean([_number(found.value) for _, found in last])),
        _honest([found.halves for _, found in scored]),
        float(np.mean([_number(found.worst_tenth) for _, found in last])),
        float(np.mean(trained)) if trained else None,
    )


def _alternatives(scored: Sequence[RoundRecord]) -> dict[str, dict[str, tuple[float, float]]]:
    pairs = sorted(
        {(name, metric) for record in scored for name, found in record.alternatives.items() for metric in found}
    )
    summary: dict[str, dict[str, tuple[float, float]]] = {}
    for name, metric in pairs:
        values = [_number(record.alternatives[name][metric]) for record in scored]
        summary.setdefault(name, {})[metric] = max(values), float(np.mean(values[-5:]))
    return summary


def _honest(halves: Sequence[tuple[float | None, float | None]]) -> float | None:
    known = [(first, second) for first, second in halves if first is not None and second is not None]
    if not known:
        return None
    chosen = [max(known, key=lambda pair: pair[choosing])[1 - choosing] for choosing in (0, 1)]
    return float(np.mean(chosen))


def _number(value: float | None) -> float:
    assert value is not None
    return value
