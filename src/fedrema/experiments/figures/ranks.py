"""Average ranks with their critical difference, after Demšar (JMLR 2006)."""

import math
from typing import TYPE_CHECKING, Literal

from fedrema.experiments.figures.layout import GREY, SMALL, entitle, new_figure
from fedrema.experiments.figures.results import Results
from fedrema.experiments.ranking import Ranking, rank
from fedrema.experiments.statistics import scores

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINE = 0.24
"""Inches from one name to the next."""
BAR = 0.13
"""Inches from one bar to the next."""


def figure_of_ranks(results: Results) -> "Figure | None":
    """Draw average ranks on an axis; bars join rows that do not differ significantly."""
    runs = {(row.name, column.name): results.runs(row, column) for row in results.rows for column in results.columns}
    ranking = rank(scores(runs, results.experiment.quantity))
    if ranking is None:
        return None
    bars = BAR * len(ranking.cliques) + 0.12
    names = LINE * math.ceil(len(ranking.names) / 2)
    figure = new_figure(0.85 + bars + names)
    axes = figure.subplots()
    _draw_axis(axes, ranking)
    _draw_cliques(axes, ranking)
    _draw_names(axes, results, ranking, bars)
    axes.set_ylim(bars + names + 0.05, -0.62)
    p = "p < 0.001" if ranking.p < 0.001 else f"p = {ranking.p:.3f}"
    started = results.started()
    columns = ", ".join(column.title for column in results.columns if column not in started)
    left_out = ", ".join(results.experiment.title_of(name) for name in ranking.left_out)
    caption = [
        f"Average rank by {results.experiment.quantity.replace('_', ' ')}, the best at the left,"
        f" over {ranking.blocks_are}.",
        f"Friedman's test that all are alike: {p}.",
        "Bars join what does not differ at the 5 % level by Nemenyi's test: by less than CD, the critical difference.",
        f"Left out, as runs are missing: {left_out}." if left_out else "",
        f"Not run: {columns}." if columns else "",
        results.outdated,
    ]
    entitle(figure, results.title("Average ranks"), caption)
    return figure


def _draw_axis(axes: "Axes", ranking: Ranking) -> None:
    """Draw the scale at height 0, and CD above its left end; heights are inches downwards."""
    last = len(ranking.names)
    axes.plot([1, last], [0, 0], color="black", linewidth=1.2)
    for tick in range(1, last + 1):
        axes.plot([tick, tick], [0, -0.07], color="black", linewidth=1.0)
        axes.text(tick, -0.1, str(tick), ha="center", va="bottom", fontsize=SMALL)
    end = 1 + ranking.critical_difference
    axes.plot([1, end], [-0.4, -0.4], color=GREY, linewidth=1.4)
    for edge in (1.0, end):
        axes.plot([edge, edge], [-0.44, -0.36], color=GREY, linewidth=1.4)
    words = f"CD = {ranking.critical_difference:.2f}"
    axes.text((1 + end) / 2, -0.46, words, ha="center", va="bottom", fontsize=SMALL, color=GREY)
    room = 0.28 * (last - 1)
    axes.set_xlim(1 - room, max(last, end) + room)
    axes.set_axis_off()


def _draw_cliques(axes: "Axes", ranking: Ranking) -> None:
    at = dict(zip(ranking.names, ranking.ranks, strict=True))
    over = 0.012 * (len(ranking.names) - 1)
    for place, clique in enumerate(ranking.cliques):
        ends = at[clique[0]] - over, at[clique[-1]] + over
        height = BAR * (place + 1)
        axes.plot(ends, [height, height], color="0.3", linewidth=3.2, solid_capstyle="butt", zorder=3)


def _draw_names(axes: "Axes", results: Results, ranking: Ranking, below: float) -> None:
    """Lead stems down and out: the better half to the left, the best on top, the others to the right."""
    room = 0.25 * (len(ranking.names) - 1)
    half = math.ceil(len(ranking.names) / 2)
    for place, (name, value) in enumerate(zip(ranking.names, ranking.ranks, strict=True)):
        better = place < half
        height = below + LINE * ((place if better else len(ranking.names) - 1 - place) + 0.5)
        edge = 1 - 0.2 * room if better else len(ranking.names) + 0.2 * room
        look = results.looks[name]
        (stem,) = axes.plot([value, value, edge], [0, height, height], color=look.colour, linestyle=look.stroke)
        stem.set(linewidth=1.1 * look.emphasis, zorder=2)
        axes.plot([value], [0], "o", color=look.colour, markersize=4, zorder=4)
        words = "  ".join([results.experiment.title_of(name), f"{value:.2f}"][:: 1 if better else -1])
        side: Literal["left", "right"] = "right" if better else "left"
        apart = (-4, 0) if better else (4, 0)
        axes.annotate(
            words, (edge, height), apart, textcoords="offset points", ha=side, va="center", fontsize=SMALL + 1
        )
