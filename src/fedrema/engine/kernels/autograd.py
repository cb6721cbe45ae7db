"""Convolutions and max pooling of stacked clients as differentiable functions that vmap turns into one launch.

Each function takes tensors with a leading client axis; vmap's axis becomes part of it. The derivatives of each of the
three products are the other two, so that gradients can be differentiated again.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fedrema.engine.kernels import pooling, products
from fedrema.engine.kernels.pooling import Window
from fedrema.engine.kernels.products import Geometry

Axis = int | None


def call(function: type[Function], *arguments: Any) -> Any:
    """Apply a function; torch does not annotate `apply`."""
    return function.apply(*arguments)  # type: ignore[no-untyped-call]  # not annotated in torch


def merged(value: Tensor, axis: Axis, size: int) -> Tensor:
    """Merge vmap's axis into the client axis; common tensors are not copied."""
    value = value.expand(size, *value.shape) if axis is None else value.movedim(axis, 0)
    return value.squeeze(1) if value.shape[1] == 1 else value.flatten(0, 1)


def apart(value: Tensor, size: int) -> Tensor:
    """Undo `merged`."""
    return value.reshape(size, len(value) // size, *value.shape[1:])


def folded(value: Tensor, axis: Axis) -> Tensor:
    """Merge vmap's axis into the sample axis, the second."""
    return value if axis is None else value.movedim(axis, 1).flatten(1, 2)


def unfolded(value: Tensor, size: int) -> Tensor:
    """Undo `folded`."""
    return value.reshape(len(value), size, value.shape[1] // size, *value.shape[2:])


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry) -> Tensor:
    """Return the convolution of x [k, n, channels, height, width] with weight [k, outputs, channels, ...]."""
    y: Tensor = call(Convolve, x, weight, bias, geometry)[0]
    return y


class Convolve(Function):
    """Returns the output, and the weights in the layout that the backward pass needs too."""

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
        dx = call(InputGradient, g, weight, narrow, tuple(x.shape[3:]), x.dtype, geometry) if to_x else None
        dw, db = call(WeightGradient, x, g, kernel, geometry) if to_weight or to_bias else (None, None)
        return dx, dw if to_weight else None, db if to_bias else None, None

    @staticmethod
    def vmap(
        info: Any, axes: tuple[Axis, ...], x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry
    ) -> Any:
        size = info.batch_size
        if (
            axes[1] is None and axes[2] is None and len(weight) == 1
        ):  # common weights: treat all samples as one client's
            y, narrow = call(Convolve, folded(x, axes[0]), weight, bias, geometry)
            return (unfolded(y, size), narrow), (1, None)
        x, weight = merged(x, axes[0], size), merged(weight, axes[1], size)
        bias = None if bias is None else merged(bias, axes[2], size)
        y, narrow = call(Convolve, x, weight, bias, geometry)
        kept = apart(narrow, size) if narrow.numel() else narrow
        return (apart(y, size), kept), (0, 0 if narrow.numel() else None)


class InputGradient(Function):
    """The gradient of a convolution's input; `narrow` are the weights that `Convolve` kept."""

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
        dw = call(WeightGradient, second, g, kernel, geometry)[0] if to_weight else None
        return dg, dw, None, None, None, None

    @staticmethod
    def vmap(
        info: Any, axes: tuple[Axis, ...], g: Tensor, weight: Tensor, narrow: Tensor, *rest: Any
    ) -> tuple[Tensor, int]:
        size = info.batch_size
        if axes[1] is None and len(weight) == 1:
            return unfolded(call(InputGradient, folded(g, axes[0]), weight, narrow, *rest), size), 1
        narrow = merged(narrow, axes[2], size) if axes[2] is not None else narrow.new_empty(0)
        g, weight = merged(g, axes[0], size), merged(weight, axes[1], size)
        return apart(call(InputGradient, g, weight, narrow, *rest), size), 0


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
            dx = call(InputGradient, g, to_weight, to_weight.new_empty(0), tuple(x.shape[3:]), x.dtype, geometry)
        if ctx.needs_input_grad[1]:
            dg = convolve(x, to_weight, to_bias, geometry).to(g.dtype)
        return dx, dg, None, None

    @staticmethod
    def vmap(info: Any, axes: tuple[Axis, ...], x: Tensor, g: Tensor, *rest: Any) -> Any:
        size = info.batch_size
        dw, db = call(WeightGradient, merged(x, axes[0], size), merged(g, axes[1], size), *rest)
        return (apart(dw, size), apart(db, size)), (0, 0)


def _kept(narrow: Tensor, weight: Tensor) -> Tensor:
    """Return narrowed weights for the backward pass; an empty tensor if they are the weights themselves."""
    return narrow.new_empty(0) if narrow.data_ptr() == weight.data_ptr() else narrow


def max_pool(x: Tensor, window: Window) -> Tensor:
    """Return the largest values of each window of x [k, n, channels, height, width]."""
    y: Tensor = call(MaxPool, x, window)[0]
    return y


class MaxPool(Function):
    """Returns the largest value of each window, and its position in the window."""

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
        return None if g is None else call(MaxPoolGradient, g, winners, ctx.size, ctx.window), None

    @staticmethod
    def vmap(info: Any, axes: tuple[Axis, ...], x: Tensor, window: Window) -> Any:
        y, winners = call(MaxPool, merged(x, axes[0], info.batch_size), window)
        return (apart(y, info.batch_size), apart(winners, info.batch_size)), (0, 0)


class MaxPoolGradient(Function):
    """Adds each gradient to the position of the largest value."""

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
        return call(MaxPoolChoice, second, winners, ctx.size, ctx.window), None, None, None

    @staticmethod
    def vmap(info: Any, axes: tuple[Axis, ...], g: Tensor, winners: Tensor, *rest: Any) -> tuple[Tensor, int]:
        size = info.batch_size
        return apart(call(MaxPoolGradient, merged(g, axes[0], size), merged(winners, axes[1], size), *rest), size), 0


class MaxPoolChoice(Function):
    """Selects the value at the position of the largest one from each window: the transpose of `MaxPoolGradient`."""

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
        return call(MaxPoolGradient, g, winners, ctx.size, ctx.window), None, None, None

    @staticmethod
    def vmap(info: Any, axes: tuple[Axis, ...], x: Tensor, winners: Tensor, *rest: Any) -> tuple[Tensor, int]:
        size = info.batch_size
        return apart(call(MaxPoolChoice, merged(x, axes[0], size), merged(winners, axes[1], size), *rest), size), 0
