"""Weighted means of stacked tensors: simultaneous, out of place, in client order."""

import hashlib
from typing import ClassVar

import torch
from torch import Tensor

from fedrema.models.body_and_head import Tensors


class Mean:
    """A mean over clients that arrive in groups: Σ w_k x_k, with weights that sum to 1 over all groups.

    It is summed in blocks of fixed size, so that groups of whole blocks give the same bits as all clients at once.
    """

    BLOCK: ClassVar[int] = 32

    def __init__(self) -> None:
        self.total: Tensors = {}

    def add(self, params: Tensors, weights: Tensor) -> None:
        """Count some more clients [k, ...]; all groups but the last hold whole blocks."""
        for name, value in params.items():
            for block, rows in zip(*(torch.split(each, self.BLOCK) for each in (weights, value)), strict=True):
                part = torch.tensordot(block.to(value.dtype), rows, dims=1)
                self.total[name] = self.total[name] + part if name in self.total else part


def average(params: Tensors, weights: Tensor) -> Tensors:
    """Return the weighted mean over the leading axis."""
    mean = Mean()
    mean.add(params, weights / weights.sum())
    return mean.total


def mix(params: Tensors, weights: Tensor) -> Tensors:
    """Return for each row of `weights` [k, k] the mean of all clients' tensors [k, ...] with those weights.

    Rows are scaled to sum to 1. All rows are computed from the same uploads: nothing is overwritten while it is
    still being read. Where there are many, clients with the same weights share one computation.
    """
    distinct, whose = _distinct_rows(weights)
    mixed: Tensors = {}
    for name, value in params.items():
        flat = value.reshape(len(value), -1)
        blocks = [
            (block.to(flat.dtype) / block.sum(dim=1, keepdim=True)) @ flat
            for block in torch.split(weights[distinct], MIXED_AT_ONCE)
        ]
        rows = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
        mixed[name] = (rows if len(distinct) == len(whose) else rows[whose]).view_as(value)
    return mixed


MIXED_AT_ONCE = 1024
"""Rows of weights that are turned into numbers of the models' precision at a time."""

WORTH_COMPARING = 100
"""With fewer clients, mixing takes no longer than copying what is the same."""


def _distinct_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return which rows differ from all before them, and for each row its place among those."""
    if len(matrix) < WORTH_COMPARING:
        every = torch.arange(len(matrix), device=matrix.device)
        return every, every
    places: dict[bytes, int] = {}
    first: list[int] = []
    whose = []
    for number, row in enumerate(matrix.cpu().contiguous().view(torch.uint8).numpy()):
        digest = hashlib.blake2b(row, digest_size=16).digest()
        if digest not in places:
            places[digest] = len(first)
            first.append(number)
        whose.append(places[digest])
    return torch.tensor(first, device=matrix.device), torch.tensor(whose, device=matrix.device)
