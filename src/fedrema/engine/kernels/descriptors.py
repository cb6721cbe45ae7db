"""Launches the products whose operands the GPU's copy engine can fetch as boxes (Hopper and later), in bf16."""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedrema.engine.kernels import descriptor_programs, tiles
from fedrema.engine.kernels.tiles import pieces

_described: Callable[[Tensor, list[int]], Any] = descriptor_programs.described


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, padding: tuple[int, int], *, transposed: bool
) -> bool:
    """Fill y [k, n, rows high, rows wide, outputs], if the shapes allow it; tell whether they did."""
    clients, samples, height, width, outputs = y.shape
    channels = x.shape[4]
    rows = samples * height * width
    tile = tiles.descriptor_tile(channels, outputs)
    box = tile and tiles.box(tile.rows, height, width)
    if tile is None or box is None or channels % tile.reduction or not _fetchable(x, weight):
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


def gradient(x: Tensor, g: Tensor, kernel: tuple[int, int], padding: tuple[int, int]) -> Tensor | None:
    """Return parts of the weight's gradient [parts, k, outputs, *kernel, channels]; None if the shapes forbid it."""
    clients, samples, height, width, outputs = g.shape
    channels = x.shape[4]
    rows = samples * height * width
    tile = tiles.descriptor_gradient_tile(channels, outputs)
    box = tiles.box(tile.reduction, height, width)
    # A step must not reach into the next client's rows: they would be added.
    if box is None or rows % tile.reduction or not _fetchable(x, g):
        return None
    across = kernel[0] * kernel[1] * pieces(outputs, tile.rows) * pieces(channels, tile.columns)
    count, each = tiles.parts(rows, across, tile.reduction, wanted=18)
    y = x.new_empty((count, clients, outputs, *kernel, channels), dtype=torch.float32)
    descriptor_programs.descriptor_gradient[(across, count, clients)](
        _described(x.flatten(0, 1), [*box, tile.columns]),
        _described(g.view(clients * rows, outputs), [tile.reduction, tile.rows]), y,
        rows, channels, outputs, height, *kernel, *padding, each, samples, y.stride(0),
        images=box.images, high=box.high, wide=box.wide, block_outputs=tile.rows, block_channels=tile.columns,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def _fetchable(*operands: Tensor) -> bool:
    """Whether the copy engine can fetch these: 16 bits, rows of whole 16-byte pieces, nothing spread out.

    Triton's interpreter, which knows no 16 bits, is let through for the tests.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return all(
        operand.is_contiguous() and operand.shape[-1] % 8 == 0 and (interpreted or operand.dtype == torch.bfloat16)
        for operand in operands
    ) and (interpreted or torch.cuda.get_device_capability(operands[0].device) >= (9, 0))
