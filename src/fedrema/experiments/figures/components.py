"""Figure of variance components: how much of the variance is due to the partition and to the training seed."""

from typing import TYPE_CHECKING

from fedrema.experiments.components import components_of
from fedrema.experiments.figures.panels import SMALL, Results, add_texts, new_figure
from fedrema.reporting.plots import COLOURS, dress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = ("partition", "training seed", "rest (interaction and everything else)")


def figure_of_components(results: Results) -> "Figure | None":
    """Draw the shares of partition, training seed and rest in the variance of each row, as one bar per row."""
    runs = {(row.name, column.name): results.runs(row, column) for row in results.rows for column in results.columns}
    found = components_of(results.experiment, runs)
    if not found:
        return None
    figure = new_figure(0.8 + 0.4 * len(found))
    axes = figure.subplots()
    titles = [results.experiment.title_of(row) for row in found]
    reached = [0.0] * len(found)
    for part, name in enumerate(PARTS):
        shares = [100 * each.shares[part] for each in found.values()]
        axes.barh(titles, shares, left=reached, color=COLOURS[part], label=name, height=0.6)
        reached = [start + share for start, share in zip(reached, shares, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("Share of the variance between runs (%)", fontsize=SMALL + 1)
    axes.tick_params(labelsize=SMALL)
    dress(axes)
    figure.legend(loc="outside upper left", ncols=len(PARTS), fontsize=SMALL, frameon=False)
    sizes = sorted({f"{each.partitions} partitions × {each.seeds} training seeds" for each in found.values()})
    about = f"{' or '.join(sizes)} of each method; two-way random effects, {results.experiment.quantity} value."
    add_texts(figure, results.title("Shares of the variance"), [about, *results.missing()])
    return figure
