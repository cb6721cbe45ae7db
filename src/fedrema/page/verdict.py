"""The part of the document about each client's gain over a baseline."""

from collections.abc import Sequence
from typing import Any, TypedDict

from fedrema.errors import BadInput
from fedrema.page.encode import plain
from fedrema.page.reading import DownsampledRun
from fedrema.reporting.simple_models import warning
from fedrema.reporting.verdict import EXPLANATION, Verdict, baseline_of, first_runs, verdicts
from fedrema.simulation.scoring import metric_for

MOST_SAMPLES = 100_000
"""Test samples of the federation up to which the page computes intervals."""
MOST_INTERVALS = 5_000
"""Clients × methods up to which the page computes intervals: about 10 seconds."""


class VerdictOfMethod(TypedDict):
    """The gains of one method's clients; shares where the metric is shown in per cent."""

    label: str
    sentence: str
    counts: dict[str, int]
    mean_gain: float | None
    low: float | None
    high: float | None
    clients: list[dict[str, Any]]
    """As in `fedrema verdict --json`; largest gain first."""


class VerdictPart(TypedDict):
    """Everything that the section shows; without methods, `note` says why, or is empty where it is not shown."""

    baseline: str
    metric: str
    percent: bool
    explanation: str
    note: str
    warning: str
    """If the baseline is worse than the constants of many clients; otherwise empty."""
    methods: list[VerdictOfMethod]


def verdict_part(runs: Sequence[DownsampledRun], live: bool = False) -> VerdictPart:
    """Return the gains of all methods over Local, or over FedAvg where there is no run of Local.

    Runs that have not finished, and those without predictions, are left out. A damaged file is an error, except on a
    live page.
    """
    if not (groups := first_runs(runs) if runs else []):
        return _nothing()
    try:
        against = baseline_of([group for group, _ in groups])
    except BadInput:
        return _nothing()
    theirs = next(run for group, run in groups if group is against)
    same = [pair for pair in groups if pair[0].fingerprint == against.fingerprint]
    usable = [(group, run) for group, run in same if run.finished and run.directory.predictions_file.exists()]
    if len(same) < 2 or theirs.manifest.federation.is_deployed:
        return _nothing()
    if not any(run is theirs for _, run in usable) or len(usable) < 2:
        return _nothing(f"Available when {against.label} and another method have finished.")
    metric = metric_for(theirs.manifest.federation.task)
    samples = sum(theirs.manifest.federation.test_counts)
    if samples > MOST_SAMPLES or len(theirs.names) * len(usable) > MOST_INTERVALS:
        return _nothing("Not computed here for so many clients or test samples: fedrema verdict computes it.")
    try:
        found = verdicts([run for _, run in usable], baseline=against.label)
        doubt = warning(usable, against.label, metric)
    except BadInput:
        if not live:
            raise
        return _nothing("The predictions of a run cannot be read: fedrema resume writes them again.")
    part: VerdictPart = {
        "baseline": against.label,
        "metric": metric.title,
        "percent": metric.percent,
        "explanation": f"{EXPLANATION}{_seeds([group.label for group, _ in usable if len(group.runs) > 1])}",
        "note": "",
        "warning": doubt,
        "methods": [_method(one) for one in found],
    }
    shown: VerdictPart = plain(part)
    return shown


def _method(one: Verdict) -> VerdictOfMethod:
    content = one.as_json()
    return {
        "label": one.label,
        "sentence": " ".join([one.sentence(), *one.notes()]),
        "counts": one.counts,
        "mean_gain": one.mean_gain,
        "low": one.low,
        "high": one.high,
        "clients": content["clients"],
    }


def _seeds(labels: Sequence[str]) -> str:
    return f" Of several seeds, the first is used ({', '.join(labels)})." if labels else ""


def _nothing(note: str = "") -> VerdictPart:
    return {
        "baseline": "",
        "metric": "",
        "percent": False,
        "explanation": "",
        "note": note,
        "warning": "",
        "methods": [],
    }
