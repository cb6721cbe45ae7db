"""Sums of parameters as whole numbers, which are exact in any order: what secure aggregation computes.

A client's contribution is n_k · (x_k − x), its number of samples times the change of its parameters, as multiples of
1 / `FixedPoint.scale`. Whole numbers can be masked modulo a power of two: the masks cancel, and the sum is exactly the
one without masks. The simulator computes the same whole numbers without masks.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedrema.core.aggregation import per_client
from fedrema.errors import BadInput
from fedrema.models.body_and_head import Tensors

WORDS: dict[int, np.dtype[Any]] = {32: np.dtype("<u4"), 64: np.dtype("<u8")}
"""How a number modulo 2^bits is stored."""
TRAILER = 3
"""Numbers of a contribution after its parameters: its samples, 1 for the client, and 1 if values were clipped."""
ROWS_AT_ONCE = 8
"""Clients that are converted to double precision at a time, to limit memory; the sum does not depend on it."""
ROUNDING = Fraction(1, 2**51)
"""Largest relative error of a product in double precision, with a margin."""
COARSEST = 0.01
"""Largest allowed distance between two neighbouring values of the sum."""


@dataclass(frozen=True)
class FixedPoint:
    """How changes are rounded; the sum of all contributions cannot overflow."""

    bits: int = 64
    """Sums are computed modulo 2^bits."""
    bound: float = 100.0
    """Changes are clipped to the range from -bound to bound."""
    samples: int = 10**9
    """Largest number of samples of all clients in a sum."""

    def __post_init__(self) -> None:
        """Validate the settings."""
        if self.bits not in WORDS:
            raise BadInput(f"--secure-bits must be 32 or 64, got {self.bits}.")
        if not 0 < self.bound < math.inf:
            raise BadInput(f"--secure-range must be above 0, got {self.bound}.")
        if not 1 <= self.samples <= 10**12:
            raise BadInput(f"--secure-samples must be from 1 to 10^12, got {self.samples}.")
        if self.scale < 1 / COARSEST:
            raise BadInput(
                f"--secure-bits {self.bits} is too few for --secure-range {self.bound:g} and --secure-samples"
                f" {self.samples}: choose smaller ones, or --secure-bits 64."
            )

    @property
    def scale(self) -> float:
        """How many steps there are between 0 and 1: a power of two, so that scaling is exact.

        A contribution is at most n_k · bound · scale + 1/2, and a client has at least one sample. So the sum is at most
        samples · (bound · scale + 1/2), which must be below 2^(bits − 1). Exact, because a double cannot hold the
        largest number of 64 bits; the contribution itself is computed in doubles, and may be larger by `ROUNDING`.
        """
        largest = (Fraction(2 ** (self.bits - 1) - 1, self.samples) - Fraction(1, 2)) / Fraction(self.bound)
        largest /= 1 + ROUNDING
        if largest <= 0:
            return 0.0
        exponent = largest.numerator.bit_length() - largest.denominator.bit_length()
        return 2.0 ** (exponent if Fraction(2) ** exponent <= largest else exponent - 1)

    def check_samples(self, largest: int, clients: int) -> None:
        """Raise `BadInput` if so many clients, with up to `largest` samples each, could overflow the sum."""
        if largest * clients > self.samples:
            raise BadInput(
                f"--secure-samples {self.samples} is too small: {clients} clients participate, and one has {largest}"
                f" training samples, so it must be at least {largest * clients}."
            )

    def bytes_of(self, numbers: int) -> int:
        """Return the size of this many numbers."""
        return numbers * WORDS[self.bits].itemsize


class QuantisedSum:
    """The sum of the contributions of several clients.

    Parameters
    ----------
    fixed_point
        How contributions are rounded.
    before
        The parameters from which the changes are measured: all shared ones.
    variances
        Names of parameters that cannot be negative; rounding must not make them so.
    """

    def __init__(self, fixed_point: FixedPoint, before: Tensors, variances: frozenset[str] = frozenset()) -> None:
        self.fixed_point, self.before, self.variances = fixed_point, before, variances
        self.totals = {name: torch.zeros_like(value, dtype=torch.int64) for name, value in before.items()}
        self.samples = 0
        self.clients = 0
        self.clipped_clients = 0
        """Number of clients of which at least one value was clipped."""
        self.clipped_values = 0
        """Number of clipped values; known to the client itself and in simulations, but not part of what is sent."""

    def add(self, params: Tensors, counts: Tensor) -> None:
        """Add the contributions of k clients: their parameters [k, ...] after training, and their samples [k]."""
        for first in range(0, len(counts), ROWS_AT_ONCE):
            some = slice(first, first + ROWS_AT_ONCE)
            self._add({name: value[some] for name, value in params.items()}, counts[some].double().round())

    def _add(self, params: Tensors, weights: Tensor) -> None:
        bound, clipped = self.fixed_point.bound, torch.zeros_like(weights, dtype=torch.int64)
        for name, value in params.items():
            change = value.double() - self.before[name].double()
            if not torch.isfinite(change).all():
                raise BadInput(f"The change of {name!r} is not finite, so it cannot be summed.")
            clipped += (change.abs() > bound).reshape(len(weights), -1).sum(dim=1)
            steps = change.clamp(-bound, bound) * per_client(weights * self.fixed_point.scale, change)
            self.totals[name] = self.totals[name] + steps.round().to(torch.int64).sum(dim=0)
        self.samples += int(weights.sum())
        self.clients += len(weights)
        self.clipped_clients += int((clipped > 0).sum())
        self.clipped_values += int(clipped.sum())

    def mean(self) -> Tensors:
        """Return the mean of the parameters, weighted by samples."""
        divisor = self.fixed_point.scale * self.samples
        means = {}
        for name, total in self.totals.items():
            before = self.before[name]
            mean = before.double() + total.double() / divisor
            means[name] = (mean.clamp(min=0.0) if name in self.variances else mean).to(before.dtype)
        return means

    def vector(self) -> np.ndarray:
        """Return the sum as numbers modulo 2^bits: all parameters in the order of their names, and the trailer."""
        parts = [self.totals[name].cpu().reshape(-1).numpy() for name in sorted(self.totals)]
        trailer = np.array([self.samples, self.clients, self.clipped_clients], dtype=np.int64)
        # The conversion of a negative number to an unsigned one is the remainder modulo 2^bits.
        return np.concatenate([*parts, trailer]).astype(WORDS[self.fixed_point.bits])

    def read(self, vector: np.ndarray, clients: int) -> "QuantisedSum":
        """Return the sum in a vector; refuses one whose trailer does not fit the number of clients."""
        signed = vector.view(np.dtype(f"<i{vector.itemsize}")).astype(np.int64)
        found = QuantisedSum(self.fixed_point, self.before, self.variances)
        first = 0
        for name in sorted(self.before):
            before = self.before[name]
            values = torch.from_numpy(signed[first : first + before.numel()].copy()).reshape(before.shape)
            found.totals[name] = values.to(before.device)
            first += before.numel()
        found.samples, found.clients, found.clipped_clients = (int(number) for number in signed[first:])
        is_valid = found.clients == clients and 0 <= found.clipped_clients <= clients
        if not is_valid or not clients <= found.samples <= self.fixed_point.samples:
            raise BadInput("The sum is not one of these clients' contributions.")
        return found

    @property
    def length(self) -> int:
        """How many numbers `vector` has."""
        return sum(value.numel() for value in self.before.values()) + TRAILER
