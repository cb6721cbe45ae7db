"""Accuracy, and how well relevant peers are found, round by round."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedrema.experiments.figures.layout import SMALL, entitle, new_figure, outer_labels, panel_title, panels
from fedrema.experiments.figures.results import Results, by_round, critical_end
from fedrema.experiments.spec import Line
from fedrema.experiments.store import Finished
from fedrema.reporting.plots import (
    Curve,
    about_curves,
    curve_over_seeds,
    cut_start,
    draw_lines,
    fit_rounds,
    name_curves,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PER_LINE = 2
THIN, MEDIUM = 0.8, 1.3
"""Widths of lines: hundreds of noisy rounds of nine methods are told apart only where lines are thin."""
MANY_ROUNDS = 150
ROUND = "Communication round"
PARTS = {"precision": "Precision of the sets $A_k$", "recall": "Recall of the sets $A_k$"}


def figure_of_curves(results: Results) -> "Figure | None":
    """Draw test accuracy by round: a panel per column, a curve per row."""
    columns = {column.name: _accuracies(results, column) for column in results.columns}
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
    cuts = [cut_start(panel, shown if share else curves) for panel, curves in zip(axes, columns.values(), strict=True)]
    outer_labels(axes, PER_LINE, ROUND, "Test accuracy (%)")
    caption = [*about_curves(shown, any(cuts), results.seed_words), *results.missing()]
    entitle(figure, results.title("Test accuracy by round"), caption)
    _name(figure, axes, list(columns.values()))
    return figure


def _accuracies(results: Results, column: Line) -> list[Curve]:
    found = []
    for row in results.rows:
        runs = [run for run in results.runs(row, column) if by_round(run, "accuracy")]
        values = [by_round(run, "accuracy") for run in runs]
        found.append(curve_over_seeds(row.title, results.looks[row.name], values, 100, critical_end(runs)))
    return [curve for curve in found if curve]


def _name(figure: "Figure", axes: Sequence["Axes"], curves: Sequence[Sequence[Curve]]) -> None:
    ends = [[curve.end for curve in some] for some in curves]
    name_curves(figure, list(zip(axes, ends, strict=True)), SMALL)


def figure_of_matching(results: Results) -> "Figure | None":
    """Draw precision and recall of the sets A_k against the true groups by round, a curve per row."""
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
            groups = next(runs[0].clients["groups"] for _, where, runs in cells if where == column)
            panel.axhline(100 * chance(groups), color="0.4", linestyle="--", linewidth=0.9, zorder=1)
    axes[0].set_ylim(0, 103)
    fit_rounds(axes[0], shown)
    outer_labels(axes, PER_LINE, ROUND, "Share of peers (%)")
    caption = [
        "Precision: share of chosen peers that are of one's own group; recall: share of that group that is chosen.",
        "Dashed: precision of choosing at random.",
        *about_curves(shown, False, results.seed_words),
        *results.missing(),
        results.lacking("Without recorded similarities, or without true groups", _has_matching),
    ]
    entitle(figure, results.title("Are relevant peers found?"), caption)
    _name(figure, axes, drawn)
    return figure


def _has_matching(run: Finished) -> bool:
    return bool(run.relations.get("matching"))


def _matching(results: Results, column: Line, part: str) -> list[Curve]:
    found = []
    for row in results.rows:
        runs = [run for run in results.runs(row, column) if _has_matching(run)]
        kept = [run.relations["matching"] for run in runs]
        pairs = [zip(one["round"], one[part], strict=True) for one in kept]
        values = [{number: value for number, value in some if value is not None} for some in pairs]
        found.append(curve_over_seeds(row.title, results.looks[row.name], values, 100, critical_end(runs)))
    return [curve for curve in found if curve]


def chance(groups: Sequence[int]) -> float:
    """Return the share of one's own group among all peers, averaged over clients."""
    members = np.bincount(groups)[list(groups)]
    return float((members - 1).mean() / (len(groups) - 1))
