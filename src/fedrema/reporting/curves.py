"""Curves of groups of runs by round, as a figure for a paper."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedrema.core.reports import Trace
from fedrema.errors import BadInput
from fedrema.reporting.groups import Group, data_title, group_runs
from fedrema.reporting.plots import (
    LEAST_FRAME,
    Curve,
    Look,
    about_curves,
    curve_over_seeds,
    cut_start,
    draw_lines,
    looks,
    name_curves,
)
from fedrema.reporting.quantities import WORST_TENTH, capitalised
from fedrema.runs.run import Run
from fedrema.tasks import METRICS, Metric

if TYPE_CHECKING:
    from fedrema.base.figures import Figure

TRAINED = "trained_"


def draw_curves(
    runs: Sequence[Run],
    path: Path | str,
    quantity: str | None = None,
    size: tuple[float, float] = (7.2, 4.4),
    dots_per_inch: int = 200,
) -> None:
    """Draw a mean curve per group of runs, with a band over its seeds, as PNG, SVG or PDF by the file's suffix.

    `quantity` and `size` are those of `curves_figure`.
    """
    path = Path(path)
    image_format(path)
    curves_figure(runs, quantity, size).write(path, dots_per_inch)


def curves_figure(runs: Sequence[Run], quantity: str | None = None, size: tuple[float, float] = (7.2, 4.4)) -> "Figure":
    """Return a figure with a mean curve per group of runs, with a band over its seeds.

    `quantity` is any number in a round's record or in the method's trace; groups without it are left out. Default: the
    task's primary metric. `size` is in inches.
    """
    groups = group_runs(runs)
    quantity = quantity or groups[0].metric.name
    shown = zip(groups, looks_of(groups), strict=True)
    curves = [curve for group, look in shown if (curve := group_curve(group, look, quantity))]
    if not curves:
        raise BadInput(f"Quantity {quantity!r} cannot be drawn: no round of these runs has it.")
    # Imported here: the import takes half a second.
    from fedrema.base.figures import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    draw_lines(axes, curves)
    title, label = quantity_words(quantity, groups)
    axes.set_ylabel(label)
    metric = metric_of(quantity, groups[0].metric)
    least = LEAST_FRAME if metric is not None and metric.percent else 0.0
    cut = cut_start(axes, curves, metric.higher_is_better, least) if metric else ""
    axes.set_title(f"{title} by round: {data_title(groups)}", fontsize=10.5, loc="left")
    figure.supxlabel(_caption(curves, cut), fontsize=8, color="0.35", x=0.01, ha="left")
    name_curves(figure, [(axes, [curve.end for curve in curves])])
    return figure


def image_format(path: Path) -> str:
    """Return png, svg or pdf, by the suffix of a file name; refuse any other."""
    kind = path.suffix.lstrip(".").lower()
    if kind not in ("png", "svg", "pdf"):
        raise BadInput(f"--plot {path} cannot be drawn: names ending in .png, .svg or .pdf are valid.")
    return kind


def looks_of(groups: Sequence[Group]) -> list[Look]:
    """Return a distinct look for each group, as its method declares where possible."""
    declared = {group.method: group.reports for group in reversed(groups)}
    return looks([group.method for group in groups], declared)


def group_curve(group: Group, look: Look, quantity: str) -> Curve | None:
    """Return the curve of a quantity over the seeds of a group; None where its runs share no round that has it."""
    found = []
    for run in group.counted:
        try:
            rounds, values = run.curve(quantity)
        except BadInput:  # this run does not have the quantity, or has no round yet
            continue
        if values.ndim != 1 or values.dtype.kind not in "bif":
            raise BadInput(f"Quantity {quantity!r} cannot be drawn: it is not one number per round.")
        found.append(dict(zip(rounds.tolist(), values.astype(float).tolist(), strict=True)))
    trace = declared_trace(quantity, [group])
    metric = metric_of(quantity, group.metric)
    is_percent = metric.percent if metric is not None else trace is not None and trace.percent
    period = group.reports.period
    factor, title = 100 if is_percent else 1, period.title if period else "period"
    return curve_over_seeds(group.label, look, found, factor, period_end(group), title)


def declared_trace(quantity: str, groups: Sequence[Group]) -> Trace | None:
    """Return the declaration of a quantity that a method of the groups traces; None for any other."""
    traces = (trace for group in groups for trace in group.reports.traces)
    return next((trace for trace in traces if trace.name == quantity), None)


def period_end(group: Group) -> float | None:
    """Return the last round of the method's period, averaged over seeds; None if a run has no ended period."""
    period = group.reports.period
    if period is None:
        return None
    ends = []
    for run in group.counted:
        inside = {record.round: record.trace[period.name] for record in run.rounds if period.name in record.trace}
        if not any(inside.values()) or all(inside.values()):
            return None
        ends.append(max(number for number, flag in inside.items() if flag))
    return float(np.mean(ends)) if ends else None


def quantity_words(quantity: str, groups: Sequence[Group]) -> tuple[str, str]:
    """Return the title and the y label of a quantity."""
    if quantity == "loss":
        return "Training loss", "Mean training loss"
    metric = metric_of(quantity, groups[0].metric)
    if metric is not None:
        whose = "of the clients' models"
        title = capitalised(metric.title)
        if quantity == WORST_TENTH:
            title, whose = f"{title} of the worst tenth", "of the worst tenth of the clients"
        elif quantity.startswith(TRAINED):
            title, whose = f"{title} after local training", "right after local training"
        direction = "" if metric.higher_is_better else ", lower is better"
        return title, f"Test {metric.title} {whose}{direction}{' (%)' if metric.percent else ''}"
    trace = declared_trace(quantity, groups)
    words = trace.title if trace else quantity.replace("_", " ")
    title = words[:1].upper() + words[1:]
    return title, f"{title} (%)" if trace and trace.percent else title


def metric_of(quantity: str, primary: Metric) -> Metric | None:
    """Return the metric that a quantity of a round's record is a value of; None for any other."""
    if quantity == WORST_TENTH:
        return primary
    return METRICS.get(quantity.removeprefix(TRAINED))


def _caption(curves: Sequence[Curve], cut: str) -> str:
    sentences = about_curves(curves, cut)
    return "\n".join([" ".join(sentences[:2]), *sentences[2:]])
