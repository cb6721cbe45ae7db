"""A figure that ranks many methods: one line each, ordered by honest accuracy, with the final accuracy."""

from collections.abc import Iterable
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot

HONEST, FINAL = "#D55E00", "#0072B2"


def draw_ranking(scores: Iterable[tuple[str, float, float]], file: Path, emphasised: Iterable[str] = ()) -> None:
    """Draw titles with their honest and final accuracies in percent."""
    ranked = sorted(scores, key=lambda score: score[1])
    titles, honest, final = zip(*ranked, strict=True)
    figure, axes = pyplot.subplots(figsize=(7.2, 0.5 + 0.22 * len(ranked)), layout="constrained")
    places = range(len(ranked))
    axes.hlines(places, honest, final, colors="#BBBBBB", linewidth=2)
    axes.plot(final, places, "|", color=FINAL, markersize=9, markeredgewidth=2, label="final (last 5 rounds)")
    axes.plot(honest, places, "o", color=HONEST, markersize=6, label="honest")
    axes.set_yticks(places, titles)
    for label in axes.get_yticklabels():
        if label.get_text() in set(emphasised):
            label.set_fontweight("bold")
    axes.set_ylim(-0.7, len(ranked) - 0.3)
    axes.set_xlabel("test accuracy, percent")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.legend(
        loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False
    )  # above the axes, which are full of points
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
