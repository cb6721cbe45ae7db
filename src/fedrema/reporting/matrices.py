"""Matrices between clients: which of them a run has, the order of clients, and heat maps."""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedrema.core.reports import HEAD_SIMILARITY, Matrix, MatrixKind, Reports
from fedrema.errors import BadInput
from fedrema.runs.model_matrix import ModelMatrix
from fedrema.runs.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedrema.base.figures import Figure

OPTIMALLY_ORDERED = 300
"""Number of clients up to which the leaves of the clustering are ordered optimally; the time grows quadratically."""
NAMED = 60
"""Number of clients up to which their names are written beside a matrix."""
PEER_KINDS: tuple[MatrixKind, ...] = ("counts", "weights", "selection")
"""Kinds of matrices that show who learns from whom, the most informative first."""


def declared_matrix(name: str, reports: Reports) -> Matrix:
    """Return the declaration of a recorded matrix; where the method declares none, one with the name as its title."""
    known = {matrix.name: matrix for matrix in (HEAD_SIMILARITY, *reports.matrices)}
    return known.get(name, Matrix(name, name, "counts"))


def peer_matrix(names: Iterable[str], reports: Reports) -> Matrix | None:
    """Return the declared matrix that best shows who learns from whom, otherwise the similarity; None without any."""
    names = set(names)
    found = [matrix for matrix in (*reports.matrices, HEAD_SIMILARITY) if matrix.name in names]
    kinds = (*PEER_KINDS, "similarity")
    return min(found, key=lambda matrix: kinds.index(matrix.kind), default=None)


def order_by_similarity(similarity: np.ndarray) -> np.ndarray:
    """Return an order of the clients in which similar ones are next to each other (hierarchical clustering)."""
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    symmetric = np.nan_to_num((similarity + similarity.T) / 2)
    highest = max(float(symmetric.max()), 1e-9)
    distance = np.clip(1 - symmetric / highest, 0, None)
    np.fill_diagonal(distance, 0)
    tree = linkage(squareform(distance, checks=False), "average", optimal_ordering=len(distance) <= OPTIMALLY_ORDERED)
    return np.asarray(leaves_list(tree))


def draw_model_matrix(found: ModelMatrix, path: Path, title: str) -> None:
    """Draw each client's model on each client's test samples, as PNG, SVG or PDF by the file's suffix."""
    from matplotlib import colormaps

    from fedrema.base.figures import Figure

    metric, clients = found.metric, len(found.names)
    side = min(max(3.2, 0.26 * clients), 9.0)
    figure = Figure(figsize=(side + 1.4, side + 0.6), layout="constrained")
    axes = figure.subplots()
    colours = colormaps["viridis" if metric.higher_is_better else "viridis_r"].with_extremes(bad="0.85")
    image = axes.imshow((100 if metric.percent else 1) * found.values, cmap=colours, interpolation="nearest")
    _name_clients(axes, found.names)
    axes.spines[:].set_visible(False)
    axes.set_title(title, fontsize=10.5, loc="left", parse_math=False)
    axes.set_xlabel("test samples of", fontsize=9)
    axes.set_ylabel("model of", fontsize=9)
    bar = figure.colorbar(image, ax=axes, shrink=0.85)
    bar.set_label(f"{metric.title} (%)" if metric.percent else metric.title, fontsize=9)
    bar.outline.set_visible(False)
    figure.write(path, dots_per_inch=200)


def model_matrix_csv(found: ModelMatrix) -> str:
    """Return a row per model and a column per client whose samples it predicts; percentages as shares."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["model", *found.names])
    for name, row in zip(found.names, found.values.tolist(), strict=True):
        writer.writerow([name, *("" if np.isnan(value) else value for value in row)])
    return stream.getvalue()


def heat_map(matrix: np.ndarray, title: str, names: Sequence[str] = ()) -> "Figure":
    """Return a figure of a matrix between clients; their names are written beside it if there is room."""
    from fedrema.base.figures import Figure

    side = min(max(4.0, 0.26 * len(names)), 9.0)
    figure = Figure(figsize=(side + 1, side + 0.4), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(matrix, cmap="viridis", vmin=0, interpolation="nearest")
    _name_clients(axes, names)
    axes.set_title(title, fontsize=10.5, loc="left", parse_math=False)
    axes.set_xlabel("clients, ordered by similarity", fontsize=9)
    figure.colorbar(image, ax=axes, shrink=0.85)
    return figure


def relations_figure(run: Run, name: str | None = None, number: int | None = None) -> "Figure":
    """Return a figure of a matrix between the clients of a run, with similar clients next to each other.

    Parameters
    ----------
    run
        A run with recorded relations (`record="relations"`).
    name
        A recorded matrix. Default: the one that best shows who learns from whom.
    number
        The round. Default: the last that was recorded.
    """
    found = run.relations()
    if not found:
        raise BadInput(
            f'{run.path} has no matrices between clients: run it with --record relations (record="relations").'
        )
    number = max(found) if number is None else number
    if number not in found:
        raise BadInput(f"round {number} has no recorded matrices; valid are {min(found)} to {max(found)}.")
    recorded = found[number]
    declared = peer_matrix(recorded, run.reports) if name is None else declared_matrix(name, run.reports)
    if declared is None or declared.name not in recorded:
        raise BadInput(f"matrix {name!r} was not recorded in round {number}; valid are {', '.join(recorded)}.")
    values = np.asarray(recorded[declared.name], dtype=float)
    similarity = recorded.get(HEAD_SIMILARITY.name, values)
    order = order_by_similarity(similarity) if len(values) > 1 else np.arange(len(values))
    return heat_map(
        values[np.ix_(order, order)],
        f"{run.title}: {declared.title}, round {number}",
        [run.names[row] for row in order],
    )


def _name_clients(axes: "Axes", names: Sequence[str]) -> None:
    """Write the clients' names beside a matrix, unless there are too many."""
    if 0 < len(names) <= NAMED:
        places, short = range(len(names)), [name if len(name) <= 14 else f"{name[:13]}…" for name in names]
        axes.set_xticks(places, short, rotation=90, fontsize=7, parse_math=False)
        axes.set_yticks(places, short, fontsize=7, parse_math=False)
    else:
        axes.set(xticks=[], yticks=[])
