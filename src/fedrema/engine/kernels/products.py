"""Launches the kernels of a convolution: output, input gradient and weight gradient of all stacked clients.

Tensors have the client axis first and their channels last in memory: x [k, n, channels, height, width], weight
[k, outputs, channels, kernel height, kernel width], gradient of the output [k, n, outputs, rows, columns].
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedrema.engine.kernels import descriptors, gradient_programs, product_programs, tiles
from fedrema.engine.kernels.sums import Parts, added, totals
from fedrema.engine.kernels.tiles import FEW_CHANNELS, pieces


@dataclass(frozen=True)
class Geometry:
    """Stride, padding and precision of a convolution; a linear layer is a convolution with a 1×1 kernel."""

    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    precision: str = "float32"
    linear: bool = False
    """Results are float32, and weights are not converted in advance, because each is used by few rows."""

    @property
    def bf16(self) -> bool:
        """Whether operands are bf16."""
        return self.precision == "bf16"

    @property
    def result(self) -> torch.dtype:
        """The type of the output."""
        return torch.bfloat16 if self.bf16 and not self.linear else torch.float32

    @property
    def dot(self) -> str:
        """Triton's name for the precision of a product."""
        return "ieee" if self.precision == "float32" else "tf32"

    def size(self, x: Tensor, weight: Tensor) -> tuple[int, int]:
        """Return height and width of the output."""
        height, width = (
            (x.shape[3 + axis] + 2 * self.padding[axis] - weight.shape[3 + axis]) // self.stride[axis] + 1
            for axis in (0, 1)
        )
        return height, width

    def numbers(self, kernel: tuple[int, int]) -> tuple[int, int, int, int, int, int]:
        """Return kernel, stride and padding in the order of the kernels' arguments."""
        return (*kernel, *self.stride, *self.padding)


def narrowed(weight: Tensor, geometry: Geometry) -> Tensor:
    """Return the weights as the kernels read them, [k, outputs, kernel height, kernel width, channels], contiguous."""
    last = weight.permute(0, 1, 3, 4, 2)
    if geometry.bf16 and not geometry.linear:
        last = last.to(torch.bfloat16)
    return last.contiguous()


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """Return the output [k, n, outputs, rows, columns]; the weight comes from `narrowed`."""
    clients, outputs, *kernel, channels = weight.shape
    height, width = geometry.size(x, weight.permute(0, 1, 4, 2, 3))
    rows = x.shape[1] * height * width
    few = channels < FEW_CHANNELS
    x = _last(x, geometry, few)
    y = x.new_empty((clients, x.shape[1], height, width, outputs), dtype=geometry.result)
    bias = None if bias is None else bias.contiguous()
    positions = (*x.shape[2:4], height, width)
    common: dict[str, object] = {"has_bias": bias is not None, "bf16": geometry.bf16, "precision": geometry.dot}
    if not y.numel():
        return y.permute(0, 1, 4, 2, 3)
    if few:
        folded = channels * kernel[0] * kernel[1]
        tile = tiles.folded_tile(folded, outputs, geometry.precision)
        product_programs.folded_product[_grid(rows, outputs, tile, clients)](
            x, weight, weight if bias is None else bias, y, rows, outputs, *positions, *geometry.stride,
            *geometry.padding, *_strides(x), weight.stride(0), channels=channels, kernel_width=kernel[1],
            folded=folded, **common,
            block_rows=tile.rows, block_outputs=tile.columns, block_folded=tile.reduction,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    else:
        sizes = (rows, channels, outputs, *positions, *geometry.numbers((kernel[0], kernel[1])))
        strides = (weight.stride(0), kernel[0] * kernel[1] * channels, channels, 1)
        _gathered(x, weight, bias, y, sizes, strides, geometry, transposed=False, common=common)
    return y.permute(0, 1, 4, 2, 3)


def input_gradient(g: Tensor, weight: Tensor, size: tuple[int, int], dtype: torch.dtype, geometry: Geometry) -> Tensor:
    """Return the gradient [k, n, channels, *size] of the input; the weight comes from `narrowed`."""
    clients, outputs, *kernel, channels = weight.shape
    g = _last(g, geometry, few=False)
    rows = g.shape[1] * size[0] * size[1]
    y = g.new_empty((clients, g.shape[1], *size, channels), dtype=dtype)
    sizes = (rows, outputs, channels, *g.shape[2:4], *size, *geometry.numbers((kernel[0], kernel[1])))
    strides = (weight.stride(0), 1, channels, kernel[0] * kernel[1] * channels)
    common: dict[str, object] = {"has_bias": False, "bf16": geometry.bf16, "precision": geometry.dot}
    if y.numel():
        _gathered(g, weight, None, y, sizes, strides, geometry, transposed=True, common=common)
    return y.permute(0, 1, 4, 2, 3)


def weight_gradient(x: Tensor, g: Tensor, kernel: tuple[int, int], geometry: Geometry) -> tuple[Tensor, Tensor]:
    """Return the gradients of the weight [k, outputs, channels, *kernel] and of the bias [k, outputs], float32."""
    channels, outputs = x.shape[2], g.shape[2]
    clients = max(len(x), len(g))
    few = channels < FEW_CHANNELS
    x = _last(x, geometry, few)
    g = _last(g, geometry, few=False)
    g = g.expand(clients, *g.shape[1:]).contiguous()
    height, width = g.shape[2:4]
    rows = g.shape[1] * height * width
    shape = (clients, outputs, *kernel, channels)
    positions = (*x.shape[2:4], height, width)
    common: dict[str, object] = {"bf16": geometry.bf16, "precision": geometry.dot}
    if few:
        folded = channels * kernel[0] * kernel[1]
        tile = tiles.folded_gradient_tile(folded + 1, outputs)
        across = pieces(folded + 1, tile.rows) * pieces(outputs, tile.columns)
        count, each = tiles.parts(rows, across, tile.reduction, wanted=64)
        parts = Parts.empty(x, count, shape)
        gradient_programs.folded_weight_gradient[(across, count, clients)](
            x, g, parts.weight, parts.bias, rows, outputs, *positions, *geometry.stride, *geometry.padding, each,
            *_strides(x), parts.stride, channels=channels, kernel_width=kernel[1], folded=folded, **common,
            block_outputs=tile.columns, block_folded=tile.rows, block_rows=tile.reduction,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        found: tuple[Tensor, Tensor] | None = parts.added()
    elif geometry.linear:
        found = descriptors.linear_gradient(x, g, bf16=geometry.bf16)
    elif geometry.stride == (1, 1):
        found = descriptors.gradient(x, g, kernel, geometry.padding, bf16=geometry.bf16)
    else:
        found = None
    if found is not None:
        return found[0].permute(0, 1, 4, 2, 3), found[1]
    tile = tiles.gradient_tile(rows, channels, outputs, geometry.precision, geometry.bf16 and geometry.linear)
    across = kernel[0] * kernel[1] * pieces(outputs, tile.rows) * pieces(channels, tile.columns)
    count, each = tiles.parts(rows, across, tile.reduction)
    y = x.new_empty((count, *shape), dtype=torch.float32)
    gradient_programs.weight_gradient[(across, count, clients)](
        x, g, y, rows, channels, outputs, *positions, *geometry.numbers(kernel), each,
        *_strides(x)[:4], y.stride(0), **common,
        block_outputs=tile.rows, block_channels=tile.columns, block_rows=tile.reduction,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return added(y).permute(0, 1, 4, 2, 3), totals(g)


def _gathered(
    x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, sizes: tuple[int, ...], strides: tuple[int, ...],
    geometry: Geometry, *, transposed: bool, common: dict[str, object],
) -> None:  # fmt: skip
    rows, channels, outputs = sizes[:3]
    wide = geometry.bf16 and torch.float32 in (x.dtype, weight.dtype)
    described = {"transposed": transposed, "bf16": geometry.bf16}
    if geometry.linear:
        if descriptors.linear_product(x, weight, bias, y, **described):
            return
    elif geometry.stride == (1, 1) and descriptors.product(x, weight, bias, y, geometry.padding, **described):
        return
    tile = tiles.forward_tile(rows, channels, outputs, geometry.precision, wide)
    product_programs.gathered_product[_grid(rows, outputs, tile, len(y))](
        x, weight, weight if bias is None else bias, y, *sizes, *_strides(x)[:4], *strides, **common,
        transposed=transposed, strided=geometry.stride != (1, 1),
        block_rows=tile.rows, block_outputs=tile.columns, block_channels=tile.reduction,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _grid(rows: int, outputs: int, tile: tiles.Tile, clients: int) -> tuple[int, int]:
    return pieces(rows, tile.rows) * pieces(outputs, tile.columns), clients


def _last(value: Tensor, geometry: Geometry, few: bool) -> Tensor:
    """Return activations with channels last, [k, n, height, width, channels]; copied only if necessary."""
    value = value.permute(0, 1, 3, 4, 2)
    if few:  # read one by one, in any layout
        return value
    common = value.stride(0) == 0 and len(value) > 1
    own = value[:1] if common else value
    if geometry.bf16 and not geometry.linear:  # each value is read once per kernel position: convert it only once
        own = own.to(torch.bfloat16)
    own = own.contiguous()
    return own.expand(value.shape) if common else own


def _strides(value: Tensor) -> tuple[int, ...]:
    """Return memory strides, 0 for axes of length 1: their strides in torch would prevent wide loads."""
    return tuple(0 if size == 1 else stride for size, stride in zip(value.shape, value.stride(), strict=True))
