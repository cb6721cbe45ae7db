"""The main part of the document that the page shows, as JSON values, without data per client or pair of clients."""

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict

import msgspec

import fedrema
from fedrema.base.options import Purpose
from fedrema.config.settings import Settings
from fedrema.core.reports import HEAD_SIMILARITY
from fedrema.errors import BadInput
from fedrema.experiments.matching import true_groups
from fedrema.page.encode import plain
from fedrema.page.reading import DownsampledRun, thinned_notes
from fedrema.page.status import Status, status_of
from fedrema.reporting.curves import TRAINED, group_curve, looks_of, quantity_words
from fedrema.reporting.groups import Group, data_title, group_runs, metrics_of, paired_differences
from fedrema.reporting.plots import Look
from fedrema.reporting.quantities import KINDS, WORST_TENTH, Quantity, explanation
from fedrema.reporting.simple_models import SimpleModels, sentences, simple_models_of
from fedrema.reporting.tables import DIFFERENCES, other_data, period_columns
from fedrema.runs.manifest import FederationFacts
from fedrema.tasks import Metric

COSTS = ("epsilon", "seconds", "bytes_up", "bytes_down")
DASHES = {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot"}
HIDDEN = Settings.names(Purpose.OUTPUT, Purpose.PLACE) - {"partition-file"}
"""Settings that are not shown: local paths are omitted because the page may be shared."""
FILES = ("federation", "partition-file")
"""Settings of which only the file's name is shown."""

Json = dict[str, Any]
"""A JSON object of config.json or of a method's reports, copied unchanged."""


class MetricPart(TypedDict):
    """A metric, as `fedrema.tasks.Metric` has it."""

    name: str
    title: str
    description: str
    percent: bool
    higher_is_better: bool


class CurvePart(TypedDict):
    """A quantity by round, over the seeds of a group; shares in percent."""

    rounds: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    period_end: float | None


class GroupPart(TypedDict):
    """Runs that differ only in the training seed."""

    label: str
    method: str
    seeds: int
    colour: str
    dash: str
    emphasis: float
    reports: Json
    """The method's `fedrema.core.Reports`, with the similarity that is recorded for every method."""
    curves: dict[str, CurvePart]
    statistics: dict[str, tuple[float, float | None] | None]
    """Mean and standard deviation over seeds, by name."""


class SimplePart(TypedDict):
    """Constants or linear models of single clients."""

    label: str
    statistics: dict[str, tuple[float, None] | None]
    """The metrics, by the names of the methods' statistics."""


class Series(TypedDict):
    """A quantity by round, of one run."""

    rounds: list[int]
    values: list[float]


class RunPart(TypedDict):
    """One run."""

    group: int
    seed: int
    data: str
    names: list[str]
    classes: int
    class_names: list[str] | None
    outcome: str | None
    """What the task predicts one of: class, level or label; None for quantities and counts."""
    true_groups: list[int] | None
    train_counts: list[int] | None
    test_counts: list[int] | None
    series: dict[str, Series]
    """The method's traces by round, by name."""
    in_period: bool
    """Whether the method's period had not ended by the last round."""
    threshold: float | None
    """The value at which the method's period ends."""
    bytes: dict[str, int]
    seconds: dict[str, float]
    settings: Json
    holds: dict[str, int | str]
    ran_on: Json
    status: Status


class DifferencesPart(TypedDict):
    """Paired differences between groups and the reference."""

    reference: str
    rows: list[Json]


class MainPart(TypedDict):
    """Everything except data per client and per pair of clients."""

    title: str
    made: str
    version: str
    live: bool
    notes: list[str]
    explanation: str
    confidence: str
    metrics: list[MetricPart]
    """The primary one first."""
    words: dict[str, tuple[str, str]]
    """Title and label of each quantity by round."""
    periods: dict[str, str]
    """Headings of the columns with the lengths of methods' periods, by name."""
    groups: list[GroupPart]
    simple: list[SimplePart]
    runs: list[RunPart]
    differences: dict[str, DifferencesPart | None]
    comparable: bool


def main_part(runs: Sequence[DownsampledRun], live: bool = False, notes: Sequence[str] = ()) -> MainPart:
    """Return the main part of the document."""
    groups = group_runs(runs) if runs else []
    shown = _runs_of(groups)
    same_data = len({group.fingerprint for group in groups}) <= 1
    periods = period_columns(groups)
    metrics = metrics_of(groups)
    names = [quantity.name for quantity in _quantities(metrics)]
    try:
        simple, worse = simple_models_of(groups), _worse(groups)
    except BadInput:
        if not live:
            raise
        simple, worse = [], []
    curves = _curves(metrics)
    part: MainPart = {
        "title": data_title(groups) if groups else "",
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": fedrema.__version__,
        "live": live,
        "notes": [*notes, *thinned_notes(shown), *([] if same_data else [other_data(groups)])],
        "explanation": " ".join([explanation(metrics) if metrics else "", *worse]).strip(),
        "confidence": DIFFERENCES,
        "metrics": [_metric(metric) for metric in metrics],
        "words": {quantity: quantity_words(quantity, groups) for quantity in curves},
        "periods": periods,
        "groups": [
            _group(group, look, (*names, *periods, *COSTS), curves)
            for group, look in zip(groups, looks_of(groups), strict=True)
        ],
        "simple": [_simple(one, _quantities(metrics)) for one in simple],
        "runs": [_run(run, next(number for number, group in enumerate(groups) if run in group.runs)) for run in shown],
        "differences": {quantity: _differences(shown, quantity) for quantity in names},
        "comparable": same_data,
    }
    found: MainPart = plain(part)
    return found


def in_order(runs: Sequence[DownsampledRun]) -> list[DownsampledRun]:
    """Return the runs in the order in which every part of the document has them."""
    return _runs_of(group_runs(runs)) if runs else []


def _runs_of(groups: Sequence[Group]) -> list[DownsampledRun]:
    return [run for group in groups for run in group.runs if isinstance(run, DownsampledRun)]


def _quantities(metrics: Sequence[Metric]) -> list[Quantity]:
    """Return the quantities of the table: all of the primary metric, final ones of the others."""
    found = [Quantity(kind, metric) for metric in metrics[:1] for kind in KINDS]
    return found + [Quantity("final", metric, is_primary=False) for metric in metrics[1:]]


def _curves(metrics: Sequence[Metric]) -> list[str]:
    """Return the names of the quantities that are shown by round."""
    if not metrics:
        return []
    primary, *others = (metric.name for metric in metrics)
    return [primary, WORST_TENTH, f"{TRAINED}{primary}", "loss", *others]


def _metric(metric: Metric) -> MetricPart:
    return {
        "name": metric.name,
        "title": metric.title,
        "description": metric.description,
        "percent": metric.percent,
        "higher_is_better": metric.higher_is_better,
    }


def _group(group: Group, look: Look, quantities: Sequence[str], by_round: Sequence[str]) -> GroupPart:
    curves = {quantity: _curve(group, look, quantity) for quantity in by_round}
    reports = replace(group.reports, matrices=(HEAD_SIMILARITY, *group.reports.matrices))
    return {
        "label": group.label,
        "method": group.method,
        "seeds": len(group.counted),
        "colour": look.colour,
        "dash": DASHES[look.stroke],
        "emphasis": look.emphasis,
        "reports": msgspec.to_builtins(reports),
        "curves": {quantity: curve for quantity, curve in curves.items() if curve},
        "statistics": {
            name: (statistic.mean, statistic.spread) if (statistic := group.statistic(name)) else None
            for name in quantities
        },
    }


def _simple(one: SimpleModels, quantities: Sequence[Quantity]) -> SimplePart:
    found = {quantity.name: one.statistic(quantity) for quantity in quantities}
    return {
        "label": one.title,
        "statistics": {name: (statistic.mean, None) if statistic else None for name, statistic in found.items()},
    }


def _worse(groups: Sequence[Group]) -> list[str]:
    return sentences([(group, group.counted[0]) for group in groups], groups[0].metric) if groups else []


def _curve(group: Group, look: Look, quantity: str) -> CurvePart | None:
    try:
        curve = group_curve(group, look, quantity)
    except BadInput:  # not one number per round
        return None
    if curve is None:
        return None
    mean, low, high = ([round(float(one), 5) for one in values] for values in (curve.mean, curve.low, curve.high))
    return {"rounds": curve.rounds.tolist(), "mean": mean, "low": low, "high": high, "period_end": curve.period_end}


def _run(run: DownsampledRun, group: int) -> RunPart:
    federation, period = run.manifest.federation, run.reports.period
    series = {trace.name: _series(run, trace.name) for trace in run.reports.traces if not trace.per_client}
    in_period = [
        record.trace[period.name] for record in run.rounds if period is not None and period.name in record.trace
    ]
    return {
        "group": group,
        "seed": run.settings["seed"],
        "data": federation.fingerprint[:12],
        "names": run.names,
        "classes": federation.classes,
        "class_names": federation.class_names or None,
        "outcome": _outcome(federation),
        "true_groups": _true_groups(run),
        "train_counts": federation.train_counts or None,
        "test_counts": federation.test_counts or None,
        "series": {name: one for name, one in series.items() if one["rounds"]},
        "in_period": bool(in_period and in_period[-1]),
        "threshold": run.settings.get(period.threshold.replace("_", "-")) if period and period.threshold else None,
        "bytes": _bytes(run),
        "seconds": run.summary.seconds,
        "settings": _settings(run),
        "holds": {**_holds(federation), **_protection(run)},
        "ran_on": msgspec.to_builtins(run.manifest.ran_on),
        "status": status_of(run),
    }


def _settings(run: DownsampledRun) -> Json:
    """Return the settings that define a run."""
    shown = {name: value for name, value in run.settings.items() if name not in HIDDEN}
    for name in FILES:
        if shown.get(name):
            shown[name] = Path(shown[name]).name
    return shown


def _holds(federation: FederationFacts) -> dict[str, int]:
    """Return the size of the data; the server of a deployment may not know the number of samples."""
    outcomes = {None: "", "class": "classes"}.get(outcome := _outcome(federation), f"{outcome}s")
    facts = {"number of clients": len(federation.names)}
    facts |= {f"number of {outcomes}": federation.classes} if outcomes else {}
    counts = {"training samples": federation.train_counts, "test samples": federation.test_counts}
    return {**facts, **{name: sum(each) for name, each in counts.items() if each}}


def _protection(run: DownsampledRun) -> dict[str, int | str]:
    """Return the privacy budget that was spent, and the number of attackers; both of simulations only."""
    summary = run.summary
    found: dict[str, int | str] = {"simulated attackers": len(summary.attackers)} if summary.attackers else {}
    if summary.delta is not None:
        spent = "unlimited" if summary.epsilon is None else f"{summary.epsilon:.3g}"
        found["privacy budget ε"] = f"{spent} for δ = {summary.delta:.2g}"
    return found


def _outcome(federation: FederationFacts) -> str | None:
    if not federation.task.has_classes:
        return None
    return {"ordinal": "level", "multilabel": "label"}.get(federation.task.name, "class")


def _true_groups(run: DownsampledRun) -> list[int] | None:
    # The settings of a partition have defaults even if the data was not partitioned.
    grouped = run.manifest.federation.info.get("partition") == "grouped"
    return true_groups(run.settings, len(run.names)) if grouped else None


def _series(run: DownsampledRun, name: str) -> Series:
    known = [
        (record.round, value) for record in run.rounds if isinstance(value := record.trace.get(name), (int, float))
    ]
    return {"rounds": [number for number, _ in known], "values": [float(value) for _, value in known]}


def _bytes(run: DownsampledRun) -> dict[str, int]:
    sent = {"up": run.summary.bytes_up, "down": run.summary.bytes_down}
    return {name: count for name, count in sent.items() if count}


def _differences(runs: Sequence[DownsampledRun], quantity: str) -> DifferencesPart | None:
    found = paired_differences(runs, quantity)
    if not found:
        return None
    return {"reference": found[0].reference, "rows": [msgspec.to_builtins(one) for one in found]}
