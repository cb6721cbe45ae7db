"""When the critical period ends: the mean gap falls to a share of its peak."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedrema.experiments.figures.layout import entitle, new_figure, outer_labels, panel_title, panels
from fedrema.experiments.figures.results import Results, by_round
from fedrema.experiments.store import Finished
from fedrema.reporting.plots import Look, count_seeds, dress

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TICKS = (1, 3, 10, 30, 100, 300, 1000, 3000)


def figure_of_gap(results: Results) -> "Figure | None":
    """Draw the mean gap by round as a share of its peak so far, a panel per cell: that is what δ is compared with.

    As shares all seeds have one threshold; the gaps themselves peak at different heights, so that a mean of them
    crosses a mean threshold where no seed does.
    """
    cells = list(results.cells(_ratios))
    if not cells:
        return None
    per_line = min(len(cells), 2 if len(cells) == 4 else 3)
    figure = new_figure(0.5 + 1.9 * -(-len(cells) // per_line))
    axes = panels(figure, len(cells), per_line)
    for panel, (row, column, runs) in zip(axes, cells, strict=True):
        delta = float(runs[0].settings["delta"])
        _draw(panel, runs, delta, results.looks[row.name])
        title = results.name(row, column)
        panel_title(panel, title if "δ" in title else f"{title} (δ = {delta:g})")
    _count_rounds(axes, max(run.summary["rounds"] for _, _, runs in cells for run in runs))
    axes[0].set_ylim(0, 104)
    outer_labels(axes, per_line, "Communication round (log scale)", "Mean gap Δs̄ (% of its peak)")
    counts = [len(runs) for _, _, runs in cells]
    seeds = count_seeds(counts, results.seed_words)
    whose = f"Thin: each of {seeds}; thick: their mean while all are critical." if max(counts) > 1 else f"{seeds}."
    lasting = not all(_ended(run) for _, _, runs in cells for run in runs)
    caption = [
        whose[0].upper() + whose[1:],
        "Peak: the highest gap so far. Dashed: δ; where the gap falls to it the critical period ends (dot), and from",
        "then on no gap is measured.",
        "Where there is no dot, the period lasts to the end." if lasting else "",
        *results.missing(),
    ]
    entitle(figure, results.title("When the critical period ends"), caption)
    return figure


def _ratios(run: Finished) -> dict[int, float]:
    return by_round(run, "gap_ratio") if "delta" in run.settings else {}


def _ended(run: Finished) -> bool:
    return bool(run.summary["critical_rounds"] < run.summary["rounds"])


def _draw(axes: "Axes", runs: Sequence[Finished], delta: float, look: Look) -> None:
    axes.axhline(100 * delta, color="0.25", linewidth=1.0, linestyle="--", zorder=1)
    ratios = [_ratios(run) for run in runs]
    for run, one in zip(runs, ratios, strict=True):
        axes.plot(list(one), [100 * ratio for ratio in one.values()], color=look.colour, linewidth=0.7, alpha=0.6)
        if _ended(run):
            last = max(one)
            axes.plot([last], [100 * one[last]], marker="o", markersize=4, color=look.colour, zorder=4)
    if len(runs) > 1:
        common = sorted(set.intersection(*(set(one) for one in ratios)))
        means = [100 * float(np.mean([one[number] for one in ratios])) for number in common]
        axes.plot(common, means, color=look.colour, linewidth=1.8, zorder=3)
    dress(axes)


def _count_rounds(axes: Sequence["Axes"], last: int) -> None:
    from matplotlib.ticker import NullLocator

    ticks = [tick for tick in TICKS if tick <= last]
    for panel in axes:
        panel.set_xscale("log")
        panel.set_xlim(0.95, max(1.05 * last, 2))
        panel.set_xticks(ticks, [str(tick) for tick in ticks])
        panel.xaxis.set_minor_locator(NullLocator())
