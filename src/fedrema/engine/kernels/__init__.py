"""Triton kernels for stacked clients on a GPU: convolutions, linear layers, max pooling, norms and SGD steps.

Triton is imported at the first use: without it the package can be imported, and `usable` returns False.
"""

from typing import TYPE_CHECKING

from fedrema.engine.kernels.routing import Operators, usable

if TYPE_CHECKING:
    from fedrema.engine.kernels.optimiser import client_norms, momentum_steps

__all__ = ["Operators", "client_norms", "momentum_steps", "usable"]


def __getattr__(name: str) -> object:
    if name not in ("client_norms", "momentum_steps"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("fedrema.engine.kernels.optimiser"), name)
