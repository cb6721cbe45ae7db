"""On which device, in which arithmetic and with how many threads clients are computed."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

from fedrema.core.options import Precision, effective_precision, kind_of_device, needs_gpu
from fedrema.errors import BadInput


@dataclass(frozen=True)
class Arithmetic:
    """The type of the weights, and the precision of their products with activations."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    products: str = "float32"

    def torch_context(self) -> AbstractContextManager[object]:
        """Return the context in which torch computes products in this precision; methods see results as `dtype`."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.products == "bf16" else nullcontext()

    @contextmanager
    def tf32_where_allowed(self) -> Iterator[None]:
        """Allow TF32 for float32 products inside the context, if this arithmetic permits it; it is off elsewhere."""
        _allow_tf32(self.products in ("tf32", "bf16"))
        try:
            yield
        finally:
            _allow_tf32(False)


def _allow_tf32(allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed


def choose_device(device: str) -> torch.device:
    """Return the device to train on; `auto` is a GPU if the machine has one."""
    if device == "auto":
        return torch.device(kind_of_device(device))
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise BadInput(f"--device {device}: this machine has no usable CUDA device; use --device cpu or auto.")
    return torch.device(device)


def choose_precision(precision: Precision, device: torch.device) -> Arithmetic:
    """Return the arithmetic of a setting."""
    precision = effective_precision(precision, device.type)
    if needs_gpu(precision) and device.type != "cuda":
        raise BadInput(f"--precision {precision} needs a CUDA device; on the CPU use float32 or float64.")
    torch.backends.cudnn.benchmark = True  # shapes stay the same for a whole run
    _allow_tf32(False)
    return Arithmetic(device, torch.float64 if precision == "float64" else torch.float32, precision)


_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


class _HasArithmetic(Protocol):
    arithmetic: Arithmetic


_Engine = TypeVar("_Engine", bound=_HasArithmetic)


def in_training_arithmetic(
    work: Callable[Concatenate[_Engine, _Given], _Result],
) -> Callable[Concatenate[_Engine, _Given], _Result]:
    """Decorate a method of an engine: only client computations may use TF32, the server computes in float32."""

    @functools.wraps(work)
    def wrapped(engine: _Engine, /, *args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        with engine.arithmetic.tf32_where_allowed():
            return work(engine, *args, **kwargs)

    return wrapped


@contextmanager
def torch_threads(number: int | None) -> Iterator[None]:
    """Set the number of threads per torch operation inside the context; None keeps the current number."""
    before = torch.get_num_threads()
    if number is None or number == before:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _HasThreads(Protocol):
    threads: int | None


_Owner = TypeVar("_Owner", bound=_HasThreads)


def with_own_threads(
    work: Callable[Concatenate[_Owner, _Given], _Result],
) -> Callable[Concatenate[_Owner, _Given], _Result]:
    """Decorate a method: it runs with the object's own number of threads per operation."""

    @functools.wraps(work)
    def wrapped(self: _Owner, /, *args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        with torch_threads(self.threads):
            return work(self, *args, **kwargs)

    return wrapped
