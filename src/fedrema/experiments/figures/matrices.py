"""Who is like whom, and who learns from whom: matrices between clients, with frames around the true groups."""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from fedrema.experiments.figures.layout import GREY, SMALL, WIDTH, entitle, new_figure
from fedrema.experiments.figures.results import Results
from fedrema.experiments.store import Finished

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

COLOURS = "viridis"
"""Evenly perceived from dark to light, by every kind of colour vision and in grey."""
ABSENT = "0.85"
FRAMES = "Frames: the true groups."


def figure_of_similarity(results: Results) -> "Figure | None":
    """Draw S at some rounds: a line of panels per cell."""
    cells = [(row, column, runs[0]) for row, column, runs in results.cells(lambda run: run.relations.get("S"))]
    if not cells:
        return None
    count = max(len(run.relations["S"]) for _, _, run in cells)
    side = (WIDTH - 1.1) / max(count, 3)
    figure = new_figure(0.3 + (side + 0.18) * len(cells))
    grid = figure.subplots(len(cells), count, squeeze=False)
    for line, (row, column, run) in zip(grid, cells, strict=True):
        for axes in line[len(run.relations["S"]) :]:
            axes.remove()
        for axes, (number, matrix) in zip(line, run.relations["S"].items(), strict=False):
            image = _draw(axes, _matrix(matrix), run, 1.0)
            axes.set_title(f"Round {number}", fontsize=SMALL, loc="left")
        line[0].set_ylabel(results.name(row, column), fontsize=SMALL + 1)
    _scale(figure, grid, image, "Similarity $S_{ij}$")
    caption = [
        "Client i's row, client j's column.",
        _first_seed([run for *_, run in cells]),
        *_about([run for *_, run in cells], "S"),
        *results.missing(),
        results.lacking("Similarities were not recorded", lambda run: run.relations.get("S")),
    ]
    entitle(figure, results.title("Similarities between clients"), caption)
    return figure


def figure_of_dependencies(results: Results) -> "Figure | None":
    """Draw G, each row divided by its sum: a panel per cell."""
    cells = [(row, column, runs[0]) for row, column, runs in results.cells(lambda run: run.relations.get("G"))]
    if not cells:
        return None
    per_line = min(len(cells), 3 if len(cells) % 4 in (1, 2) and len(cells) != 4 else 4)
    lines = -(-len(cells) // per_line)
    side = min((WIDTH - 1.0) / per_line, 3.2)
    figure = new_figure(0.3 + (side + 0.22) * lines, WIDTH if per_line > 1 else 4.6)
    grid = figure.subplots(lines, per_line, squeeze=False)
    shares = [100 * weights(_matrix(run.relations["G"])) for _, _, run in cells]
    for axes in grid.flat[len(cells) :]:
        axes.remove()
    for axes, (row, column, run), share in zip(grid.flat, cells, shares, strict=False):
        image = _draw(axes, share, run, max(float(np.nanmax(one)) for one in shares))
        axes.set_title(results.name(row, column), fontsize=SMALL + 1, loc="left")
    _scale(figure, grid, image, "Weight in one's own classifier (%)")
    caption = [
        "Row: whose classifier; column: from whom it comes, by how often it was chosen (Eq. 10).",
        _first_seed([run for *_, run in cells]),
        *_about([run for *_, run in cells], "G"),
        *results.missing(),
        results.lacking("G was not recorded", lambda run: "G" in run.relations or "critical_rounds" not in run.summary),
    ]
    entitle(figure, results.title("Who learns from whom"), caption)
    return figure


def weights(counts: np.ndarray) -> np.ndarray:
    """Divide each row by its sum, where it has one (Eq. 10)."""
    sums = np.nansum(counts, axis=1, keepdims=True)
    shares = np.zeros_like(counts)
    np.divide(counts, sums, out=shares, where=sums > 0)
    return shares


def _matrix(rows: Sequence[Sequence[Any]]) -> np.ndarray:
    return np.array([[np.nan if value is None else value for value in row] for row in rows], float)


def _draw(axes: "Axes", matrix: np.ndarray, run: Finished, highest: float) -> "AxesImage":
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    groups = run.clients.get("groups") or [0] * len(matrix)
    order = np.argsort(groups, kind="stable")  # a frame can only go around neighbours
    colours = colormaps[COLOURS].with_extremes(bad=ABSENT)
    image = axes.imshow(matrix[order][:, order], cmap=colours, vmin=0, vmax=highest, interpolation="nearest")
    start = 0
    for _, members in groupby(sorted(groups)) if "groups" in run.clients else ():
        size = len(list(members))
        square = Rectangle((start - 0.5, start - 0.5), size, size, fill=False, edgecolor="white", linewidth=0.8)
        axes.add_patch(square)
        start += size
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    return image


def _scale(figure: "Figure", grid: np.ndarray, image: "AxesImage", words: str) -> None:
    shown = [axes for axes in grid.flat if axes.figure is not None]
    bar = figure.colorbar(image, ax=shown, shrink=0.8 if len(grid) > 1 else 0.9, aspect=18 * len(grid), pad=0.02)
    bar.set_label(words, fontsize=SMALL)
    bar.ax.tick_params(labelsize=SMALL, color=GREY)
    bar.outline.set_visible(False)


def _first_seed(runs: Sequence[Finished]) -> str:
    return f"Training seed {', '.join(str(seed) for seed in sorted({run.seed for run in runs}))}."


def _about(runs: Sequence[Finished], part: str) -> list[str]:
    framed = any("groups" in run.clients for run in runs)
    kept = [run.relations[part] for run in runs]
    matrices = [matrix for each in kept for matrix in (each.values() if isinstance(each, dict) else [each])]
    absent = any(value is None for matrix in matrices for row in matrix for value in row)
    return [*([FRAMES] if framed else []), *(["Grey: absent."] if absent else [])]
