"""The page's document: everything that it shows, as plain data, in three parts that grow at different speeds."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fedrema
from fedrema.data.options import UNUSED
from fedrema.errors import BadInput
from fedrema.experiments.matching import true_groups
from fedrema.page.encode import plain
from fedrema.page.reading import ThinnedRun, thinned_notes
from fedrema.page.status import status_of
from fedrema.reporting.curves import WORDS, group_curve
from fedrema.reporting.differences import Difference, paired_differences
from fedrema.reporting.groups import Group, data_title, group_runs
from fedrema.reporting.plots import Look, looks
from fedrema.reporting.tables import DIFFERENCES, EXPLANATION, OTHER_DATA

ACCURACIES = ("honest_accuracy", "best_accuracy", "final_accuracy", "worst_tenth")
QUANTITIES = ("accuracy", "worst_tenth", "trained_accuracy", "loss")
DASHES = {"-": "solid", "--": "dash", "-.": "dashdot", ":": "dot"}
PLACES = ("out", "overwrite", "config", "tuned", "quiet", "open", "track", "data-dir", "scratch")
SCALARS = ("mean_gap", "gap_ratio", "critical", "own_weight")


def main_part(runs: Sequence[ThinnedRun], live: bool = False, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Return all but single clients and pairs of clients."""
    groups = group_runs(runs) if runs else []
    counted = [run for group in groups for run in group.runs if isinstance(run, ThinnedRun)]
    same_data = len({group.fingerprint for group in groups}) <= 1
    shown = zip(groups, looks([group.method for group in groups]), strict=True)
    found: dict[str, Any] = plain(
        {
            "title": data_title(groups) if groups else "",
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "version": fedrema.__version__,
            "live": live,
            "notes": [*notes, *thinned_notes(counted), *([] if same_data else [OTHER_DATA])],
            "explanation": EXPLANATION,
            "confidence": DIFFERENCES,
            "words": {quantity: WORDS[quantity] for quantity in QUANTITIES},
            "groups": [_group(group, look) for group, look in shown],
            "runs": [_run(run, next(at for at, group in enumerate(groups) if run in group.runs)) for run in counted],
            "differences": {quantity: _differences(counted, quantity) for quantity in ACCURACIES} if groups else {},
            "comparable": same_data,
        }
    )
    return found


def order(runs: Sequence[ThinnedRun]) -> list[ThinnedRun]:
    """Return the runs in the order in which every part of the document has them."""
    return [run for group in group_runs(runs) for run in group.runs if isinstance(run, ThinnedRun)]


def _group(group: Group, look: Look) -> dict[str, Any]:
    curves = {quantity: _curve(group, look, quantity) for quantity in QUANTITIES}
    quantities = (*ACCURACIES, "critical_rounds", "seconds", "bytes_up", "bytes_down")
    return {
        "label": group.label,
        "method": group.method,
        "seeds": len(group.counted),
        "colour": look.colour,
        "dash": DASHES[look.stroke],
        "emphasis": look.emphasis,
        "curves": {quantity: curve for quantity, curve in curves.items() if curve},
        "statistics": {
            name: [statistic.mean, statistic.spread] if (statistic := group.statistic(name)) else None
            for name in quantities
        },
    }


def _curve(group: Group, look: Look, quantity: str) -> dict[str, Any] | None:
    try:
        curve = group_curve(group, look, quantity)
    except BadInput:  # not a number per round
        return None
    if curve is None:
        return None
    digits = {name: [round(float(one), 5) for one in getattr(curve, name)] for name in ("mean", "low", "high")}
    return {"rounds": curve.rounds.tolist(), **digits, "critical_end": curve.critical_end}


def _run(run: ThinnedRun, group: int) -> dict[str, Any]:
    traces = [(record.round, record.trace) for record in run.rounds]
    scalars = {name: _series(traces, name) for name in SCALARS}
    federation = run.config["federation"]
    return {
        "group": group,
        "seed": run.settings["seed"],
        "data": str(federation["fingerprint"])[:12],
        "names": run.names,
        "classes": federation.get("classes"),
        "class_names": federation.get("class_names"),
        "true_groups": _groups(run),
        "train_counts": federation.get("train_counts"),
        "test_counts": federation.get("test_counts"),
        "series": {name: pairs for name, pairs in scalars.items() if pairs["rounds"]},
        "delta": run.settings.get("delta"),
        "bytes": _bytes(run),
        "seconds": run.summary.get("seconds", {}),
        "settings": _settings(run),
        "holds": _holds(federation),
        "ran_on": run.config.get("ran_on", {}),
        "status": status_of(run),
    }


def _settings(run: ThinnedRun) -> dict[str, Any]:
    """Return the settings that define a run. Local paths are omitted because the page may be shared."""
    left_out: tuple[str, ...] = PLACES
    if "dataset" not in run.config["federation"].get("info", {}):
        # Older versions recorded these for own data too, where they mean nothing.
        left_out = (*PLACES, *(name.replace("_", "-") for name in UNUSED))
    shown = {name: value for name, value in run.settings.items() if name not in left_out}
    for name in ("federation", "partition-file"):
        if shown.get(name):
            shown[name] = Path(shown[name]).name
    return shown


def _holds(federation: dict[str, Any]) -> dict[str, Any]:
    """Return what the clients really hold; a deployment's server does not know how many samples that is."""
    counts = {"training samples": federation.get("train_counts"), "test samples": federation.get("test_counts")}
    facts = {"number of clients": len(federation["names"]), "number of classes": federation.get("classes")}
    return {**facts, **{name: sum(each) for name, each in counts.items() if each}}


def _groups(run: ThinnedRun) -> list[int] | None:
    # Settings have defaults that mean nothing where clients brought their own data.
    dealt = run.config["federation"].get("info", {}).get("partition") == "grouped"
    return true_groups(run.settings, len(run.names)) if dealt else None


def _series(traces: Sequence[tuple[int, Mapping[str, Any]]], name: str) -> dict[str, Any]:
    known = [(number, trace[name]) for number, trace in traces if isinstance(trace.get(name), (int, float, bool))]
    return {"rounds": [number for number, _ in known], "values": [value for _, value in known]}


def _bytes(run: ThinnedRun) -> dict[str, Any]:
    return {name: run.summary[f"bytes_{name}"] for name in ("up", "down") if run.summary.get(f"bytes_{name}")}


def _differences(runs: Sequence[ThinnedRun], quantity: str) -> dict[str, Any] | None:
    found: list[Difference] = paired_differences(runs, quantity)
    if not found:
        return None
    rows = [{name: getattr(one, name) for name in ("label", "pairs", "mean", "low", "high", "reason")} for one in found]
    return {"reference": found[0].reference, "rows": rows}
