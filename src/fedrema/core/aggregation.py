"""Weighted means of stacked tensors: computed simultaneously, out of place, in client order."""

import hashlib
from typing import ClassVar

import torch
from torch import Tensor

from fedrema.models.body_and_head import Tensors


class Mean:
    """A mean over clients that are added in groups: Σ w_k x_k, with weights that sum to 1 over all groups.

    It is summed in blocks of fixed size, so groups of whole blocks give the same bits as all clients at once.
    """

    BLOCK: ClassVar[int] = 32

    def __init__(self) -> None:
        self.total: Tensors = {}

    def add(self, params: Tensors, weights: Tensor) -> None:
        """Add a group of clients [k, ...]; all groups except the last must consist of whole blocks."""
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
    """Return for each row of `weights` [k, k] the mean of all clients' tensors [k, ...] with these weights.

    Rows are normalised to sum to 1. All results are computed from the unchanged uploads. With many clients, equal rows
    are computed once.
    """
    distinct, position = _distinct_rows(weights)
    mixed: Tensors = {}
    for name, value in params.items():
        flat = value.reshape(len(value), -1)
        blocks = [
            (block.to(flat.dtype) / block.sum(dim=1, keepdim=True)) @ flat
            for block in torch.split(weights[distinct], ROWS_PER_BLOCK)
        ]
        rows = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
        mixed[name] = (rows if len(distinct) == len(position) else rows[position]).view_as(value)
    return mixed


ROWS_PER_BLOCK = 1024
"""Rows of weights that are converted to the models' precision at a time, to limit memory."""

DEDUPLICATE_FROM = 100
"""With fewer clients, finding equal rows takes longer than computing them."""


def _distinct_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the indices of the distinct rows, and for each row the position of its equal among them."""
    if len(matrix) < DEDUPLICATE_FROM:
        all_rows = torch.arange(len(matrix), device=matrix.device)
        return all_rows, all_rows
    positions: dict[bytes, int] = {}
    first: list[int] = []
    position = []
    for number, row in enumerate(matrix.cpu().contiguous().view(torch.uint8).numpy()):
        digest = hashlib.blake2b(row, digest_size=16).digest()
        if digest not in positions:
            positions[digest] = len(first)
            first.append(number)
        position.append(positions[digest])
    return torch.tensor(first, device=matrix.device), torch.tensor(position, device=matrix.device)


def per_client(values: Tensor, like: Tensor) -> Tensor:
    """Reshape one number, or one per client, so that it broadcasts against a tensor of one or of all clients."""
    return values.reshape((*values.shape, *[1] * (like.dim() - values.dim())))
