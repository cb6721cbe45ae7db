"""Who is served badly: every client's accuracy under every method."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedrema.experiments.figures.layout import SMALL, entitle, new_figure, outer_labels, panel_title, panels
from fedrema.experiments.figures.results import Results
from fedrema.experiments.store import Finished
from fedrema.reporting.plots import COLOURS, count_seeds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STRIP = 0.34
"""Half the height of a strip, where the distance between strips is 1."""
Means = dict[str, dict[str, np.ndarray]]
"""By column and row: a number per client."""


def figure_of_clients(results: Results) -> "Figure | None":
    """Draw each client's accuracy as a dot: a strip per row, a panel per column."""
    means: Means = {}
    groups: dict[str, list[int]] = {}
    cells = sorted(results.cells(_scored), key=lambda cell: results.columns.index(cell[1]))
    for row, column, runs in cells:
        means.setdefault(column.name, {})[row.name] = over_seeds(runs)
        groups[column.name] = runs[0].clients.get("groups") or [0] * len(runs[0].clients["accuracy"])
    if not cells:
        return None
    order = _order(means)
    per_line = min(2, len(means))
    figure = new_figure(0.4 + (0.3 * len(order) + 0.3) * -(-len(means) // per_line))
    axes = panels(figure, len(means), per_line, share_x=results.comparable)
    for panel, (name, rows) in zip(axes, means.items(), strict=True):
        _draw(panel, rows, order, np.array(groups[name]))
        panel_title(panel, results.experiment.title_of(name))
    axes[0].set_yticks(range(len(order)), [results.experiment.title_of(row) for row in order])
    axes[0].set_ylim(len(order) - 0.5, -0.5)
    outer_labels(axes, per_line, "Test accuracy of a client's model (%)", "")
    most = max(max(some) for some in groups.values()) + 1
    if most > 1:
        _explain(axes[per_line - 1], most)
    caption = _caption(results, [len(runs) for *_, runs in cells], most > 1)
    entitle(figure, results.title("Accuracy of every client"), caption)
    return figure


def _scored(run: Finished) -> bool:
    return any(value is not None for value in run.clients.get("accuracy", []))


def over_seeds(runs: Sequence[Finished]) -> np.ndarray:
    """Return each client's accuracy in percent, averaged over seeds; NaN where it was never scored."""
    values = np.array([run.clients["accuracy"] for run in runs], float)
    known = (~np.isnan(values)).sum(axis=0)
    sums = np.nansum(values, axis=0)
    means = np.full(len(sums), np.nan)
    np.divide(100 * sums, known, out=means, where=known > 0)
    return means


def _order(means: Means) -> list[str]:
    """Return rows, that with the highest mean over clients and columns first; those that lack columns last."""
    rows = dict.fromkeys(row for column in means.values() for row in column)
    found = {row: [float(np.nanmean(column[row])) for column in means.values() if row in column] for row in rows}
    return sorted(rows, key=lambda row: (-len(found[row]), -np.mean(found[row])))


def _draw(axes: "Axes", rows: Mapping[str, np.ndarray], order: Sequence[str], groups: np.ndarray) -> None:
    for place, row in enumerate(order):
        if row not in rows:
            continue
        values = rows[row]
        # Clients one below the other, in their order: dots do not hide each other, and groups stay together.
        heights = place + np.linspace(-STRIP, STRIP, len(values))
        for group in np.unique(groups):
            mine = groups == group
            axes.plot(values[mine], heights[mine], "o", color=_colour(group), markersize=3.6, markeredgewidth=0)
        mean = float(np.nanmean(values))
        axes.plot([mean, mean], [place - 0.44, place + 0.44], color="black", linewidth=1.6, zorder=3)
    for border in range(1, len(order)):
        axes.axhline(border - 0.5, color="0.92", linewidth=0.8, zorder=1)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="0.92", linewidth=0.8)
    axes.set_axisbelow(True)


def _explain(axes: "Axes", groups: int) -> None:
    """Say above a panel which colour is which group."""
    from matplotlib.lines import Line2D

    dots = [Line2D([], [], linestyle="", marker="o", markersize=4, color=_colour(group)) for group in range(groups)]
    names = ["group", *(str(group + 1) for group in range(groups))]
    close: dict[str, Any] = {"handletextpad": 0.0, "columnspacing": 0.5, "borderaxespad": 0.1, "handlelength": 1.2}
    where: dict[str, Any] = {"loc": "lower right", "bbox_to_anchor": (1, 1), "ncols": len(names), "frameon": False}
    axes.legend([Line2D([], [], linestyle=""), *dots], names, fontsize=SMALL, **close, **where)


def _colour(group: int) -> str:
    return COLOURS[group % len(COLOURS)]


def _caption(results: Results, counts: Sequence[int], grouped: bool) -> list[str]:
    seeds = count_seeds(counts, results.seed_words)
    words = f"mean over {seeds}" if max(counts) > 1 else seeds
    by_group = ", coloured by its group" if grouped else ""
    return [
        f"Dot: a client, mean of its last five scored rounds, {words}{by_group}. Bar: mean over clients.",
        "Rows are sorted by it." if len(results.started()) == 1 else "Rows are sorted by its mean over all panels.",
        *results.missing(),
    ]
