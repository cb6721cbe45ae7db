"""Figures that compare rows: the primary metric against samples per client, and of every client; average ranks."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedrema.experiments.comparisons import scores
from fedrema.experiments.figures.panels import (
    GREY,
    SMALL,
    Results,
    add_texts,
    metric_label,
    new_figure,
    outer_labels,
    panel_title,
    panels,
)
from fedrema.experiments.finished_run import FinishedRun
from fedrema.experiments.spec import Cell
from fedrema.experiments.table import Statistic, measured, statistic
from fedrema.reporting.plots import COLOURS, End, count_seeds, dress, name_curves
from fedrema.reporting.quantities import capitalised, factor
from fedrema.reporting.statistics import Ranking, rank
from fedrema.tasks import Metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

QUANTITIES = {
    "best": "Best round, as papers report it",
    "honest": "Honest: round chosen by other samples",
}
STRIP = 0.34
"""Half the height of a strip, in distances between strips."""
Means = dict[str, dict[str, np.ndarray]]
"""By column and row: a number per client."""
LINE = 0.24
"""Inches from one name to the next."""
MOST_TICKS = 15
"""How many numbers fit on the axis of ranks."""
BAR = 0.13
"""Inches from one bar to the next."""


def figure_of_samples(results: Results) -> "Figure | None":
    """Draw the primary metric against samples per client, a line per row: best in one panel, honest in the other."""
    if not any(results.cells(lambda _, run: bool(run.summary.metrics))):
        return None
    figure = new_figure(3.7)
    axes = panels(figure, len(QUANTITIES), len(QUANTITIES))
    drawn = [_draw_samples(panel, results, quantity) for panel, quantity in zip(axes, QUANTITIES, strict=True)]
    for panel, title in zip(axes, QUANTITIES.values(), strict=True):
        panel_title(panel, title)
    _tick(axes, sorted({samples for lines in drawn for line in lines.values() for samples in line}))
    outer_labels(axes, len(axes), "Samples per client (log scale)", metric_label(results.metric))
    counts = [point.count for lines in drawn for line in lines.values() for point in line.values()]
    seeds = count_seeds(counts, results.seed_words)
    about = f"Mean over {seeds}; bars: one standard deviation to either side."
    if max(counts) == 1:
        about = f"{seeds.capitalize()}."
    add_texts(
        figure,
        results.title(f"{capitalised(results.metric.title)} against samples per client"),
        [about, *results.missing()],
    )
    ends = [[_end(results, row, line) for row, line in lines.items() if line] for lines in drawn]
    name_curves(figure, list(zip(axes, ends, strict=True)), SMALL)
    return figure


def _end(results: Results, row: str, line: dict[int, Statistic]) -> End:
    return results.experiment.title_of(row), results.looks[row], line[max(line)].mean


def _draw_samples(axes: "Axes", results: Results, quantity: str) -> dict[str, dict[int, Statistic]]:
    """Draw the lines of a panel; return their points by row and samples."""
    lines = {}
    for row in results.rows:
        points = {
            results.cell(row, column).parsed.data.samples: point
            for column in results.columns
            if (point := statistic(results.runs(row, column), quantity))
        }
        lines[row.name] = points = dict(sorted(points.items()))
        if not points:
            continue
        look, means = results.looks[row.name], [point.mean for point in points.values()]
        axes.errorbar(
            list(points),
            means,
            yerr=[point.deviation for point in points.values()],
            color=look.colour,
            linestyle=look.stroke,
            linewidth=1.2 * look.emphasis,
            elinewidth=1.0,
            marker="o",
            markersize=3.5 * look.emphasis**0.5,
            zorder=2 + look.emphasis,
            label=row.title,
        )
    dress(axes)
    return lines


def _tick(axes: list["Axes"], samples: list[int]) -> None:
    from matplotlib.ticker import NullLocator

    for panel in axes:
        panel.set_xscale("log")
        panel.set_xticks(samples, [str(value) for value in samples])
        panel.xaxis.set_minor_locator(NullLocator())
        panel.margins(x=0.04)


def figure_of_clients(results: Results) -> "Figure | None":
    """Draw each client's primary metric as a dot: a strip per row, a panel per column."""
    means: Means = {}
    groups: dict[str, list[int]] = {}
    cells = sorted(results.cells(_has_scores), key=lambda cell: results.columns.index(cell[1]))
    for row, column, runs in cells:
        means.setdefault(column.name, {})[row.name] = client_means(runs, factor(results.metric))
        groups[column.name] = runs[0].clients.groups or [0] * len(runs[0].clients.primary)
    if not cells:
        return None
    order = _row_order(means, results.metric)
    per_line = min(2, len(means))
    figure = new_figure(0.4 + (0.3 * len(order) + 0.3) * -(-len(means) // per_line))
    axes = panels(figure, len(means), per_line, share_x=results.comparable)
    for panel, (name, rows) in zip(axes, means.items(), strict=True):
        _draw_clients(panel, rows, order, np.array(groups[name]))
        panel_title(panel, results.experiment.title_of(name))
    axes[0].set_yticks(range(len(order)), [results.experiment.title_of(row) for row in order])
    axes[0].set_ylim(len(order) - 0.5, -0.5)
    outer_labels(axes, per_line, metric_label(results.metric, " of a client's model"), "")
    most = max(max(some) for some in groups.values()) + 1
    if most > 1:
        _group_legend(axes[per_line - 1], most)
    caption = _clients_caption(results, [len(runs) for *_, runs in cells], most > 1)
    add_texts(figure, results.title(f"{capitalised(results.metric.title)} of every client"), caption)
    return figure


def _has_scores(cell: Cell, run: FinishedRun) -> bool:
    return any(value is not None for value in run.clients.primary)


def client_means(runs: Sequence[FinishedRun], scale: int = 100) -> np.ndarray:
    """Return each client's primary metric, averaged over seeds and scaled; NaN where it was never scored."""
    values = np.array([run.clients.primary for run in runs], float)
    known = (~np.isnan(values)).sum(axis=0)
    sums = np.nansum(values, axis=0)
    means = np.full(len(sums), np.nan)
    np.divide(scale * sums, known, out=means, where=known > 0)
    return means


def _row_order(means: Means, metric: Metric) -> list[str]:
    """Return rows by their mean over clients and columns, best first; rows that lack columns last."""
    sign = -1 if metric.higher_is_better else 1
    rows = dict.fromkeys(row for column in means.values() for row in column)
    found = {row: [float(np.nanmean(column[row])) for column in means.values() if row in column] for row in rows}
    return sorted(rows, key=lambda row: (-len(found[row]), sign * np.mean(found[row])))


def _draw_clients(axes: "Axes", rows: Mapping[str, np.ndarray], order: Sequence[str], groups: np.ndarray) -> None:
    for place, row in enumerate(order):
        if row not in rows:
            continue
        values = rows[row]
        # One client below the other, in their order: dots do not overlap, and groups stay together.
        heights = place + np.linspace(-STRIP, STRIP, len(values))
        for group in np.unique(groups):
            mine = groups == group
            axes.plot(values[mine], heights[mine], "o", color=_group_colour(group), markersize=3.6, markeredgewidth=0)
        mean = float(np.nanmean(values))
        axes.plot([mean, mean], [place - 0.44, place + 0.44], color="black", linewidth=1.6, zorder=3)
    for border in range(1, len(order)):
        axes.axhline(border - 0.5, color="0.92", linewidth=0.8, zorder=1)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)


def _group_legend(axes: "Axes", groups: int) -> None:
    """Add a legend of the groups' colours above a panel."""
    from matplotlib.lines import Line2D

    dots = [
        Line2D([], [], linestyle="", marker="o", markersize=4, color=_group_colour(group)) for group in range(groups)
    ]
    names = ["group", *(str(group + 1) for group in range(groups))]
    close: dict[str, Any] = {"handletextpad": 0.0, "columnspacing": 0.5, "borderaxespad": 0.1, "handlelength": 1.2}
    where: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": len(names), "frameon": False}
    axes.legend([Line2D([], [], linestyle=""), *dots], names, fontsize=SMALL, **close, **where)


def _group_colour(group: int) -> str:
    return COLOURS[group % len(COLOURS)]


def _clients_caption(results: Results, counts: Sequence[int], grouped: bool) -> list[str]:
    seeds = count_seeds(counts, results.seed_words)
    words = f"mean over {seeds}" if max(counts) > 1 else seeds
    by_group = ", coloured by its group" if grouped else ""
    return [
        f"Dot: a client, mean of its last five evaluated rounds, {words}{by_group}. Bar: mean over clients.",
        "Rows are sorted by it." if len(results.started()) == 1 else "Rows are sorted by its mean over all panels.",
        *results.missing(),
    ]


def figure_of_ranks(results: Results) -> "Figure | None":
    """Draw average ranks on an axis; bars join rows that do not differ significantly."""
    runs = {(row.name, column.name): results.runs(row, column) for row in results.rows for column in results.columns}
    quantity = measured(results.experiment.quantity, (run for several in runs.values() for run in several))
    ranking = rank(scores(runs, quantity.name), quantity.metric.higher_is_better)
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
        f"Average rank by {quantity.words}, the best at the left, over {ranking.blocks_are}.",
        f"Friedman's test that all are equal: {p}.",
        "Bars join rows that do not differ at the 5 % level by Nemenyi's test (CD: the critical difference).",
        f"Left out, as runs are missing: {left_out}." if left_out else "",
        f"Not run: {columns}." if columns else "",
        results.outdated,
    ]
    add_texts(figure, results.title("Average ranks"), caption)
    return figure


def _draw_axis(axes: "Axes", ranking: Ranking) -> None:
    """Draw the scale at height 0, and CD above its left end; heights are inches downwards."""
    last = len(ranking.names)
    axes.plot([1, last], [0, 0], color="black", linewidth=1.2)
    apart = math.ceil(last / MOST_TICKS)  # numbers would overlap
    for tick in range(1, last + 1, apart):
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
    """Draw stems to the names: the better half at the left, best on top, the others at the right."""
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
