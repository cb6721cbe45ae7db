"""Triton kernels for stacked clients on a GPU: convolutions, linear layers, max pooling, norms and SGD steps.

Triton is imported at the first use: without it the package can be imported, and `usable` returns False.
"""

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING

from fedrema.engine.kernels.record import Routed, recording
from fedrema.engine.kernels.routing import Operators, usable

if TYPE_CHECKING:
    from fedrema.engine.kernels.optimiser import client_norms, momentum_steps

__all__ = ["Operators", "Routed", "client_norms", "momentum_steps", "program_names", "recording", "usable"]


def program_names() -> frozenset[str]:
    """Return the names of all Triton programs of this package, under which a profiler lists them."""
    from triton.runtime.jit import KernelInterface

    modules = [import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    return frozenset(
        name for module in modules for name, value in vars(module).items() if isinstance(value, KernelInterface)
    )


def __getattr__(name: str) -> object:
    if name not in ("client_norms", "momentum_steps"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("fedrema.engine.kernels.optimiser"), name)
