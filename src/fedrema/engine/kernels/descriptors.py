"""Launches the bf16 kernels whose operands the GPU's copy engine fetches as boxes (Hopper and later)."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedrema.engine.kernels import descriptor_programs, tiles
from fedrema.engine.kernels.sums import Parts
from fedrema.engine.kernels.tiles import pieces

_described: Callable[[Tensor, list[int]], Any] = descriptor_programs.described


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, padding: tuple[int, int], *, transposed: bool, bf16: bool
) -> bool:
    """Fill y [k, n, rows high, rows wide, outputs], if the shapes allow it; return whether they do."""
    clients, samples, height, width, outputs = y.shape
    channels = x.shape[4]
    rows = samples * height * width
    tile = tiles.descriptor_tile(channels, outputs)
    box = tiles.box(tile.rows, height, width)
    if box is None or channels % tile.reduction or not _fetchable(bf16, x, weight):
        return False
    flat = weight.view(clients * weight.shape[1], -1)
    shape = [tile.reduction, tile.columns] if transposed else [tile.columns, tile.reduction]
    descriptor_programs.descriptor_product[
        (pieces(rows, tile.rows) * pieces(outputs, tile.columns), clients)
    ](
        _described(x.flatten(0, 1), [*box, tile.reduction]),
        _described(flat, shape), weight if bias is None else bias, y,
        rows, channels, outputs, height, weight.shape[2], weight.shape[3], *padding, samples, weight.shape[1],
        transposed=transposed, has_bias=bias is not None, images=box.images, high=box.high, wide=box.wide,
        block_outputs=tile.columns, block_channels=tile.reduction, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return True


def linear_product(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, *, transposed: bool, bf16: bool) -> bool:
    """Fill y [k, n, 1, 1, outputs] of a linear layer, if the shapes allow it; return whether they do."""
    clients, rows, _, _, outputs = y.shape
    channels = x.shape[4]
    tile = tiles.linear_tile()
    if channels % tile.reduction or not _fetchable(bf16, x, weight):
        return False
    flat = weight.view(clients * weight.shape[1], -1)
    shape = [tile.reduction, tile.columns] if transposed else [tile.columns, tile.reduction]
    descriptor_programs.linear_product[(pieces(rows, tile.rows) * pieces(outputs, tile.columns), clients)](
        _described(_narrowed(bf16, x).view(clients * rows, channels), [tile.rows, tile.reduction]),
        _described(flat, shape), weight if bias is None else bias, y, rows, channels, outputs, weight.shape[1],
        transposed=transposed, has_bias=bias is not None, block_rows=tile.rows, block_outputs=tile.columns,
        block_channels=tile.reduction, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return True


def gradient(
    x: Tensor, g: Tensor, kernel: tuple[int, int], padding: tuple[int, int], *, bf16: bool
) -> tuple[Tensor, Tensor] | None:
    """Return the gradients of weight [k, outputs, *kernel, channels] and bias; None if the shapes forbid it."""
    clients, samples, height, width, outputs = g.shape
    channels = x.shape[4]
    rows = samples * height * width
    tile = tiles.descriptor_gradient_tile(channels, outputs, kernel[1])
    box = tiles.box(tile.reduction, height, width)
    # A step must not include rows of the next client: they would be added to the sum.
    if box is None or rows % tile.reduction or not _fetchable(bf16, x, g):
        return None
    output_tiles, groups = pieces(outputs, tile.rows), kernel[0] * kernel[1] // tile.taps
    across = groups * output_tiles * pieces(channels, tile.columns)
    count, each = tiles.parts(rows, across, tile.reduction, wanted=18)
    parts = Parts.empty(x, count, (clients, outputs, *kernel, channels))
    descriptor_programs.descriptor_gradient[(output_tiles + across, count, clients)](
        _described(x.flatten(0, 1), [*box, tile.columns]),
        _described(g.view(clients * rows, outputs), [tile.reduction, tile.rows]), parts.weight, parts.bias,
        rows, channels, outputs, height, kernel[0], *padding, each, samples, parts.stride,
        kernel_width=kernel[1], together=tile.taps, images=box.images, high=box.high, wide=box.wide,
        block_outputs=tile.rows, block_channels=tile.columns, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return parts.added()


def linear_gradient(x: Tensor, g: Tensor, *, bf16: bool) -> tuple[Tensor, Tensor] | None:
    """Return the gradients of a linear layer's weight [k, outputs, 1, 1, channels] and bias, if the shapes allow it."""
    clients, rows, _, _, outputs = g.shape
    channels = x.shape[4]
    tile = tiles.linear_gradient_tile(rows)
    if rows > tile.reduction or not _fetchable(bf16, x, g):
        return None
    parts = Parts.empty(x, 1, (clients, outputs, 1, 1, channels))
    across = pieces(channels, tile.columns)
    steps = pieces(across, pieces(across, tiles.LINEAR_STEPS))
    descriptor_programs.linear_gradient[(pieces(outputs, tile.rows), pieces(across, steps), clients)](
        _described(_narrowed(bf16, x).view(clients, rows, channels), [1, tile.reduction, tile.columns]),
        _described(g.view(clients, rows, outputs), [1, tile.reduction, tile.rows]),
        _described(parts.weight.view(clients, outputs, channels), [1, tile.rows, tile.columns]), parts.bias,
        outputs, steps, block_rows=tile.reduction, block_outputs=tile.rows, block_channels=tile.columns,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return parts.added()


def _fetchable(bf16: bool, *operands: Tensor) -> bool:
    """Return whether the copy engine can fetch these: bf16, contiguous, rows of whole 16-byte pieces.

    Triton's interpreter, which does not support bf16, is accepted for the tests.
    """
    if not all(operand.is_contiguous() and operand.shape[-1] % 8 == 0 for operand in operands):
        return False
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return interpreted or (bf16 and torch.cuda.get_device_capability(operands[0].device) >= (9, 0))


def _narrowed(bf16: bool, x: Tensor) -> Tensor:
    return x.to(torch.bfloat16) if bf16 else x
