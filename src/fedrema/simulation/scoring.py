"""Score clients, summarise their scores in the record of a round, and summarise the rounds of a run."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedrema.errors import BadInput
from fedrema.simulation.records import MetricRecord, MetricSummary, RoundRecord, Summary
from fedrema.tasks import METRICS, Metric, Predictions, Task, find_metric

MetricSums = dict[str, np.ndarray]
"""By name of the metric [k, 3, 2]: numerator and denominator over each half and over all of a client's samples."""


def metric_for(task: Task, name: str | None = None) -> Metric:
    """Return a metric of a task; default: the primary one."""
    metric = find_metric(name or task.primary)
    if task.name not in metric.tasks:
        valid = ", ".join(each.name for each in METRICS.values() if task.name in each.tasks)
        raise BadInput(f"--metric {name} is not defined for the task {task.name}; valid are {valid}.")
    return metric


def measure(metrics: Sequence[Metric], predictions: Predictions) -> MetricSums:
    """Return numerators and denominators of metrics for each client."""
    parts = predictions.with_halves()
    sums = torch.stack([torch.stack(metric.quotients(parts), -1) for metric in metrics])  # [metrics, 3 k, 2]
    found = sums.cpu().numpy().reshape(len(metrics), 3, -1, 2).swapaxes(1, 2)  # one transfer: each waits for the GPU
    return {metric.name: values for metric, values in zip(metrics, found, strict=True)}


def measure_accuracy(predicted: Tensor, labels: Tensor) -> MetricSums:
    """Return numerators and denominators of the accuracy, from predicted classes [k, n]; -1 is no sample."""
    is_sample = predicted >= 0
    is_correct = (predicted == labels) & is_sample
    counts = [flags[:, start::2].sum(1) for start in (0, 1) for flags in (is_correct, is_sample)]
    halves = torch.stack(counts, dim=1).cpu().numpy().reshape(-1, 2, 2)  # one transfer: each one waits for the GPU
    return {"accuracy": np.concatenate([halves, halves.sum(axis=1, keepdims=True)], axis=1)}


def concatenate_sums(parts: Sequence[MetricSums]) -> MetricSums:
    """Return the sums of several groups of clients as those of one group."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def metric_records(sums: MetricSums, rows: Sequence[int], clients: int) -> dict[str, MetricRecord]:
    """Return the metrics of a round; `rows` are the clients that were scored, of `clients` in all."""
    return {name: metric_record(find_metric(name), found, rows, clients) for name, found in sums.items()}


def metric_record(metric: Metric, sums: np.ndarray, rows: Sequence[int], clients: int) -> MetricRecord:
    """Return a metric in a round from its numerators and denominators [k, 3, 2]."""
    values: list[float | None] = [None] * clients
    for row, (numerator, denominator) in zip(rows, sums[:, 2].tolist(), strict=True):
        values[row] = metric.value(numerator, denominator)
    scored = sorted((value for value in values if value is not None), reverse=not metric.higher_is_better)
    worst = scored[: math.ceil(len(scored) / 10)]
    first, second, everything = (metric.value(*sums[:, part].sum(axis=0).tolist()) for part in range(3))
    return MetricRecord(everything, (first, second), float(np.mean(worst)) if worst else None, values)


def overall(sums: MetricSums) -> dict[str, float | None]:
    """Return each metric over all samples."""
    return {name: find_metric(name).value(*found[:, 2].sum(axis=0).tolist()) for name, found in sums.items()}


def summarise(rounds: Sequence[RoundRecord], period: str | None = None) -> Summary:
    """Reduce the records of a run to its headline numbers; `period` is the name of the method's period, if any."""
    seconds = {part: sum(record.seconds[part] for record in rounds) for part in rounds[0].seconds} if rounds else {}
    names = dict.fromkeys(name for record in rounds for name in record.metrics)
    metrics = {name: found for name in names if (found := _metric_summary(rounds, name)) is not None}
    private = [record.privacy for record in rounds if record.privacy is not None]
    inside = [record.trace[period] for record in rounds if period is not None and period in record.trace]
    return Summary(
        len(rounds),
        metrics,
        _alternatives([record for record in rounds if record.metrics]),
        {period: sum(map(bool, inside))} if period is not None and inside else {},
        seconds,
        sum(record.bytes_up for record in rounds),
        sum(record.bytes_down for record in rounds),
        epsilon=private[-1].epsilon if private else None,
        delta=private[-1].delta if private else None,
        attackers=sorted({row for record in rounds for row in record.attackers}),
    )


def _metric_summary(rounds: Sequence[RoundRecord], name: str) -> MetricSummary | None:
    scored = [(record, found) for record in rounds if (found := record.metrics.get(name)) and found.value is not None]
    if not scored:
        return None
    sign = 1 if find_metric(name).higher_is_better else -1
    best_record, best = max(scored, key=lambda pair: sign * _number(pair[1].value))
    last = scored[-5:]
    trained = [
        _number(found.value) for record, _ in last if (found := record.trained.get(name)) and found.value is not None
    ]
    return MetricSummary(
        _number(best.value),
        best_record.round,
        float(np.mean([_number(found.value) for _, found in last])),
        _honest([found.halves for _, found in scored], sign),
        float(np.mean([_number(found.worst_tenth) for _, found in last])),
        float(np.mean(trained)) if trained else None,
    )


def _alternatives(scored: Sequence[RoundRecord]) -> dict[str, dict[str, tuple[float, float]]]:
    pairs = sorted(
        {(name, metric) for record in scored for name, found in record.alternatives.items() for metric in found}
    )
    summary: dict[str, dict[str, tuple[float, float]]] = {}
    for name, metric in pairs:
        found = [record.alternatives.get(name, {}).get(metric) for record in scored]
        values = [value for value in found if value is not None]
        if not values:
            continue
        best = max(values) if find_metric(metric).higher_is_better else min(values)
        summary.setdefault(name, {})[metric] = best, float(np.mean(values[-5:]))
    return summary


def _honest(halves: Sequence[tuple[float | None, float | None]], sign: int) -> float | None:
    known = [(first, second) for first, second in halves if first is not None and second is not None]
    if not known:
        return None
    chosen = [max(known, key=lambda pair: sign * pair[choosing])[1 - choosing] for choosing in (0, 1)]
    return float(np.mean(chosen))


def _number(value: float | None) -> float:
    assert value is not None
    return value


def trained_metrics(scores: Sequence[MetricSums], scored: Tensor) -> dict[str, MetricRecord]:
    """Return the metrics of those participants that are scored, after local training; empty if there are none."""
    if not scores or not scored.any():
        return {}
    sums = {name: found[scored.numpy()] for name, found in concatenate_sums(scores).items()}
    return metric_records(sums, scored.nonzero()[:, 0].tolist(), len(scored))
