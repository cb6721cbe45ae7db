"""Matrices between clients: which of them a run has, the order of clients, and heat maps."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from fedrema.core.reports import HEAD_SIMILARITY, Matrix, MatrixKind, Reports

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OPTIMALLY_ORDERED = 300
"""Number of clients up to which the leaves of the clustering are ordered optimally; the time grows quadratically."""
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


def heat_map(matrix: np.ndarray, title: str) -> "Figure":
    """Return a figure of a matrix between clients."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4.4), layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(matrix, cmap="viridis", vmin=0, interpolation="nearest")
    axes.set(xticks=[], yticks=[])
    axes.set_title(title, fontsize=10.5, loc="left")
    axes.set_xlabel("clients, ordered by similarity", fontsize=9)
    figure.colorbar(image, ax=axes, shrink=0.85)
    return figure
