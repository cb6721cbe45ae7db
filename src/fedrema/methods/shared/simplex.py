"""Quadratic programmes on the simplex, solved with Clarabel."""

import clarabel
import numpy as np
from scipy import sparse

TOLERANCE = 1e-10


def minimise_on_simplex(matrix: np.ndarray) -> np.ndarray | None:
    """Return α ≥ 0, Σ α = 1 that minimises αᵀ P α for a positive semidefinite P [k, k]; None if the solver fails."""
    size = len(matrix)
    scale = np.abs(matrix).max()
    if not np.isfinite(scale):
        return None
    if size == 1 or scale == 0:
        return np.full(size, 1 / size)
    # The constraint matrix [1ᵀ; −I] in the solver's column format: the sum is 1, each weight at least 0.
    values = np.tile([1.0, -1.0], size)
    rows = np.stack([np.zeros(size, int), 1 + np.arange(size)], axis=1).ravel()
    constraints = sparse.csc_matrix((values, rows, 2 * np.arange(size + 1)), shape=(size + 1, size))
    limits = np.concatenate([[1.0], np.zeros(size)])
    cones = [clarabel.ZeroConeT(1), clarabel.NonnegativeConeT(size)]
    objective = sparse.csc_matrix(np.triu(matrix / scale))  # the solver reads the upper triangle
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = TOLERANCE
    solution = clarabel.DefaultSolver(objective, np.zeros(size), constraints, limits, cones, settings).solve()
    if solution.status not in (clarabel.SolverStatus.Solved, clarabel.SolverStatus.AlmostSolved):
        return None
    alpha: np.ndarray = np.maximum(solution.x, 0)
    return alpha
