"""Sums over rows that are computed in parts: the memory of the parts, and their addition."""

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from fedrema.engine.kernels import gradient_programs, tiles
from fedrema.engine.kernels.tiles import pieces


class Parts(NamedTuple):
    """Partial sums of the gradients of a weight [k, outputs, *kernel, channels] and of its bias, in one tensor."""

    both: Tensor
    """[parts, values]: the weight's, then the bias's."""
    shape: tuple[int, ...]
    """Of the weight."""

    @classmethod
    def empty(cls, like: Tensor, count: int, shape: tuple[int, ...]) -> "Parts":
        """Allocate parts."""
        return cls(like.new_empty((count, prod(shape) + prod(shape[:2])), dtype=torch.float32), shape)

    @property
    def weight(self) -> Tensor:
        """The first part of the weight's gradient."""
        return self.both[0, : prod(self.shape)].view(self.shape)

    @property
    def bias(self) -> Tensor:
        """The first part of the bias's gradient."""
        return self.both[0, prod(self.shape) :].view(self.shape[:2])

    @property
    def stride(self) -> int:
        """Distance between two parts in memory."""
        return self.both.stride(0)

    def added(self) -> tuple[Tensor, Tensor]:
        """Return the gradients."""
        total = Parts(added(self.both)[None], self.shape)
        return total.weight, total.bias


def added(parts: Tensor) -> Tensor:
    """Return the sum over the first axis, in order."""
    if len(parts) == 1:
        return parts[0]
    total = torch.empty_like(parts[0])
    together = min(tiles.power_above(len(parts)), 16)  # in flight at once
    block = 2048 // together
    gradient_programs.parts_sum[(pieces(total.numel(), block),)](
        parts, total, total.numel(), parts.stride(0), len(parts), block_parts=together, block=block
    )
    return total


def totals(g: Tensor) -> Tensor:
    """Return the sum [k, outputs] over all rows of a gradient [k, n, rows, columns, outputs]."""
    clients, outputs, rows = len(g), g.shape[-1], g.shape[1] * g.shape[2] * g.shape[3]
    columns = min(tiles.power_above(outputs), 64)
    across = pieces(outputs, columns)
    count, each = tiles.parts(rows, across, 128, wanted=32, least=256)
    z = g.new_empty((count, clients, outputs), dtype=torch.float32)
    gradient_programs.column_totals[(across, count, clients)](
        g, z, rows, outputs, each, z.stride(0), block_outputs=columns, block_rows=128, num_warps=4
    )
    return added(z)
