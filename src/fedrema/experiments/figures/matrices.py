"""Figures of matrices between clients, with frames around the true groups: similarity, and weights of peers."""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from fedrema.core.reports import HEAD_SIMILARITY
from fedrema.experiments.figures.panels import GREY, SMALL, WIDTH, Results, add_texts, new_figure
from fedrema.experiments.finished_run import PEERS, FinishedRun, Rows, as_array
from fedrema.experiments.spec import Cell

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

COLOURS = "viridis"
"""Perceptually uniform, also with colour vision deficiencies and in greyscale."""
ABSENT = "0.85"
FRAMES = "Frames: the true groups."


def figure_of_similarity(results: Results) -> "Figure | None":
    """Draw the similarity matrix S at some rounds: a line of panels per cell."""
    cells = [(row, column, runs[0]) for row, column, runs in results.cells(_has_similarity)]
    if not cells:
        return None
    shown = [run.matrices[HEAD_SIMILARITY.name] for _, _, run in cells]
    count = max(map(len, shown))
    side = (WIDTH - 1.1) / max(count, 3)
    figure = new_figure(0.3 + (side + 0.18) * len(cells))
    grid = figure.subplots(len(cells), count, squeeze=False)
    for line, (row, column, run), matrices in zip(grid, cells, shown, strict=True):
        for axes in line[len(matrices) :]:
            axes.remove()
        for axes, (number, matrix) in zip(line, sorted(matrices.items()), strict=False):
            image = _draw(axes, as_array(matrix), run, 1.0)
            axes.set_title(f"Round {number}", fontsize=SMALL, loc="left")
        line[0].set_ylabel(results.name(row, column), fontsize=SMALL + 1)
    _scale(figure, grid, image, "Similarity $S_{ij}$")
    caption = [
        "Client i's row, client j's column.",
        _first_seed([run for *_, run in cells]),
        *_about([run for *_, run in cells], [matrix for matrices in shown for matrix in matrices.values()]),
        *results.missing(),
        results.lacking("Similarities were not recorded", _has_similarity),
    ]
    add_texts(figure, results.title("Similarities between clients"), caption)
    return figure


def _has_similarity(cell: Cell, run: FinishedRun) -> bool:
    return bool(run.matrices.get(HEAD_SIMILARITY.name))


def figure_of_peers(results: Results) -> "Figure | None":
    """Draw how much each client takes from each other, by the matrix that the method declares: a panel per cell."""
    cells = [(row, column, runs[0]) for row, column, runs in results.cells(_peers)]
    if not cells:
        return None
    per_line = min(len(cells), 3 if len(cells) % 4 in (1, 2) and len(cells) != 4 else 4)
    lines = -(-len(cells) // per_line)
    side = min((WIDTH - 1.0) / per_line, 3.2)
    figure = new_figure(0.3 + (side + 0.22) * lines, WIDTH if per_line > 1 else 4.6)
    grid = figure.subplots(lines, per_line, squeeze=False)
    kept = [rows for row, column, run in cells if (rows := _peers(results.cell(row, column), run)) is not None]
    shares = [100 * weights(as_array(rows)) for rows in kept]
    for axes in grid.flat[len(cells) :]:
        axes.remove()
    for axes, (row, column, run), share in zip(grid.flat, cells, shares, strict=False):
        image = _draw(axes, share, run, max(float(np.nanmax(one)) for one in shares))
        axes.set_title(results.name(row, column), fontsize=SMALL + 1, loc="left")
    _scale(figure, grid, image, "Weight of the peer (%)")
    caption = [
        "Row: a client; column: the peer whose parameters it averages with its own, by their weight.",
        _first_seed([run for *_, run in cells]),
        *_about([run for *_, run in cells], kept),
        *results.missing(),
        results.lacking("Not recorded", lambda cell, run: not _declared(cell) or _peers(cell, run) is not None),
    ]
    add_texts(figure, results.title("Who learns from whom"), caption)
    return figure


def _declared(cell: Cell) -> list[str]:
    return [matrix.name for matrix in cell.parsed.method.reports.matrices if matrix.kind in PEERS]


def _peers(cell: Cell, run: FinishedRun) -> Rows | None:
    """Return the last weights or counts of peers that were recorded."""
    found = next((run.matrices[name] for name in _declared(cell) if run.matrices.get(name)), None)
    return found[max(found)] if found else None


def weights(counts: np.ndarray) -> np.ndarray:
    """Divide each row by its sum; rows of zeros stay."""
    sums = np.nansum(counts, axis=1, keepdims=True)
    shares = np.zeros_like(counts)
    np.divide(counts, sums, out=shares, where=sums > 0)
    return shares


def _draw(axes: "Axes", matrix: np.ndarray, run: FinishedRun, highest: float) -> "AxesImage":
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    groups = run.clients.groups or [0] * len(matrix)
    order = np.argsort(groups, kind="stable")  # the members of a group must be neighbours
    colours = colormaps[COLOURS].with_extremes(bad=ABSENT)
    image = axes.imshow(matrix[order][:, order], cmap=colours, vmin=0, vmax=highest, interpolation="nearest")
    start = 0
    for _, members in groupby(sorted(groups)) if run.clients.groups is not None else ():
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


def _first_seed(runs: Sequence[FinishedRun]) -> str:
    return f"Training seed {', '.join(str(seed) for seed in sorted({run.seed for run in runs}))}."


def _about(runs: Sequence[FinishedRun], matrices: Sequence[Rows]) -> list[str]:
    framed = any(run.clients.groups is not None for run in runs)
    absent = any(value is None for matrix in matrices for row in matrix for value in row)
    return [*([FRAMES] if framed else []), *(["Grey: absent."] if absent else [])]
