"""Small quadratic programs, against another solver, closed forms and the optimality conditions."""

import clarabel
import numpy as np
import pytest
import torch
from scipy import sparse
from scipy.optimize import minimize

from fedrema.methods.shared import simplex
from fedrema.methods.shared.simplex import minimise_on_simplex, optimality_gap, project_onto_simplex


def solve(matrix: np.ndarray) -> np.ndarray:
    """Solve one program without a linear term."""
    quadratic = torch.from_numpy(matrix)[None]
    return minimise_on_simplex(quadratic, torch.zeros(1, len(matrix)))[0].numpy()


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
    alpha = solve(matrix)
    assert alpha == pytest.approx(by_scipy(matrix), abs=1e-4)
    check_optimal(matrix, alpha)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("size", "rank"), [(2, 1), (5, 2), (10, 1), (20, 3), (20, 19)])
def test_a_matrix_that_lacks_rank_is_solved_as_well(size, rank, seed):
    # There may be several optima: only their value is unique.
    matrix = random_problem(size, rank, seed)
    alpha = solve(matrix)
    assert value(matrix, alpha) == pytest.approx(value(matrix, by_scipy(matrix)), abs=1e-6)
    check_optimal(matrix, alpha)


@pytest.mark.parametrize("size", [2, 7, 20])
def test_independent_errors_are_weighted_by_inverse_variances(size):
    variances = np.random.default_rng(size).uniform(0.5, 5, size)
    expected = (1 / variances) / (1 / variances).sum()
    assert solve(np.diag(variances)) == pytest.approx(expected, abs=1e-5)


def test_two_weights_equal_a_calculation_by_hand():
    # f(a) = 2a² + 2·a(1−a) + 4(1−a)² has the slope 8a − 6: a = ¾.
    assert solve(np.array([[2.0, 1.0], [1.0, 4.0]])) == pytest.approx([0.75, 0.25], abs=1e-6)
    # With 3 beside the diagonal, 2a² + 6a(1−a) + 6(1−a)² has the slope 4a − 6 < 0: all on the first.
    assert solve(np.array([[2.0, 3.0], [3.0, 6.0]])) == pytest.approx([1, 0], abs=1e-6)


def test_both_triangles_count():
    # Only the upper triangle is read, for both: ignoring it would give (2/3, 1/3).
    matrix = np.array([[2.0, 1.0], [1.0, 4.0]])
    assert solve(matrix)[0] != pytest.approx(2 / 3, abs=0.05)
    assert solve(matrix[::-1, ::-1].copy()) == pytest.approx([0.25, 0.75], abs=1e-6)


@pytest.mark.parametrize("scale", [1e-300, 1e-12, 1e-6, 1.0, 1e6, 1e12, 1e300])
def test_the_scale_does_not_matter(scale):
    matrix = random_problem(6, 8, seed=1) + np.eye(6)
    assert solve(scale * matrix) == pytest.approx(by_scipy(matrix), abs=1e-5)


def test_a_single_weight_is_one():
    for only in (0.0, 3.0, -1.0):
        assert solve(np.array([[only]])).tolist() == [1]


def test_a_constant_matrix_gives_equal_weights():
    assert solve(np.zeros((4, 4))).tolist() == [0.25] * 4
    assert solve(np.ones((4, 4))) == pytest.approx([0.25] * 4, abs=1e-6)


def test_a_matrix_that_is_not_finite_has_no_solution():
    assert np.isnan(solve(np.full((3, 3), np.nan))).all()
    matrix = np.eye(3)
    matrix[0, 0] = np.nan
    assert np.isnan(solve(matrix)).all()
    matrix[0, 0] = np.inf
    assert np.isnan(solve(matrix)).all()


def test_the_matrix_is_not_changed():
    matrix = random_problem(5, 5, seed=0)
    before = matrix.copy()
    solve(matrix)
    assert (matrix == before).all()


# Batches


def by_clarabel(quadratic: torch.Tensor, linear: torch.Tensor) -> np.ndarray:
    """Solve one program with Clarabel, as accurately as it can."""
    size = len(linear)
    constraints = sparse.csc_matrix(np.concatenate([np.ones((1, size)), -np.eye(size)]))
    limits = np.concatenate([[1.0], np.zeros(size)])
    cones = [clarabel.ZeroConeT(1), clarabel.NonnegativeConeT(size)]
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-13
    objective = sparse.csc_matrix(np.triu(quadratic.numpy()))
    return np.array(clarabel.DefaultSolver(objective, linear.numpy(), constraints, limits, cones, settings).solve().x)


def random_batch(programs: int, size: int, rank: int, ridge: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return matrices of a rank, plus a multiple of the identity, and linear terms of a similar size."""
    generator = torch.Generator().manual_seed(1000 * size + rank)
    factor = torch.randn(programs, size, rank, generator=generator, dtype=torch.float64)
    quadratic = factor @ factor.mT / rank + ridge * torch.eye(size)
    return quadratic, torch.randn(programs, size, generator=generator, dtype=torch.float64)


def check_all_optimal(quadratic: torch.Tensor, linear: torch.Tensor) -> torch.Tensor:
    """Solve programs and assert the conditions of an optimum, relative to the largest entry of each program."""
    weights = minimise_on_simplex(quadratic, linear)
    assert weights.dtype == torch.float64
    assert (weights >= 0).all()
    assert torch.allclose(weights.sum(dim=1), torch.ones(len(weights), dtype=torch.float64), rtol=0, atol=1e-12)
    scale = torch.maximum(quadratic.abs().amax(dim=(1, 2)), linear.abs().amax(dim=1))
    gradient = (quadratic @ weights[:, :, None])[:, :, 0] + linear
    slack = gradient - gradient.amin(dim=1, keepdim=True)  # the multipliers of w ≥ 0
    assert ((weights * slack).amax(dim=1) <= 1e-9 * scale).all()
    assert (optimality_gap(quadratic, linear, weights) <= 1e-9 * scale).all()
    return weights


@pytest.fixture
def no_fallback(monkeypatch):
    """Make the test fail where a program is left to Clarabel."""
    monkeypatch.setattr(simplex, "_by_clarabel", None)


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("with_linear", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 9, 20, 33, 60])
def test_a_batch_has_the_weights_of_clarabel(size, with_linear):
    quadratic, linear = random_batch(6, size, size + 5, ridge=0.5)
    linear = with_linear * linear
    weights = check_all_optimal(quadratic, linear)
    for found, matrix, vector in zip(weights, quadratic, linear, strict=True):
        assert found.numpy() == pytest.approx(by_clarabel(matrix, vector), abs=1e-7)


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("rank", [1, 2, 10])
@pytest.mark.parametrize("size", [2, 5, 20, 60])
def test_a_batch_of_matrices_that_lack_rank_is_solved(size, rank):
    quadratic, linear = random_batch(6, size, rank)
    check_all_optimal(quadratic, linear)
    check_all_optimal(quadratic, torch.zeros_like(linear))


@pytest.mark.usefixtures("no_fallback")
def test_two_hundred_clients():
    quadratic, linear = random_batch(3, 200, 50, ridge=0.01)
    check_all_optimal(quadratic, linear)


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("size", [2, 3, 10, 20])
def test_entries_of_very_different_sizes(size):
    quadratic, linear = random_batch(6, size, size + 5, ridge=0.1)
    spread = 10 ** torch.linspace(-4, 4, size, dtype=torch.float64)
    check_all_optimal(spread[:, None] * quadratic * spread, torch.zeros_like(linear))
    for scale in (1e-8, 1e8):
        expected = minimise_on_simplex(quadratic, linear)
        assert torch.allclose(check_all_optimal(scale * quadratic, scale * linear), expected, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("no_fallback")
def test_without_a_matrix_the_smallest_cost_takes_it_all_and_ties_share():
    linear = torch.tensor([[2.0, 1.0, 3.0], [1.0, 5.0, 1.0], [7.0, 7.0, 7.0]])
    weights = minimise_on_simplex(torch.zeros(3, 3, 3), linear)
    expected = [[0, 1, 0], [0.5, 0, 0.5], [1 / 3, 1 / 3, 1 / 3]]
    assert weights.tolist() == [pytest.approx(row, abs=1e-9) for row in expected]


def test_a_linear_term_by_hand():
    # ½a² + ½(1−a)² + ca has the slope 2a − 1 + c: a = (1 − c)/2, and 0 from c = 1 on.
    linear = torch.tensor([[0.5, 0.0], [1.0, 0.0], [3.0, 0.0], [-1.0, 0.0]])
    weights = minimise_on_simplex(torch.eye(2).expand(4, 2, 2), linear)
    assert weights[:, 0].tolist() == pytest.approx([0.25, 0, 0, 1], abs=1e-9)


@pytest.mark.parametrize("rank", [1, 3, 20])
@pytest.mark.parametrize("size", [1, 2, 5, 8, 11, 20])
def test_a_program_is_solved_as_if_it_were_alone(size, rank):
    quadratic, linear = random_batch(7, size, rank)
    together = minimise_on_simplex(quadratic, linear)
    alone = torch.cat([minimise_on_simplex(quadratic[[row]], linear[[row]]) for row in range(7)])
    assert torch.allclose(alone, together, rtol=0, atol=1e-12)
    order = torch.tensor([4, 2, 6, 0, 1, 5, 3])
    assert torch.allclose(minimise_on_simplex(quadratic[order], linear[order]), together[order], rtol=0, atol=1e-12)


def test_large_batches_are_cut(monkeypatch):
    quadratic, linear = random_batch(7, 5, 8)
    whole = minimise_on_simplex(quadratic, linear)
    monkeypatch.setattr(simplex, "LARGEST_BATCH", 60)  # two programs at a time
    assert torch.equal(minimise_on_simplex(quadratic, linear), whole)


def test_a_program_that_is_not_finite_leaves_the_others_alone():
    quadratic, linear = random_batch(3, 5, 8)
    expected = minimise_on_simplex(quadratic, linear)
    quadratic[1, 2, 2] = torch.nan
    found = minimise_on_simplex(quadratic, linear)
    assert found[1].isnan().all()
    assert torch.equal(found[[0, 2]], expected[[0, 2]])


def test_clarabel_solves_what_does_not_converge(monkeypatch):
    quadratic, linear = random_batch(6, 10, 15, ridge=0.5)
    expected = minimise_on_simplex(quadratic, linear)
    solved = []
    monkeypatch.setattr(simplex, "ITERATIONS", 1)
    original = simplex._by_clarabel

    def counted(*given: torch.Tensor) -> torch.Tensor:
        solved.append(given)
        return original(*given)

    monkeypatch.setattr(simplex, "_by_clarabel", counted)
    assert torch.allclose(minimise_on_simplex(quadratic, linear), expected, rtol=0, atol=1e-5)
    assert solved


def test_without_any_solution_weights_are_nan(monkeypatch):
    quadratic, linear = random_batch(2, 10, 15)
    monkeypatch.setattr(simplex, "ACCURACY", -1.0)  # nothing is accurate enough
    monkeypatch.setattr(simplex, "_by_clarabel", lambda matrix, vector: torch.full_like(vector, torch.nan))
    assert minimise_on_simplex(quadratic, linear).isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("small", [simplex.SMALL_BATCH, 0], ids=["solved on the CPU", "solved on the GPU"])
def test_a_gpu_finds_the_same(small, monkeypatch):
    monkeypatch.setattr(simplex, "SMALL_BATCH", small)
    quadratic, linear = random_batch(20, 20, 25, ridge=0.5)
    found = minimise_on_simplex(quadratic.cuda(), linear.cuda())
    assert found.is_cuda
    assert torch.allclose(found.cpu(), minimise_on_simplex(quadratic, linear), rtol=0, atol=1e-9)


def test_the_projection_onto_the_simplex_solves_its_quadratic_program():
    generator = torch.Generator().manual_seed(0)
    points = 2 * torch.randn(20, 7, generator=generator, dtype=torch.float64)
    identity = torch.eye(7, dtype=torch.float64).expand(20, -1, -1)
    found = project_onto_simplex(points)
    assert torch.allclose(found, minimise_on_simplex(identity, -points), atol=1e-8)
    assert (found == 0).any()
    assert project_onto_simplex(torch.tensor([[5.0]])).tolist() == [[1.0]]
