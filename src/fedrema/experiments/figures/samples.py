"""Accuracy against the number of samples that each client has."""

from typing import TYPE_CHECKING

from fedrema.experiments.figures.layout import SMALL, entitle, new_figure, outer_labels, panel_title, panels
from fedrema.experiments.figures.results import Results
from fedrema.experiments.table import Figure as Statistic
from fedrema.experiments.table import figure as over_seeds
from fedrema.reporting.plots import End, count_seeds, dress, name_curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

QUANTITIES = {
    "best_accuracy": "Best round, as papers count",
    "honest_accuracy": "Honest: round chosen by other samples",
}


def figure_of_samples(results: Results) -> "Figure | None":
    """Draw accuracy against samples per client: a line per row, in a panel best accuracy, in another honest."""
    if not any(results.cells(lambda run: run.summary.get("best_accuracy") is not None)):
        return None
    figure = new_figure(3.7)
    axes = panels(figure, len(QUANTITIES), len(QUANTITIES))
    drawn = [_draw(panel, results, quantity) for panel, quantity in zip(axes, QUANTITIES, strict=True)]
    for panel, title in zip(axes, QUANTITIES.values(), strict=True):
        panel_title(panel, title)
    _tick(axes, sorted({samples for lines in drawn for line in lines.values() for samples in line}))
    outer_labels(axes, len(axes), "Samples per client (log scale)", "Test accuracy (%)")
    counts = [point.count for lines in drawn for line in lines.values() for point in line.values()]
    seeds = count_seeds(counts, results.seed_words)
    about = f"Mean over {seeds}; bars: one standard deviation to either side."
    if max(counts) == 1:
        about = f"{seeds.capitalize()}."
    entitle(figure, results.title("Accuracy against samples per client"), [about, *results.missing()])
    ends = [[_end(results, row, line) for row, line in lines.items() if line] for lines in drawn]
    name_curves(figure, list(zip(axes, ends, strict=True)), SMALL)
    return figure


def _end(results: Results, row: str, line: dict[int, Statistic]) -> End:
    return results.experiment.title_of(row), results.looks[row], line[max(line)].mean


def _draw(axes: "Axes", results: Results, quantity: str) -> dict[str, dict[int, Statistic]]:
    """Draw the lines of a panel; return their points by row and samples."""
    lines = {}
    for row in results.rows:
        points = {
            results.cell(row, column).parsed.data.samples: point
            for column in results.columns
            if (point := over_seeds(results.runs(row, column), quantity))
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
