"""Max pooling as a differentiable function that vmap turns into one launch."""

from typing import Any

from torch import Tensor
from torch.autograd import Function

from fedrema.engine.kernels import pooling
from fedrema.engine.kernels.mapping import Axis, apart, call, merged
from fedrema.engine.kernels.pooling import Window


def max_pool(x: Tensor, window: Window) -> Tensor:
    """Return the largest values of each window of x [k, n, channels, height, width]."""
    y: Tensor = call(MaxPool, x, window)[0]
    return y


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
        return None if g is None else call(MaxPoolGradient, g, winners, ctx.size, ctx.window), None

    @staticmethod
    def vmap(info: Any, axes: tuple[Axis, ...], x: Tensor, window: Window) -> Any:
        y, winners = call(MaxPool, merged(x, axes[0], info.batch_size), window)
        return (apart(y, info.batch_size), apart(winners, info.batch_size)), (0, 0)


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
        return call(MaxPoolChoice, second, winners, ctx.size, ctx.window), None, None, None

    @staticmethod
    def vmap(info: Any, axes: tuple[Axis, ...], g: Tensor, winners: Tensor, *rest: Any) -> tuple[Tensor, int]:
        size = info.batch_size
        return apart(call(MaxPoolGradient, merged(g, axes[0], size), merged(winners, axes[1], size), *rest), size), 0


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
        return call(MaxPoolGradient, g, winners, ctx.size, ctx.window), None, None, None

    @staticmethod
    def vmap(info: Any, axes: tuple[Axis, ...], x: Tensor, winners: Tensor, *rest: Any) -> tuple[Tensor, int]:
        size = info.batch_size
        return apart(call(MaxPoolChoice, merged(x, axes[0], size), merged(winners, axes[1], size), *rest), size), 0
