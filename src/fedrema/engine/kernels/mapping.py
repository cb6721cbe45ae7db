"""What the differentiable functions share: vmap's axis becomes part of the client axis, or of the samples."""

from typing import Any

from torch import Tensor
from torch.autograd import Function

Axis = int | None


def call(function: type[Function], *arguments: Any) -> Any:
    """Apply a function; torch leaves `apply` without types."""
    return function.apply(*arguments)  # type: ignore[no-untyped-call]  # torch does not say its types


def merged(value: Tensor, axis: Axis, size: int) -> Tensor:
    """Make vmap's axis part of the client axis; what is common is not copied."""
    value = value.expand(size, *value.shape) if axis is None else value.movedim(axis, 0)
    return value.squeeze(1) if value.shape[1] == 1 else value.flatten(0, 1)


def apart(value: Tensor, size: int) -> Tensor:
    """Undo `merged`."""
    return value.reshape(size, len(value) // size, *value.shape[1:])


def folded(value: Tensor, axis: Axis) -> Tensor:
    """Make vmap's axis part of the sample axis, the second."""
    return value if axis is None else value.movedim(axis, 1).flatten(1, 2)


def unfolded(value: Tensor, size: int) -> Tensor:
    """Undo `folded`."""
    return value.reshape(len(value), size, value.shape[1] // size, *value.shape[2:])
