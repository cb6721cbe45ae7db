"""Routes a network's layers to the kernels for stacked clients while its loss is computed, where these apply."""

import importlib.util
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from fedrema.engine.kernels import record

if TYPE_CHECKING:
    from fedrema.engine.kernels.products import Geometry

# By name: many of these exist as a function and as a method, and access to a tensor's attributes is `__get__`.
HARMLESS_IN_BF16 = frozenset({
    "relu", "relu_", "leaky_relu", "leaky_relu_", "threshold", "relu6", "hardtanh", "gelu", "silu", "elu",
    "dropout", "dropout1d", "dropout2d", "feature_dropout", "alpha_dropout", "max_pool1d", "max_pool2d",
    "max_pool3d", "adaptive_max_pool2d", "flatten", "reshape", "view", "view_as", "reshape_as", "permute",
    "transpose", "movedim", "moveaxis", "squeeze", "unsqueeze", "unflatten", "expand", "expand_as", "chunk",
    "split", "unbind", "narrow", "select", "index_select", "cat", "concat", "stack", "__getitem__",
    "contiguous", "clone", "detach", "detach_", "pad", "t", "__get__", "__set__", "dim", "ndimension", "size",
    "numel", "nelement", "stride", "storage_offset", "is_contiguous", "is_floating_point", "is_complex",
    "element_size", "data_ptr", "get_device", "__len__", "__hash__", "__repr__", "__format__", "to", "type",
    "type_as", "float", "double", "half", "bfloat16", "cpu", "cuda", "requires_grad_", "retain_grad",
    "register_hook", "grad", "backward",
})  # fmt: skip

# Under vmap these request a memory layout that torch does not support there: their inputs are made contiguous.
PLAIN_ORDER = frozenset({"group_norm", "instance_norm"})


def usable(device: torch.device, dtype: torch.dtype, precision: str) -> bool:
    """Return whether a network with weights of this type on this device can be trained with `Operators`."""
    return (
        device.type == "cuda"
        and dtype == torch.float32
        and precision in ("float32", "tf32", "bf16")
        and importlib.util.find_spec("triton") is not None
        and torch.cuda.get_device_capability(device) >= (8, 0)
    )


class Operators(TorchFunctionMode):
    """Context in which convolutions, linear layers and max pooling run as one kernel for all clients.

    To be used around `vmap` of a single client's loss, whose sum is then differentiated. With bf16, convolutions return
    bf16; other operations convert it to float32, except those in `HARMLESS_IN_BF16`.

    Parameters
    ----------
    precision
        Of the operands of products: `bf16`, `tf32` or `float32`. Sums are float32 in any case.
    """

    def __init__(self, precision: str) -> None:
        super().__init__()
        self.precision = precision
        self.routes: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
            torch.conv2d: self._conv2d,
            functional.linear: self._linear,
            functional.max_pool2d: self._max_pool2d,
            torch.max_pool2d: self._max_pool2d,
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Replace a call that the kernels cover; leave others to torch."""
        kwargs = kwargs or {}
        route = self.routes.get(func)
        taken = None if route is None else route(*args, **kwargs)
        for routed in record.active:
            routed.add(func, taken is not None)
        if taken is not None:
            return taken
        if route is None and getattr(func, "__name__", "") in HARMLESS_IN_BF16:
            return func(*args, **kwargs)
        change = _plain if getattr(func, "__name__", "") in PLAIN_ORDER else _widened
        return func(*tree_map(change, args), **tree_map(change, kwargs))

    def _conv2d(
        self,
        input: Tensor,  # noqa: A002 (torch's name: it may be given by keyword)
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor | None:
        if padding == "valid":
            padding = 0
        if groups != 1 or _pair(dilation) != (1, 1) or isinstance(padding, str) or input.dim() != 4:
            return None
        geometry = self._geometry(_pair(stride), _pair(padding))
        return self._product(input, weight, bias, geometry) if _covered(input, weight, bias) else None

    # The parameters have torch's names, as above.
    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:  # noqa: A002
        if not _covered(input, weight, bias) or weight.dim() != 2 or input.dim() < 1:
            return None
        rows = input.reshape(-1, input.shape[-1], 1, 1)
        found = self._product(rows, weight.unsqueeze(2).unsqueeze(3), bias, self._geometry(linear=True))
        return found.reshape(*input.shape[:-1], len(weight))

    def _max_pool2d(
        self,
        input: Tensor,  # noqa: A002 (as above)
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Tensor | None:
        from fedrema.engine.kernels.pooling import MOST_PLACES, Window

        kernel = _pair(kernel_size)
        if ceil_mode or return_indices or _pair(dilation) != (1, 1) or input.dim() != 4 or not _covered(input):
            return None
        window = Window(kernel, _pair(stride) if stride else kernel, _pair(padding))
        fits = all(2 * pad <= length for pad, length in zip(window.padding, kernel, strict=True))
        if kernel[0] * kernel[1] > MOST_PLACES or not fits or min(window.size(*input.shape[2:])) < 1:
            return None  # torch raises the error
        from fedrema.engine.kernels.autograd import max_pool

        return max_pool(input.unsqueeze(0), window).squeeze(0)

    def _geometry(
        self, stride: tuple[int, int] = (1, 1), padding: tuple[int, int] = (0, 0), linear: bool = False
    ) -> "Geometry":
        from fedrema.engine.kernels.products import Geometry

        return Geometry(stride, padding, self.precision, linear)

    @staticmethod
    def _product(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: "Geometry") -> Tensor:
        # Imported here, because Triton is imported only when it is needed.
        from fedrema.engine.kernels.autograd import convolve

        # Not [None] and [0]: the gradient of indexing is a copy with another memory layout.
        bias = None if bias is None else bias.unsqueeze(0)
        return convolve(x.unsqueeze(0), weight.unsqueeze(0), bias, geometry).squeeze(0)


def _covered(first: Tensor, *others: Tensor | None) -> bool:
    """Return whether the kernels support the tensors' device (any, with Triton's interpreter) and types."""
    tensors = [first, *(other for other in others if other is not None)]
    placed = first.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    return (
        placed
        and first.dtype in (torch.float32, torch.bfloat16)
        and all(tensor.dtype == torch.float32 for tensor in tensors[1:])
    )


def _pair(value: Any) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    numbers = tuple(int(number) for number in value)
    return (numbers[0], numbers[-1])


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


def _plain(value: Any) -> Any:
    return _widened(value).contiguous() if isinstance(value, Tensor) else value
