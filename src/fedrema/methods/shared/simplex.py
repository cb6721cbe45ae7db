"""Quadratic programs on the simplex: many at once, as one batch of tensors on any device.

An interior-point method (Mehrotra's predictor-corrector) solves all programs at the same time. A polishing step then
solves each one exactly on its support, the set of positive weights. The few programs that do not reach the required
accuracy are solved again with Clarabel, one by one on the CPU.
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

ACCURACY = 1e-9
"""The largest `optimality_gap` that is accepted without Clarabel, relative to the largest entry of a program."""
TARGET = 1e-13
"""The complementarity wᵀz at which the interior-point method stops."""
ITERATIONS = 60
"""At most; programs like FedPAC's took up to 16 with 20 clients and 24 with 200."""
CHECK_EVERY = 4
"""Iterations between two checks of whether all programs are solved on a GPU, where each check waits for the device.

On a CPU every iteration checks; this changes no result, because solved programs no longer change.
"""
REGULARISATION = 1e-13
"""Added to the diagonal of the Newton systems, which a matrix of low rank makes almost singular."""
PROXIMITY = 1e-9
"""Keeps the polishing step near its start, in directions in which the objective does not change."""
POLISHING_STEPS = 3
ALIGNMENT = 8
"""Matrices are padded to a multiple of this size: 64 bytes."""
LARGEST_BATCH = 2**24
"""How many matrix entries are solved in one batch: 128 MB for each copy of the matrices."""
SMALL_BATCH = 2**15
"""Batches of up to this many matrix entries, 32 programs with 32 weights, are solved on the CPU.

A solution takes about 1,500 small operators, so that launching them dominates on a GPU: FedPAC's aggregation took 19 ms
on an H200 with 20 clients. One CPU core takes 7 ms with 20 clients, 11 with 32, 29 with 50 and 240 with 100.
"""


def minimise_on_simplex(quadratic: Tensor, linear: Tensor) -> Tensor:
    """Return the weights w ≥ 0, Σ w = 1 [m, k] that minimise ½ wᵀQw + cᵀw for each of m programs.

    `quadratic` [m, k, k] holds symmetric positive semidefinite matrices Q, `linear` [m, k] the vectors c. The result is
    in float64, on the device of the inputs. A program's result does not depend on the others. If a program has several
    optima, the result is close to the centre of all of them. Rows of programs without a solution, because their
    entries are not finite, are NaN.
    """
    programs = max(1, LARGEST_BATCH // max(1, quadratic.shape[-1] ** 2))
    place = torch.device("cpu") if quadratic.numel() <= SMALL_BATCH else linear.device
    parts = zip(torch.split(quadratic.to(place), programs), torch.split(linear.to(place), programs), strict=True)
    return torch.cat([_solve(*part) for part in parts]).to(linear.device)


def project_onto_simplex(points: Tensor) -> Tensor:
    """Return for each row of `points` [m, k] the nearest w ≥ 0 with Σ w = 1, which is max(x − τ, 0)."""
    ranked = points.sort(dim=1, descending=True).values
    excess = ranked.cumsum(dim=1) - 1
    number = torch.arange(1, points.shape[1] + 1, device=points.device)
    support = (ranked * number > excess).sum(dim=1, keepdim=True)  # how many weights are positive
    threshold = excess.gather(1, support - 1) / support
    return (points - threshold).clamp(min=0)


def optimality_gap(quadratic: Tensor, linear: Tensor, weights: Tensor) -> Tensor:
    """Return wᵀg − min g [m] for the gradient g = Qw + c: 0 at an optimum, and a bound on the distance to its value.

    It contains all conditions of an optimum on the simplex: the multiplier of Σ w = 1 is min g, and the multipliers of
    w ≥ 0 are g − min g, whose products with w add up to the gap.
    """
    gradient = (quadratic * weights[:, None, :]).sum(dim=2) + linear
    return (weights * gradient).sum(dim=1) - gradient.amin(dim=1)


def _solve(quadratic: Tensor, linear: Tensor) -> Tensor:
    quadratic, linear = quadratic.double(), linear.double()
    scale = torch.maximum(quadratic.abs().amax(dim=(1, 2)), linear.abs().amax(dim=1))
    finite = scale.isfinite()
    divisor = torch.where(finite & (scale > 0), scale, 1.0)
    scaled = torch.where(finite[:, None, None], quadratic / divisor[:, None, None], 0.0)
    scaled_linear = torch.where(finite[:, None], linear / divisor[:, None], 0.0)

    weights, multipliers = _interior_point(scaled, scaled_linear)
    polished = _polish(scaled, scaled_linear, weights, weights > multipliers)
    gap, polished_gap = (optimality_gap(scaled, scaled_linear, each) for each in (weights, polished))
    better = polished_gap <= gap.clamp(min=TARGET)  # False for NaN
    weights = torch.where(better[:, None], polished, weights)
    gap = torch.where(better, polished_gap, gap)

    for row in (~(gap <= ACCURACY)).nonzero()[:, 0].tolist():
        weights[row] = _by_clarabel(scaled[row], scaled_linear[row])
    return torch.where(finite[:, None], weights, torch.nan)


def _interior_point(quadratic: Tensor, linear: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weights w and the multipliers z of w ≥ 0.

    Newton's method on Qw + c − λ − z = 0, Σ w = 1 and w_i z_i = µ, where µ tends to 0. It starts at equal weights with
    multipliers that satisfy the first equation. A solved program no longer changes.
    """
    count = linear.shape[1]
    systems = _Systems(quadratic)
    weights = torch.full_like(linear, 1 / count)
    gradient = systems.product(weights) + linear
    level = gradient.amin(dim=1, keepdim=True) - 1  # λ
    multipliers = gradient - level
    check_every = CHECK_EVERY if linear.is_cuda else 1
    for iteration in range(ITERATIONS):
        complementarity = _total(weights * multipliers)  # k µ
        unsolved = complementarity > TARGET
        if iteration % check_every == 0 and not unsolved.any():
            break
        # A step solves (Q + diag(z/w)) Δw = t − (Qw + c − λ) + Δλ, Σ Δw = 1 − Σ w and Δz = t − z − z/w Δw. The
        # predictor aims at µ = 0, that is t = 0; the corrector adds a smaller µ and the predictor's second-order term.
        ratio = multipliers / weights
        residual = systems.product(weights) + linear - level
        shortage = 1 - _total(weights)
        factored = systems.factor(ratio + REGULARISATION)
        step, ones = systems.solve(-residual, torch.ones_like(residual))
        total = _total(ones)
        step = step + (shortage - _total(step)) / total * ones
        multiplier_step = -multipliers - ratio * step
        length = _longest_step(weights, step, multipliers, multiplier_step).clamp(max=1)
        predicted = _total((weights + length * step) * (multipliers + length * multiplier_step))
        centre = (predicted / complementarity) ** 3 * complementarity / count

        target = (centre - step * multiplier_step) / weights
        (step,) = systems.solve(target - residual)
        change = (shortage - _total(step)) / total
        step = step + change * ones
        multiplier_step = target - multipliers - ratio * step
        length = (0.995 * _longest_step(weights, step, multipliers, multiplier_step)).clamp(max=1)
        usable = unsolved & factored & length.isfinite()
        weights = torch.where(usable, weights + length * step, weights)
        level = torch.where(usable, level + length * change, level)
        multipliers = torch.where(usable, multipliers + length * multiplier_step, multipliers)
    return weights / _total(weights), multipliers


def _polish(quadratic: Tensor, linear: Tensor, weights: Tensor, support: Tensor) -> Tensor:
    """Return the optimal weights if only those of the support may be positive; NaN where they cannot be computed."""
    inside = support.to(weights)
    systems = _Systems(quadratic * (inside[:, :, None] * inside[:, None, :]))
    factored = systems.factor(torch.where(support, PROXIMITY, 1.0))
    (ones,) = systems.solve(inside)
    weights = weights * inside
    weights = weights / _total(weights)
    for _ in range(POLISHING_STEPS):
        gradient = systems.product(weights) + linear * inside
        (step,) = systems.solve(-gradient)
        weights = weights + step - _total(step) / _total(ones) * ones
    weights = weights.clamp(min=0)
    return torch.where(factored, weights / _total(weights), torch.nan)


class _Systems:
    """Linear systems (Q + diagonal) x = right for a batch of matrices Q [m, k, k]; the large buffers are reused.

    The rounding of a result must not depend on the other matrices, because it decides between several optima. Hence
    the matrices are padded to a multiple of `ALIGNMENT`, and products avoid bmm: without either, we measured
    differences on a CPU between a program that is solved alone and the same program in a batch.
    """

    def __init__(self, matrices: Tensor) -> None:
        self.size = matrices.shape[1]
        self.padding = -self.size % ALIGNMENT
        self.matrices = functional.pad(matrices, (0, self.padding, 0, self.padding))
        self.buffer = torch.empty_like(self.matrices)
        self.factors = torch.empty_like(self.matrices).mT  # the layout that LAPACK and cuSOLVER use
        self.failures = torch.empty(len(matrices), dtype=torch.int32, device=matrices.device)

    def product(self, vectors: Tensor) -> Tensor:
        """Return Q times a vector [m, k]."""
        padded = functional.pad(vectors, (0, self.padding))
        return torch.mul(self.matrices, padded[:, None, :], out=self.buffer).sum(dim=2)[:, : self.size]

    def factor(self, diagonal: Tensor) -> Tensor:
        """Factor Q + diagonal; returns where that is possible [m, 1]."""
        padded = functional.pad(diagonal, (0, self.padding), value=1.0)
        self.buffer.copy_(self.matrices).diagonal(dim1=1, dim2=2).add_(padded)
        torch.linalg.cholesky_ex(self.buffer, out=(self.factors, self.failures))
        return (self.failures == 0)[:, None]

    def solve(self, *right: Tensor) -> tuple[Tensor, ...]:
        """Solve the factored systems for some right-hand sides [m, k]."""
        columns = functional.pad(torch.stack(right, dim=1), (0, self.padding)).mT
        half = torch.linalg.solve_triangular(self.factors, columns, upper=False)
        found: Tensor = torch.linalg.solve_triangular(self.factors.mT, half, upper=True)
        return tuple(found[:, : self.size, column] for column in range(len(right)))


def _total(values: Tensor) -> Tensor:
    """Return the sum of each row [m, 1]."""
    return values.sum(dim=1, keepdim=True)


def _longest_step(weights: Tensor, step: Tensor, multipliers: Tensor, multiplier_step: Tensor) -> Tensor:
    """Return how far w and z can move before an entry becomes 0 [m, 1]; at most 1000."""
    shrinking = torch.maximum(-step / weights, -multiplier_step / multipliers).amax(dim=1, keepdim=True)
    return 1 / shrinking.clamp(min=1e-3)


def _by_clarabel(quadratic: Tensor, linear: Tensor) -> Tensor:
    """Return the weights of one program [k]; NaN if Clarabel fails, too."""
    # Imported here, because only this rare case needs them, and every command imports all methods.
    import clarabel
    from scipy import sparse

    size = len(linear)
    # The constraint matrix [1ᵀ; −I] in the solver's column format: the sum is 1, each weight at least 0.
    values = np.tile([1.0, -1.0], size)
    rows = np.stack([np.zeros(size, int), 1 + np.arange(size)], axis=1).ravel()
    constraints = sparse.csc_matrix((values, rows, 2 * np.arange(size + 1)), shape=(size + 1, size))
    limits = np.concatenate([[1.0], np.zeros(size)])
    cones = [clarabel.ZeroConeT(1), clarabel.NonnegativeConeT(size)]
    objective = sparse.csc_matrix(np.triu(quadratic.cpu().numpy()))  # the solver reads the upper triangle
    settings = clarabel.DefaultSettings()
    settings.verbose = False
    settings.tol_gap_abs = settings.tol_gap_rel = settings.tol_feas = 1e-10
    solver = clarabel.DefaultSolver(objective, linear.cpu().numpy(), constraints, limits, cones, settings)
    solution = solver.solve()
    if solution.status not in (clarabel.SolverStatus.Solved, clarabel.SolverStatus.AlmostSolved):
        return torch.full_like(linear, torch.nan)
    weights = torch.tensor(solution.x, dtype=torch.float64).clamp(min=0)
    return (weights / weights.sum()).to(linear.device)
