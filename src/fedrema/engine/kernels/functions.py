"""The three products and max pooling as differentiable functions that vmap turns into one launch.

Each takes a leading client axis; vmap's axis becomes part of it. The derivatives of each product are the other two,
so that gradients can be differentiated again.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fedrema.engine.kernels import pooling, products
from fedrema.engine.kernels.pooling import Window
from fedrema.engine.kernels.products import Geometry

Axis = int | None


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """Return the convolution of x [k, n, channels, height, width] with weight [k, outputs, channels, ...]."""
    y: Tensor = Convolve.apply(x, weight, bias, geometry)[0]
    return y


def max_pool(x: Tensor, window: Window) -> Tensor:
    """Return the largest values of each window of x [k, n, channels, height, width]."""
    y: Tensor = MaxPool.apply(x, window)[0]
    return y


class Convolve(Function):
    """Output and, so that the backward pass need not make them again, the weights as the programs read them."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> tuple[Tensor, Tensor]:
        narrow = products.narrowed(weight.detach(), geometry)
        return products.forward(x, narrow, bias, geometry), _kept(narrow, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, _, ctx.geometry = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, _: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight, narrow = ctx.saved_tensors
        to_x, to_weight, to_bias = ctx.needs_input_grad[:3]
        if g is None:
            return None, None, None, None
        geometry, kernel = ctx.geometry, (weight.shape[3], weight.shape[4])
        dx = InputGradient.apply(g, weight, narrow, tuple(x.shape[3:]), x.dtype, geometry) if to_x else None
        dw, db = WeightGradient.apply(x, g, kernel, geometry) if to_weight or to_bias else (None, None)
        return dx, dw if to_weight else None, db if to_bias else None, None

    @staticmethod
    def vmap(
        info: Any, axes: tuple[Axis, ...], x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
    ) -> Any:
        size = info.batch_size
        if axes[1] is None and axes[2] is None and len(weight) == 1:  # common weights: all samples are one client's
            y, narrow = Convolve.apply(_folded(x, axes[0]), weight, bias, geometry)
            return (_unfolded(y, size), narrow), (1, None)
        x, weight = _merged(x, axes[0], size), _merged(weight, axes[1], size)
        bias = None if bias is None else _merged(bias, axes[2], size)
        y, narrow = Convolve.apply(x, weight, bias, geometry)
        kept = _apart(narrow, size) if narrow.numel() else narrow
        return (_apart(y, size), kept), (0, 0 if narrow.numel() else None)


class InputGradient(Function):
    """The gradient of a convolution's input; `narrow` is what `Convolve` kept of the weights."""

    @staticmethod
    def forward(
        g: Tensor, weight: Tensor, narrow: Tensor, size: tuple[int, int], dtype: torch.dtype, geometry: Geometry
    ) -> Tensor:
        ready = narrow if narrow.numel() else products.narrowed(weight, geometry)
        return products.input_gradient(g, ready, size, dtype, geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        g, weight, _, _, _, ctx.geometry = inputs
        ctx.save_for_backward(g, weight)

    @staticmethod
    def backward(ctx: Any, second: Tensor) -> tuple[Tensor | None, ...]:
        g, weight = ctx.saved_tensors
        to_g, to_weight = ctx.needs_input_grad[:2]
        geometry, kernel = ctx.geometry, (weight.shape[3], weight.shape[4])
        dg = convolve(second, weight, None, geometry).to(g.dtype) if to_g else None
        dw = WeightGradient.apply(second, g, kernel, geometry)[0] if to_weight else None
        return dg, dw, None, None, None, None

    @staticmethod
    def vmap(
        info: Any, axes: tuple[Axis, ...], g: Tensor, weight: Tensor, narrow: Tensor, *rest: Any
    ) -> tuple[Tensor, int]:
        size = info.batch_size
        if axes[1] is None and len(weight) == 1:
            return _unfolded(InputGradient.apply(_folded(g, axes[0]), weight, narrow, *rest), size), 1
        narrow = _merged(narrow, axes[2], size) if axes[2] is not None else narrow.new_empty(0)
        merged = _merged(g, axes[0], size), _merged(weight, axes[1], size)
        return _apart(InputGradient.apply(*merged, narrow, *rest), size), 0


class WeightGradient(Function):
    """The gradients of a convolution's weight and bias."""

    @staticmethod
    def forward(x: Tensor, g: Tensor, kernel: tuple[int, int], geometry: Geometry) -> tuple[Tensor, Tensor]:
        return products.weight_gradient(x, g, kernel, geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, g, _, ctx.geometry = inputs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, g)

    @staticmethod
    def backward(ctx: Any, to_weight: Tensor | None, to_bias: Tensor | None) -> tuple[Tensor | None, ...]:
        x, g = ctx.saved_tensors
        geometry = ctx.geometry
        dx, dg = None, None
        if to_weight is None:
            if to_bias is not None and ctx.needs_input_grad[1]:
                dg = to_bias[:, None, :, None, None].expand(g.shape).to(g.dtype)
            return None, dg, None, None
        if ctx.needs_input_grad[0]:
            dx = InputGradient.apply(
                g, to_weight, to_weight.new_empty(0), tuple(x.shape[3:]), x.dtype, geometry
            )
        if ctx.needs_input_grad[1]:
            dg = convolve(x, to_weight, to_bias, geometry).to(g.dtype)
        return dx, dg, None, None

    @staticmethod
    def vmap(info: Any, axes: tuple[Axis, ...], x: Tensor, g: Tensor, *rest: Any) -> Any:
        size = info.batch_size
        dw, db = WeightGradient.apply(_merged(x, axes[0], size), _merged(g, axes[1], size), *rest)
        return (_apart(dw, size), _apart(db, size)), (0, 0)


class MaxPool(Function):
    """The largest value of each window, and which of its places it had."""

    @staticmethod
    def forward(x: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        return pooling.forward(x, window)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, ctx.window = inputs
        ctx.size = tuple(x.shape[3:])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, g: Tensor | None, _: Any) -> tuple[Tensor | None, None]:
        (winners,) = ctx.saved_tensors
        return None if g is None else MaxPoolGradient.apply(g, winners, ctx.size, ctx.window), None

    @staticmethod
    def vmap(info: Any, axes: tuple[Axis, ...], x: Tensor, window: Window) -> Any:
        y, winners = MaxPool.apply(_merged(x, axes[0], info.batch_size), window)
        return (_apart(y, info.batch_size), _apart(winners, info.batch_size)), (0, 0)


class MaxPoolGradient(Function):
    """Hands each gradient to the place that won."""

    @staticmethod
    def forward(g: Tensor, winners: Tensor, size: tuple[int, int], window: Window) -> Tensor:
        return pooling.backward(g, winners, size, window)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, winners, ctx.size, ctx.window = inputs
        ctx.save_for_backward(winners)

    @staticmethod
    def backward(ctx: Any, second: Tensor) -> tuple[Tensor, None, None, None]:
        (winners,) = ctx.saved_tensors
        return MaxPoolChoice.apply(second, winners, ctx.size, ctx.window), None, None, None

    @staticmethod
    def vmap(info: Any, axes: tuple[Axis, ...], g: Tensor, winners: Tensor, *rest: Any) -> tuple[Tensor, int]:
        size = info.batch_size
        return _apart(MaxPoolGradient.apply(_merged(g, axes[0], size), _merged(winners, axes[1], size), *rest), size), 0


class MaxPoolChoice(Function):
    """Takes from each window what stands in the place that won: the transpose of `MaxPoolGradient`."""

    @staticmethod
    def forward(x: Tensor, winners: Tensor, size: tuple[int, int], window: Window) -> Tensor:
        return pooling.chosen(x, winners, window)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, winners, ctx.size, ctx.window = inputs
        ctx.save_for_backward(winners)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        (winners,) = ctx.saved_tensors
        return MaxPoolGradient.apply(g, winners, ctx.size, ctx.window), None, None, None

    @staticmethod
    def vmap(info: Any, axes: tuple[Axis, ...], x: Tensor, winners: Tensor, *rest: Any) -> tuple[Tensor, int]:
        size = info.batch_size
        return _apart(MaxPoolChoice.apply(_merged(x, axes[0], size), _merged(winners, axes[1], size), *rest), size), 0


def _kept(narrow: Tensor, weight: Tensor) -> Tensor:
    """Return narrowed weights worth keeping; nothing where they are the weights themselves."""
    return narrow.new_empty(0) if narrow.data_ptr() == weight.data_ptr() else narrow


def _merged(value: Tensor, axis: Axis, size: int) -> Tensor:
    """Make vmap's axis part of the client axis; what is common is not copied."""
    value = value.expand(size, *value.shape) if axis is None else value.movedim(axis, 0)
    return value.squeeze(1) if value.shape[1] == 1 else value.flatten(0, 1)


def _apart(value: Tensor, size: int) -> Tensor:
    return value.unflatten(0, (size, -1))


def _folded(value: Tensor, axis: Axis) -> Tensor:
    """Make vmap's axis part of the sample axis, the second."""
    return value if axis is None else value.movedim(axis, 1).flatten(1, 2)


def _unfolded(value: Tensor, size: int) -> Tensor:
    return value.unflatten(1, (size, -1))
