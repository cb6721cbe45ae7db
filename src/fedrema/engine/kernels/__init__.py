"""Products, pooling and optimiser steps of stacked clients as Triton programs, for the stacked engine on a GPU.

Triton is imported when they are first used: without it the package still loads, and `usable` says no.
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
