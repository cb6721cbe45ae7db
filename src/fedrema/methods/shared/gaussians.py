"""Classes as Gaussians with one covariance: estimation, classification, and interpolation between two estimates."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedrema.core import Batch
from fedrema.methods.shared.prototypes import class_means, class_membership

SHRINKAGE = 1e-4
"""ε: covariances are used as (1 − ε)Σ + ε (tr Σ / d) I."""
ITERATIONS = 20
"""Newton steps that search the weights β."""
STEP_SIZES = torch.tensor([1, 1 / 4, 1 / 16, 1 / 64, 0], dtype=torch.float64)
"""Lengths of a Newton step; the longest that does not increase the loss is taken."""
ROUNDING = 1e-12
"""Relative increase of a loss that is due to rounding; it must not decide between two step lengths."""


@dataclass(frozen=True)
class Gaussians:
    """One Gaussian per class with means [C, d] and a common covariance [d, d], in float64."""

    means: Tensor
    covariance: Tensor

    def mixed(self, other: "Gaussians", beta: Tensor) -> "Gaussians":
        """Return βµ + (1 − β)µ' and βΣ + (1 − β)Σ', with β [2] for means and covariance; `other` has weight 1 − β."""
        return Gaussians(
            beta[0] * self.means + (1 - beta[0]) * other.means,
            beta[1] * self.covariance + (1 - beta[1]) * other.covariance,
        )

    def classifier(self, log_prior: Tensor) -> tuple[Tensor, Tensor]:
        """Return weight Σ⁻¹µ_c [C, d] and bias log π_c − ½ µ_cᵀΣ⁻¹µ_c [C] of the most probable class."""
        whitening = whitening_of(self.covariance)
        weight = self.means @ whitening.T @ whitening
        return weight, log_prior - (weight * self.means).sum(dim=1) / 2


def estimate(features: Tensor, data: Batch, absent: Tensor, ridge: float) -> Gaussians:
    """Return the class means and the covariance of features [n, d] around them, plus `ridge` on its diagonal.

    A class without samples has the mean in its row of `absent` [C, d].
    """
    means, counts = class_means(features, data, len(absent))
    means = torch.where(counts[:, None] > 0, means, absent)
    centred = (features - means[data.y]) * data.mask[:, None]
    covariance = centred.T @ centred / (data.mask.sum() - 1).clamp(min=1)
    return Gaussians(means, covariance + ridge * torch.eye(features.shape[1]).to(covariance))


def shrunk(covariance: Tensor) -> Tensor:
    """Return (1 − ε)Σ + ε (tr Σ / d) I."""
    width = len(covariance)
    return (1 - SHRINKAGE) * covariance + SHRINKAGE * covariance.trace() / width * torch.eye(width).to(covariance)


def whitening_of(covariance: Tensor) -> Tensor:
    """Return T with TᵀT = Σ⁻¹ after shrinkage.

    Eigenvalues below those that shrinkage leaves, which only a matrix that is no covariance has, are raised to them.
    """
    smallest = (SHRINKAGE * covariance.trace() / len(covariance)).clamp(min=torch.finfo(covariance.dtype).tiny)
    squares, directions = eigenvectors(shrunk(covariance))
    return directions.T / torch.maximum(squares, smallest).sqrt()[:, None]


def eigenvectors(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors; a matrix that is not finite, after divergence, must not raise an error."""
    values, vectors = torch.linalg.eigh(torch.nan_to_num(matrix, posinf=1.0, neginf=-1.0))
    return values, vectors


@dataclass(frozen=True)
class Folds:
    """A cross-validation with two folds, in coordinates in which all covariances are diagonal.

    In the coordinates of each fold, the other covariance is 1 and the own one Λ. For every β, Σ_β⁻¹ is then diagonal,
    so that one decomposition serves all of them. The first axis of tensors is that of the folds.
    """

    membership: Tensor
    """[n, C] 1 at the class of a sample"""
    weights: Tensor
    """[2, n] of the held-out samples of each fold; they sum to 1"""
    features: Tensor
    """[2, n, d]"""
    own_means: Tensor
    other_means: Tensor
    """[2, C, d]"""
    eigenvalues: Tensor
    """Λ [2, d]"""
    log_prior: Tensor

    def losses(self, betas: Tensor) -> Tensor:
        """Return the sum of both folds' mean cross-entropies for each of some β [s, 2]."""
        log_probabilities = self._logits(betas).log_softmax(dim=-1)
        return -torch.einsum("sfnc,nc,fn->s", log_probabilities, self.membership, self.weights)

    def gradient_and_curvature(self, beta: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient [2] of the loss, and its curvature [2, 2] without second derivatives of the logits."""
        probabilities, slopes = self._logits(beta[None])[0].softmax(dim=-1), self._slopes(beta)
        gradient = torch.einsum("fn,fnc,fnci->i", self.weights, probabilities - self.membership, slopes)
        centred = slopes - torch.einsum("fnc,fnci->fni", probabilities, slopes)[:, :, None]
        weighted = centred * (self.weights[..., None] * probabilities)[..., None]
        return gradient, torch.einsum("fnci,fncj->ij", weighted, centred)

    def _logits(self, betas: Tensor) -> Tensor:
        """Return the logits [s, 2, n, C] under the mixture with each β."""
        means, inverse = self._mixed(betas)
        constants = self.log_prior - (means.square() * inverse).sum(dim=-1) / 2
        return self.features * inverse @ means.mT + constants[:, :, None]

    def _slopes(self, beta: Tensor) -> Tensor:
        """Return the derivatives of the logits with respect to one β [2, n, C, 2]."""
        means, inverse = (values[0] for values in self._mixed(beta[None]))
        difference, bend = self.own_means - self.other_means, (1 - self.eigenvalues)[:, None] * inverse.square()
        by_means = self.features * inverse @ difference.mT - (difference * means * inverse).sum(dim=-1)[:, None]
        by_covariance = self.features * bend @ means.mT - (means.square() * bend).sum(dim=-1)[:, None] / 2
        return torch.stack([by_means, by_covariance], dim=-1)

    def _mixed(self, betas: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mixed means [s, 2, C, d] and the diagonal of Σ_β⁻¹ [s, 2, 1, d]."""
        of_means, of_covariance = betas[:, 0, None, None, None], betas[:, 1, None, None, None]
        means = of_means * self.own_means + (1 - of_means) * self.other_means
        return means, 1 / (1 + of_covariance * (self.eigenvalues - 1)[:, None])


def split(features: Tensor, data: Batch, other: Gaussians, log_prior: Tensor, ridge: float) -> Folds:
    """Return the folds: samples of a class belong to them alternately; a class with a single sample is left out."""
    membership = class_membership(data, len(other.means), features.dtype)
    position = (membership.cumsum(dim=0) * membership).sum(dim=1)  # 1 for the first sample of a class
    usable = data.mask * (membership.sum(dim=0) > 1).to(membership)[data.y]
    halves = [usable * (position % 2 == parity) for parity in (0, 1)]
    whitening = whitening_of(other.covariance)
    projected = []
    for rest in reversed(halves):  # the other half is held out
        own = estimate(features, replace(data, mask=rest), other.means, ridge)
        values, vectors = eigenvectors(whitening @ shrunk(own.covariance) @ whitening.T)
        to_diagonal = vectors.T @ whitening
        projected.append((*(each @ to_diagonal.T for each in (features, own.means, other.means)), values))
    held_out = torch.stack(halves)
    weights = held_out / held_out.sum(dim=1, keepdim=True).clamp(min=1)
    inside, own_means, other_means, eigenvalues = (torch.stack(parts) for parts in zip(*projected, strict=True))
    return Folds(membership, weights, inside, own_means, other_means, eigenvalues, log_prior)


def choose_weights(
    features: Tensor, data: Batch, other: Gaussians, log_prior: Tensor, ridge: float, separate: bool
) -> Tensor:
    """Return the β [2] with the smallest loss in a cross-validation with two folds; 0 if no class has two samples.

    With `separate`, means and covariance have weights of their own.
    """
    folds = split(features, data, other, log_prior, ridge)
    spread = torch.eye(2).to(features) if separate else torch.ones(2, 1).to(features)
    found = minimise(folds, spread)
    return torch.where(folds.weights.sum() > 0, found, torch.zeros_like(found))


def minimise(folds: Folds, spread: Tensor) -> Tensor:
    """Return β = `spread` b with b in [0, 1] that minimises the loss, from b = ½.

    These are projected Newton steps: entries of b at a bound that the loss pushes outwards do not move the others.
    """
    entries = spread.shape[1]
    b, unit = torch.full((entries,), 0.5).to(spread), torch.eye(entries).to(spread)
    for _ in range(ITERATIONS):
        gradient, curvature = folds.gradient_and_curvature(spread @ b)
        gradient, curvature = spread.T @ gradient, spread.T @ curvature @ spread
        fixed = (((b <= 0) & (gradient > 0)) | ((b >= 1) & (gradient < 0))).to(b)
        free = (1 - fixed)[:, None] * (1 - fixed)
        damping = SHRINKAGE * curvature.trace() + torch.finfo(b.dtype).tiny
        system = torch.nan_to_num(curvature * free + torch.diag(fixed) + damping * unit, posinf=1.0)
        step = -torch.linalg.solve_ex(system, gradient * (1 - fixed))[0]
        candidates = (b + STEP_SIZES.to(b)[:, None] * step).clamp(0, 1)
        losses = folds.losses(candidates @ spread.T)
        accepted = losses <= losses[-1] + ROUNDING * losses[-1].abs()
        b = candidates[accepted.int().argmax()]  # the longest of them
    return spread @ b
