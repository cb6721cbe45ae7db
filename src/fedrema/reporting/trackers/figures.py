"""Pictures of one run as PNG files: how it learns, the gap, who is like whom, who learns from whom."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedrema.page.relations import neighbours
from fedrema.reporting.curves import draw_curves
from fedrema.runs.directory import RunDirectory
from fedrema.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MATRICES = {"S": "Similarity of classifiers", "G": "Who learns from whom", "weights": "Weights of classifiers"}


@contextmanager
def drawn(directory: RunDirectory) -> Iterator[tuple[int, dict[str, Path]]]:
    """Give the last round and the pictures of a run; they are there as long as one looks."""
    run = Run(directory.path)
    number = run.rounds[-1].round if run.rounds else 0
    with tempfile.TemporaryDirectory() as folder:
        files: dict[str, Path] = {}
        for quantity in ("accuracy", "gap_ratio"):
            if any(quantity in record for record in run.rounds):
                files[quantity] = Path(folder) / f"{quantity}.png"
                draw_curves([run], files[quantity], quantity)
        relations = run.relations()
        latest = relations[max(relations)] if relations else {}
        order = neighbours(latest["S"]) if "S" in latest and len(latest["S"]) > 1 else None
        for name, matrix in latest.items():
            if name in MATRICES and order is not None:
                files[name] = Path(folder) / f"{name}.png"
                _heat_map(matrix[np.ix_(order, order)], MATRICES[name], max(relations)).savefig(files[name], dpi=120)
        yield number, files


def _heat_map(matrix: np.ndarray, title: str, number: int) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4.4), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(matrix, cmap="viridis", vmin=0, interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    axes.set_title(f"{title}, round {number}", fontsize=10.5, loc="left")
    axes.set_xlabel("clients, similar ones side by side", fontsize=9)
    figure.colorbar(image, ax=axes, shrink=0.85)
    return figure
