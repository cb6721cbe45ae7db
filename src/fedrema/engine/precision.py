"""Where to train, and in which arithmetic."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

from fedrema.core.options import Precision
from fedrema.errors import BadInput


@dataclass(frozen=True)
class Arithmetic:
    """The type that weights are kept in, and what their products with activations are computed in."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    products: str = "float32"

    def torch_context(self) -> AbstractContextManager[object]:
        """Return the context in which torch itself computes so; a method sees features and logits as `dtype`."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.products == "bf16" else nullcontext()

    @contextmanager
    def tf32_where_allowed(self) -> Iterator[None]:
        """Let float32 products run in TF32 for a while, where this arithmetic allows that; elsewhere they never do."""
        _allow_tf32(self.products in ("tf32", "bf16"))
        try:
            yield
        finally:
            _allow_tf32(False)


def _allow_tf32(allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed


class _HasArithmetic(Protocol):
    arithmetic: Arithmetic


_Engine = TypeVar("_Engine", bound=_HasArithmetic)
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def in_training_arithmetic(
    work: Callable[Concatenate[_Engine, _Given], _Result],
) -> Callable[Concatenate[_Engine, _Given], _Result]:
    """Decorate what an engine computes for clients: only this may use TF32, the server's arithmetic is float32."""

    @functools.wraps(work)
    def computed(engine: _Engine, /, *args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        with engine.arithmetic.tf32_where_allowed():
            return work(engine, *args, **kwargs)

    return computed


def choose_device(device: str) -> torch.device:
    """Return the device to train on; `auto` takes a GPU where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise BadInput(
            f"--device {device} was asked for, but this machine has no usable CUDA device: use --device cpu or auto."
        )
    return torch.device(device)


def choose_precision(precision: Precision, device: torch.device) -> Arithmetic:
    """Return the arithmetic asked for; `auto` is the fastest that is as accurate as float32."""
    if precision == "auto":
        precision = "float32" if device.type == "cpu" else "bf16"
    if precision in ("tf32", "bf16") and device.type != "cuda":
        raise BadInput(f"--precision {precision} needs a CUDA device; on the CPU use float32 or float64.")
    torch.backends.cudnn.benchmark = True  # shapes stay the same for a whole run
    _allow_tf32(False)
    return Arithmetic(device, torch.float64 if precision == "float64" else torch.float32, precision)
