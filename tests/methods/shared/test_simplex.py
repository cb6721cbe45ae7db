"""Small quadratic programs, against another solver, closed forms and the optimality conditions."""

import numpy as np
import pytest
from scipy.optimize import minimize

from fedrema.methods.shared.simplex import minimise_on_simplex


def by_scipy(matrix: np.ndarray) -> np.ndarray:
    """Solve the same problem by sequential least squares."""
    size = len(matrix)
    scaled = matrix / np.abs(matrix).max()
    found = minimize(
        lambda alpha: alpha @ scaled @ alpha,
        np.full(size, 1 / size),
        jac=lambda alpha: 2 * scaled @ alpha,
        bounds=[(0, 1)] * size,
        constraints={"type": "eq", "fun": lambda alpha: alpha.sum() - 1, "jac": lambda alpha: np.ones(size)},
        method="SLSQP",
        options={"ftol": 1e-16, "maxiter": 1000},
    )
    assert found.success, found.message
    return found.x


def random_problem(size: int, rank: int, seed: int) -> np.ndarray:
    factor = np.random.default_rng([size, rank, seed]).normal(size=(size, rank))
    return factor @ factor.T


def value(matrix: np.ndarray, alpha: np.ndarray) -> float:
    return float(alpha @ matrix @ alpha / np.abs(matrix).max())


def check_optimal(matrix: np.ndarray, alpha: np.ndarray) -> None:
    """Assert the Karush-Kuhn-Tucker conditions: on the simplex, no partial derivative is below the multiplier."""
    assert alpha.min() >= 0
    assert alpha.sum() == pytest.approx(1, abs=1e-6)
    slope = matrix @ alpha / np.abs(matrix).max()
    multiplier = alpha @ slope  # αᵀPα is the multiplier of Σ α = 1
    assert slope.min() >= multiplier - 1e-5
    assert np.abs(slope - multiplier)[alpha > 1e-3].max() < 1e-5


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [2, 3, 5, 10, 20])
def test_weights_equal_those_of_another_solver(size, seed):
    matrix = random_problem(size, size + 5, seed) + 0.5 * np.eye(size)
    alpha = minimise_on_simplex(matrix)
    assert alpha == pytest.approx(by_scipy(matrix), abs=1e-4)
    check_optimal(matrix, alpha)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("size", "rank"), [(2, 1), (5, 2), (10, 1), (20, 3), (20, 19)])
def test_a_matrix_that_lacks_rank_is_solved_as_well(size, rank, seed):
    # There may be several optima: only their value is unique.
    matrix = random_problem(size, rank, seed)
    alpha = minimise_on_simplex(matrix)
    assert value(matrix, alpha) == pytest.approx(value(matrix, by_scipy(matrix)), abs=1e-6)
    check_optimal(matrix, alpha)


@pytest.mark.parametrize("size", [2, 7, 20])
def test_independent_errors_are_weighted_by_inverse_variances(size):
    variances = np.random.default_rng(size).uniform(0.5, 5, size)
    expected = (1 / variances) / (1 / variances).sum()
    assert minimise_on_simplex(np.diag(variances)) == pytest.approx(expected, abs=1e-5)


def test_two_weights_equal_a_calculation_by_hand():
    # f(a) = 2a² + 2·a(1−a) + 4(1−a)² has the slope 8a − 6: a = ¾.
    assert minimise_on_simplex(np.array([[2.0, 1.0], [1.0, 4.0]])) == pytest.approx([0.75, 0.25], abs=1e-6)
    # With 3 beside the diagonal, 2a² + 6a(1−a) + 6(1−a)² has the slope 4a − 6 < 0: all on the first.
    assert minimise_on_simplex(np.array([[2.0, 3.0], [3.0, 6.0]])) == pytest.approx([1, 0], abs=1e-6)


def test_both_triangles_count():
    # Only the upper triangle is read, for both: ignoring it would give (2/3, 1/3).
    matrix = np.array([[2.0, 1.0], [1.0, 4.0]])
    assert minimise_on_simplex(matrix)[0] != pytest.approx(2 / 3, abs=0.05)
    assert minimise_on_simplex(matrix[::-1, ::-1].copy()) == pytest.approx([0.25, 0.75], abs=1e-6)


@pytest.mark.parametrize("scale", [1e-300, 1e-12, 1e-6, 1.0, 1e6, 1e12, 1e300])
def test_the_scale_does_not_matter(scale):
    matrix = random_problem(6, 8, seed=1) + np.eye(6)
    assert minimise_on_simplex(scale * matrix) == pytest.approx(by_scipy(matrix), abs=1e-5)


def test_a_single_weight_is_one():
    for only in (0.0, 3.0, -1.0):
        assert minimise_on_simplex(np.array([[only]])).tolist() == [1]


def test_a_constant_matrix_gives_equal_weights():
    assert minimise_on_simplex(np.zeros((4, 4))).tolist() == [0.25] * 4
    assert minimise_on_simplex(np.ones((4, 4))) == pytest.approx([0.25] * 4, abs=1e-6)


def test_a_matrix_that_is_not_finite_has_no_solution():
    assert minimise_on_simplex(np.full((3, 3), np.nan)) is None
    matrix = np.eye(3)
    matrix[0, 0] = np.nan
    assert minimise_on_simplex(matrix) is None


def test_the_matrix_is_not_changed():
    matrix = random_problem(5, 5, seed=0)
    before = matrix.copy()
    minimise_on_simplex(matrix)
    assert (matrix == before).all()
