"""Small quadratic programmes, by Clarabel."""

import clarabel
import numpy as np
from scipy import sparse


def least_on_simplex(matrix: np.ndarray) -> np.ndarray | None:
    """Return the weights α ≥ 0, Σ α = 1 that minimise αᵀ P α for a positive semidefinite P [k, k]; None if unsolved."""
    size = len(matrix)
    scale = np.abs(matrix).max()
    if size == 1 or scale == 0:
        return np.full(size, 1 / size)
    objective = sparse.csc_matrix(np.triu(matrix / scale))  # the solver reads the upper triangle
    constraints = sparse.csc_matrix(np.vstack([np.ones(size), -np.eye(size)]))
    limits = np.concatenate([[1.0], np.zeros(size)])
    cones = [clarabel.ZeroConeT(1), clarabel.NonnegativeConeT(size)]
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    solution = clarabel.DefaultSolver(objective, np.zeros(size), constraints, limits, cones, settings).solve()
    if solution.status not in (clarabel.SolverStatus.Solved, clarabel.SolverStatus.AlmostSolved):
        return None
    alpha: np.ndarray = np.maximum(solution.x, 0)
    return alpha
