"""The models of runs next to the constant and the linear model of each single client, which need no federation."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedrema.errors import BadInput
from fedrema.reporting.groups import Group, Statistic
from fedrema.reporting.quantities import Quantity, metric_text
from fedrema.runs.run import Run
from fedrema.simulation.final_predictions import FinalPredictions
from fedrema.simulation.records import MetricRecord
from fedrema.simulation.scoring import measure, metric_record
from fedrema.simulation.simple_models import TITLES
from fedrema.tasks import Metric

SAME = 1e-6
"""Relative difference below which two values are equal: networks compute in float32."""
MANY = 1 / 3
"""Share of the clients from which on a baseline that is worse than their constants is reported."""
MOST_KEPT = 256
_of_runs: dict[tuple[Path, int, int, str], MetricRecord] = {}
"""Metrics of the final models of runs: a live page shows them again and again."""
WORDS = {"constant": "the constant", "linear": "the linear model"}


@dataclass(frozen=True)
class SimpleModels:
    """One kind of model, fitted to each client's own training samples."""

    kind: str
    predictions: FinalPredictions
    clients: int
    _records: dict[str, MetricRecord] = field(default_factory=dict)
    """By metric: each method is compared with the same."""

    @property
    def title(self) -> str:
        """Its name in tables."""
        return TITLES.get(self.kind, self.kind)

    def record(self, metric: Metric) -> MetricRecord:
        """Return a metric over all test samples, of the worst tenth of the clients, and of each client."""
        if metric.name not in self._records:
            self._records[metric.name] = _record(self.predictions, metric, self.clients)
        return self._records[metric.name]

    def statistic(self, quantity: Quantity) -> Statistic | None:
        """Return the quantity as if the model had been trained for one round."""
        record = self.record(quantity.metric)
        value = record.worst_tenth if quantity.kind == "worst_tenth" else record.value
        return None if value is None else Statistic(value, None, 1)


@dataclass(frozen=True)
class Worse:
    """How many clients have a worse, and how many a better model than simple ones; for the others both are equal."""

    worse: int
    better: int
    clients: int
    """Clients for which the metric of both is defined."""


def simple_models_of(groups: Sequence[Group]) -> list[SimpleModels]:
    """Return the simple models that the first finished run has stored; empty if groups have different data."""
    if len({group.fingerprint for group in groups}) != 1:
        return []
    for run in (run for group in groups for run in group.counted):
        if found := run.simple_models():
            return [SimpleModels(kind, predictions, len(run.names)) for kind, predictions in found.items()]
    return []


def find_simple_models(runs: Sequence[tuple[Group, Run]], name: str | None) -> SimpleModels | None:
    """Return the simple models called `name`; None if it is not the name of a kind, or that of a method as well."""
    kind = next((kind for kind, title in TITLES.items() if name and name.casefold() in (kind, title.casefold())), None)
    if kind is None or any(kind in (group.method, group.label.casefold()) for group, _ in runs):
        return None
    found = simple_models_of([group for group, _ in runs])
    for one in found:
        if one.kind == kind:
            return one
    if found:
        raise BadInput(f"--baseline {name} is not available: these runs have no {kind} models of their clients.")
    path = runs[0][1].path
    raise BadInput(
        f"--baseline {name} needs runs on own data that have finished: {path} has no simple-models.npz (fedrema resume"
        f" {path} writes it, unless fedrema partitioned the data)."
    )


def worse_than(run: Run, simple: SimpleModels, metric: Metric) -> Worse | None:
    """Return at how many clients the final models of a run are worse; None if their predictions are not stored."""
    file = run.directory.predictions_file
    if not run.finished or not file.exists():
        return None
    facts = file.stat()
    key = (file, facts.st_mtime_ns, facts.st_size, metric.name)
    if key not in _of_runs:
        if len(_of_runs) >= MOST_KEPT:
            _of_runs.clear()
        _of_runs[key] = _record(run.predictions(), metric, len(run.names))
    mine, theirs = _of_runs[key].clients, simple.record(metric).clients
    pairs = [(one, other) for one, other in zip(mine, theirs, strict=True) if one is not None and other is not None]
    worse = [sum(_is_worse(metric, *ordered) for ordered in each) for each in (pairs, [pair[::-1] for pair in pairs])]
    return Worse(worse[0], worse[1], len(pairs))


def comparisons(runs: Sequence[tuple[Group, Run]], metric: Metric) -> dict[str, dict[str, Any]]:
    """Return for each method, by the kind of simple model, at how many clients it is worse and better than these."""
    simple = simple_models_of([group for group, _ in runs])
    return {
        group.label: {one.kind: asdict(found) for one in simple if (found := worse_than(run, one, metric))}
        for group, run in runs
    }


def sentences(runs: Sequence[tuple[Group, Run]], metric: Metric) -> list[str]:
    """Return sentences on where each method's final models are worse than simple ones; empty without simple ones."""
    found = []
    for simple in simple_models_of([group for group, _ in runs]):
        words = WORDS[simple.kind]
        worse = [(group.label, counts) for group, run in runs if (counts := worse_than(run, simple, metric))]
        parts = [
            f"{label} is worse than {words} at {each.worse} of {each.clients} clients and better at {each.better}"
            if not place or each.clients != worse[0][1].clients
            else f"{label} worse at {each.worse}, better at {each.better}"
            for place, (label, each) in enumerate(worse)
        ]
        if parts:
            found.append(f"By {metric.title}, {'; '.join(parts)}.")
    return found


def simple_table(runs: Sequence[tuple[Group, Run]], metric: Metric) -> list[tuple[str, str, str]]:
    """Return for each method and each kind of simple model: the metric over all samples, and its mean over clients."""
    found = [(group.label, run.predictions()) for group, run in runs if run.directory.predictions_file.exists()]
    found += [(one.title, one.predictions) for one in simple_models_of([group for group, _ in runs])]
    rows = []
    for label, predictions in found:
        record = _record(predictions, metric, max(predictions.rows) + 1)
        known = [value for value in record.clients if value is not None]
        values = (record.value, float(np.mean(known)) if known else None)
        over_all, mean = ("–" if value is None else metric_text(metric, value) for value in values)
        rows.append((label, over_all, mean))
    return rows


def warning(runs: Sequence[tuple[Group, Run]], baseline: str, metric: Metric) -> str:
    """Return a sentence if the baseline of a verdict is worse than the constants of many clients; otherwise ""."""
    constants = [one for one in simple_models_of([group for group, _ in runs]) if one.kind == "constant"]
    run = next((run for group, run in runs if group.label == baseline), None)
    found = worse_than(run, constants[0], metric) if constants and run is not None else None
    if found is None or found.worse < MANY * found.clients or not found.worse:
        return ""
    return (
        f"Warning: {baseline} is itself worse than the constant at {found.worse} of {found.clients} clients, so a gain "
        "over it does not show that joining is worthwhile: compare with --baseline constant and --baseline linear."
    )


def _record(found: FinalPredictions, metric: Metric, clients: int) -> MetricRecord:
    padded = found.padded(int(np.diff(found.offsets).max(initial=0)))
    return metric_record(metric, measure([metric], padded)[metric.name], found.rows, clients)


def _is_worse(metric: Metric, value: float, other: float) -> bool:
    difference = other - value if metric.higher_is_better else value - other
    return difference > SAME * max(abs(value), abs(other))
