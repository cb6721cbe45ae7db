"""Figures by round: the primary metric, precision and recall of the peers, the end of a period."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedrema.core.reports import Period
from fedrema.experiments.figures.panels import (
    SMALL,
    Results,
    add_texts,
    metric_label,
    new_figure,
    outer_labels,
    panel_title,
    panels,
    period_end,
)
from fedrema.experiments.finished_run import FinishedRun
from fedrema.experiments.spec import Cell, Line, MatchingCurve
from fedrema.reporting.plots import (
    LEAST_FRAME,
    Curve,
    Look,
    about_curves,
    count_seeds,
    curve_over_seeds,
    cut_start,
    draw_lines,
    dress,
    fit_rounds,
    name_curves,
)
from fedrema.reporting.quantities import factor

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PER_LINE = 2
THIN, MEDIUM = 0.8, 1.3
"""Line widths: thin lines keep hundreds of noisy rounds of nine methods apart."""
MANY_ROUNDS = 150
ROUND = "Communication round"
PARTS: dict[MatchingCurve, str] = {"precision": "Precision of chosen peers", "recall": "Recall of chosen peers"}
TICKS = (1, 3, 10, 30, 100, 300, 1000, 3000)


def figure_of_curves(results: Results) -> "Figure | None":
    """Draw the primary metric by round: a panel per column, a curve per row."""
    metric = results.metric
    columns = {column.name: _metric_curves(results, column) for column in results.columns}
    columns = {name: curves for name, curves in columns.items() if curves}
    if not columns:
        return None
    several = len(columns) > 1
    share = results.comparable
    figure = new_figure(0.5 + 2.4 * -(-len(columns) // PER_LINE) if several else 3.9)
    axes = panels(figure, len(columns), PER_LINE, share_y=share)
    shown = [curve for curves in columns.values() for curve in curves]
    for panel, (name, curves) in zip(axes, columns.items(), strict=True):
        draw_lines(panel, curves, THIN if len(curves[0].rounds) > MANY_ROUNDS else MEDIUM)
        panel_title(panel, results.experiment.title_of(name))
    fit_rounds(axes[0], shown)
    least = LEAST_FRAME if metric.percent else 0.0
    cuts = [
        cut_start(panel, shown if share else curves, metric.higher_is_better, least)
        for panel, curves in zip(axes, columns.values(), strict=True)
    ]
    outer_labels(axes, PER_LINE, ROUND, metric_label(metric))
    caption = [*about_curves(shown, max(cuts), results.seed_words), *results.missing()]
    add_texts(figure, results.title(f"Test {metric.title} by round"), caption)
    _name(figure, axes, list(columns.values()))
    return figure


def _metric_curves(results: Results, column: Line) -> list[Curve]:
    found = []
    for row in results.rows:
        name, scale = results.metric.name, factor(results.metric)
        runs = [run for run in results.runs(row, column) if run.curve(name)]
        values = [run.curve(name) for run in runs]
        found.append(
            curve_over_seeds(row.title, results.looks[row.name], values, scale, *_period_of(results, row, column, runs))
        )
    return [curve for curve in found if curve]


def _period_of(results: Results, row: Line, column: Line, runs: Sequence[FinishedRun]) -> tuple[float | None, str]:
    """Return the mean end of the period of a cell's runs, and its title."""
    period = results.cell(row, column).parsed.method.reports.period
    return period_end(runs), period.title if period else ""


def _name(figure: "Figure", axes: Sequence["Axes"], curves: Sequence[Sequence[Curve]]) -> None:
    ends = [[curve.end for curve in some] for some in curves]
    name_curves(figure, list(zip(axes, ends, strict=True)), SMALL)


def figure_of_matching(results: Results) -> "Figure | None":
    """Draw precision and recall of the most similar peers against the true groups by round, a curve per row."""
    cells = list(results.cells(_has_matching))
    columns = [column for column in results.columns if any(where == column for _, where, _ in cells)]
    wanted = [(column, part) for column in columns for part in PARTS]
    drawn = [_matching(results, column, part) for column, part in wanted]
    shown = [curve for curves in drawn for curve in curves]
    if not shown:
        return None
    figure = new_figure(0.5 + 2.1 * len(columns))
    axes = panels(figure, len(wanted), PER_LINE)
    for panel, (column, part), curves in zip(axes, wanted, drawn, strict=True):
        draw_lines(panel, curves, MEDIUM)
        panel_title(panel, ", ".join(filter(None, (PARTS[part], column.title))))
        if part == "precision":
            groups = next(runs[0].clients.groups for _, where, runs in cells if where == column)
            panel.axhline(100 * chance(groups or []), color="0.4", linestyle="--", linewidth=0.9, zorder=1)
    axes[0].set_ylim(0, 103)
    fit_rounds(axes[0], shown)
    outer_labels(axes, PER_LINE, ROUND, "Share of peers (%)")
    caption = [
        "Chosen: the peers above the largest gap in a client's similarities. Precision: the share of them in the",
        "client's own group; recall: the share of that group that is chosen.",
        "Dashed: precision of choosing at random.",
        *about_curves(shown, "", results.seed_words),
        *results.missing(),
        results.lacking("Without recorded similarities, or without true groups", _has_matching),
    ]
    add_texts(figure, results.title("Are relevant peers found?"), caption)
    _name(figure, axes, drawn)
    return figure


def _has_matching(cell: Cell, run: FinishedRun) -> bool:
    return run.matching is not None


def _matching(results: Results, column: Line, part: MatchingCurve) -> list[Curve]:
    found = []
    for row in results.rows:
        runs = [run for run in results.runs(row, column) if run.matching is not None]
        kept = [run.matching for run in runs if run.matching is not None]
        pairs = [zip(one.round, one.precision if part == "precision" else one.recall, strict=True) for one in kept]
        values = [{number: value for number, value in some if value is not None} for some in pairs]
        found.append(
            curve_over_seeds(row.title, results.looks[row.name], values, 100, *_period_of(results, row, column, runs))
        )
    return [curve for curve in found if curve]


def chance(groups: Sequence[int]) -> float:
    """Return the share of peers that are in a client's own group, averaged over clients."""
    members = np.bincount(groups)[list(groups)]
    return float((members - 1).mean() / (len(groups) - 1))


def figure_of_period(results: Results) -> "Figure | None":
    """Draw by round the measure that ends the method's period, and the threshold at which it does: a panel per cell."""
    cells = list(results.cells(_measured))
    if not cells:
        return None
    periods = [_period(results.cell(row, column)) for row, column, _ in cells]
    per_line = min(len(cells), 2 if len(cells) == 4 else 3)
    figure = new_figure(0.5 + 1.9 * -(-len(cells) // per_line))
    axes = panels(figure, len(cells), per_line)
    highest = 0.0
    for panel, (row, column, runs), period in zip(axes, cells, periods, strict=True):
        threshold = float(runs[0].settings[_threshold(period)] or 0)
        highest = max(highest, _draw_measure(panel, runs, period, threshold, results.looks[row.name]))
        title = results.name(row, column)
        panel_title(panel, title if f"{threshold:g}" in title else f"{title} ({period.threshold} = {threshold:g})")
    _log_rounds(axes, max(run.summary.rounds for _, _, runs in cells for run in runs))
    axes[0].set_ylim(0, 1.04 * highest)
    outer_labels(axes, per_line, f"{ROUND} (log scale)", _measure_title(results.cell(*cells[0][:2])))
    ended = all(_ended(run, period) for (_, _, runs), period in zip(cells, periods, strict=True) for run in runs)
    counts = [len(runs) for _, _, runs in cells]
    seeds, what = count_seeds(counts, results.seed_words), periods[0].title
    whose = f"Thin: each of {seeds}; thick: their mean while all are in the {what}."
    caption = [
        whose if max(counts) > 1 else f"{seeds[0].upper()}{seeds[1:]}.",
        f"Dashed: {periods[0].threshold}. When the measure falls to it, the {what} ends (dot), and measuring stops.",
        "" if ended else f"Without a dot, the {what} lasts to the end.",
        *results.missing(),
    ]
    add_texts(figure, results.title(f"When the {what} ends"), caption)
    return figure


def _measure_title(cell: Cell) -> str:
    reports = cell.parsed.method.reports
    title = next(trace.title for trace in reports.traces if trace.name == _period(cell).measure)
    return title[0].upper() + title[1:]


def _period(cell: Cell) -> Period:
    period = cell.parsed.method.reports.period
    assert period is not None
    return period


def _measured(cell: Cell, run: FinishedRun) -> bool:
    period = cell.parsed.method.reports.period
    if period is None or period.measure is None or period.threshold is None:
        return False
    return _threshold(period) in run.settings and bool(run.curve(period.measure))


def _threshold(period: Period) -> str:
    """Return the name of the threshold among a run's settings."""
    return (period.threshold or "").replace("_", "-")


def _ended(run: FinishedRun, period: Period) -> bool:
    return run.summary.period_rounds[period.name] < run.summary.rounds


def _draw_measure(axes: "Axes", runs: Sequence[FinishedRun], period: Period, threshold: float, look: Look) -> float:
    """Draw the measure of a cell's runs, and return its highest value."""
    axes.axhline(threshold, color="0.25", linewidth=1.0, linestyle="--", zorder=1)
    curves = [run.curve(period.measure or "") for run in runs]
    for run, one in zip(runs, curves, strict=True):
        axes.plot(list(one), list(one.values()), color=look.colour, linewidth=0.7, alpha=0.6)
        if _ended(run, period):
            last = max(one)
            axes.plot([last], [one[last]], marker="o", markersize=4, color=look.colour, zorder=4)
    if len(runs) > 1:
        common = sorted(set.intersection(*(set(one) for one in curves)))
        means = [float(np.mean([one[number] for one in curves])) for number in common]
        axes.plot(common, means, color=look.colour, linewidth=1.8, zorder=3)
    dress(axes)
    return max(value for one in curves for value in one.values())


def _log_rounds(axes: Sequence["Axes"], last: int) -> None:
    from matplotlib.ticker import NullLocator

    ticks = [tick for tick in TICKS if tick <= last]
    for panel in axes:
        panel.set_xscale("log")
        panel.set_xlim(0.95, max(1.05 * last, 2))
        panel.set_xticks(ticks, [str(tick) for tick in ticks])
        panel.xaxis.set_minor_locator(NullLocator())
