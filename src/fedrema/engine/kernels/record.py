"""Records which functions of a network run as our kernels, and which are left to torch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

REARRANGES = frozenset({
    "flatten", "reshape", "view", "view_as", "reshape_as", "permute", "transpose", "movedim", "moveaxis", "squeeze",
    "unsqueeze", "unflatten", "expand", "expand_as", "chunk", "split", "unbind", "narrow", "select", "__getitem__",
    "detach", "detach_", "t", "__get__", "__set__", "dim", "ndimension", "size", "numel", "nelement", "stride",
    "storage_offset", "is_contiguous", "is_floating_point", "is_complex", "element_size", "data_ptr", "get_device",
    "__len__", "__hash__", "__repr__", "__format__", "requires_grad_", "retain_grad", "register_hook",
})  # fmt: skip
"""Functions that compute nothing: they are not recorded."""


@dataclass
class Routed:
    """Names of functions; one that the kernels cover only in some cases can be in both sets."""

    to_kernels: set[str] = field(default_factory=set)
    to_torch: set[str] = field(default_factory=set)

    def add(self, function: Callable[..., Any], taken: bool) -> None:
        """Record one call of a function, and whether a kernel replaced it."""
        name = getattr(function, "__name__", type(function).__name__)
        if name not in REARRANGES:
            (self.to_kernels if taken else self.to_torch).add(name.strip("_"))


active: list[Routed] = []
"""The records that are being made."""


@contextmanager
def recording() -> Iterator[Routed]:
    """Record what `Operators` replaces inside the context."""
    routed = Routed()
    active.append(routed)
    try:
        yield routed
    finally:
        active.remove(routed)
