"""Launches max pooling over stacked clients; tensors [k, n, channels, height, width] with channels last in memory."""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from fedrema.engine.kernels import pooling_programs
from fedrema.engine.kernels.tiles import pieces, power_above

MOST_PLACES = 255
"""The position of the largest value in its window is stored in one byte."""


@dataclass(frozen=True)
class Window:
    """The window of a pooling layer."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return height and width of the output."""
        high, wide = (
            (length + 2 * self.padding[axis] - self.kernel[axis]) // self.stride[axis] + 1
            for axis, length in enumerate((height, width))
        )
        return high, wide

    def numbers(self) -> dict[str, int]:
        """Return the sizes under the names of the kernels' arguments."""
        return {
            "kernel_height": self.kernel[0], "kernel_width": self.kernel[1],
            "stride_height": self.stride[0], "stride_width": self.stride[1],
            "pad_height": self.padding[0], "pad_width": self.padding[1],
        }  # fmt: skip


def forward(x: Tensor, window: Window) -> tuple[Tensor, Tensor]:
    """Return the largest value of each window and its position in the window, a byte."""
    x = _last(x)
    y = x.new_empty((*x.shape[:2], *window.size(*x.shape[2:4]), x.shape[4]))
    winners = torch.empty_like(y, dtype=torch.uint8)
    _pool(x, y, winners, window, choosing=False)
    return y.permute(0, 1, 4, 2, 3), winners.permute(0, 1, 4, 2, 3)


def chosen(x: Tensor, winners: Tensor, window: Window) -> Tensor:
    """Return from each window the value at the position of the largest one."""
    x, winners = _last(x), _last(winners)
    y = torch.empty_like(winners, dtype=x.dtype)
    _pool(x, y, winners, window, choosing=True)
    return y.permute(0, 1, 4, 2, 3)


def backward(g: Tensor, winners: Tensor, size: tuple[int, int], window: Window) -> Tensor:
    """Return the gradient [k, n, channels, *size] of the input."""
    g, winners = _last(g), _last(winners)
    channels = g.shape[4]
    y = g.new_empty((*g.shape[:2], *size, channels))
    cells = (pieces(size[axis] + window.padding[axis], window.stride[axis]) for axis in (0, 1))
    rows = len(g) * g.shape[1] * prod(cells)
    block_rows, block_channels = _blocks(channels, 1024)
    if y.numel():
        pooling_programs.pooled_gradient[(pieces(rows, block_rows), pieces(channels, block_channels))](
            g, winners, y, rows, channels, *size, *g.shape[2:4], **window.numbers(),
            block_rows=block_rows, block_channels=block_channels, num_warps=4,
        )  # fmt: skip
    return y.permute(0, 1, 4, 2, 3)


def _pool(x: Tensor, y: Tensor, winners: Tensor, window: Window, choosing: bool) -> None:
    channels = x.shape[4]
    rows = y.numel() // channels
    block_rows, block_channels = _blocks(channels, 1024)
    if rows:
        pooling_programs.pooled[(pieces(rows, block_rows), pieces(channels, block_channels))](
            x, y, winners, rows, channels, *x.shape[2:4], *y.shape[2:4], **window.numbers(), choosing=choosing,
            block_rows=block_rows, block_channels=block_channels, num_warps=4,
        )  # fmt: skip


def _blocks(channels: int, values: int) -> tuple[int, int]:
    """Return rows and channels of one program with this many values."""
    across = min(power_above(channels), 128)
    return values // across, across


def _last(value: Tensor) -> Tensor:
    return value.permute(0, 1, 3, 4, 2).contiguous()
