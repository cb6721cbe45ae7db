"""Products, pooling and optimiser steps of stacked clients as Triton programs, for the stacked engine on a GPU.

Triton is imported when they are first used: without it the package still loads, and `usable` says no.
"""

from collections.abc import Sequence

from torch import Tensor

from fedrema.engine.kernels.routing import Operators, usable


def client_norms(gradients: Sequence[Tensor]) -> Tensor:
    """Return each client's norm [k] over all its tensors [k, ...]; stacking more clients changes no bit of it."""
    from fedrema.engine.kernels import optimiser

    return optimiser.client_norms(gradients)


def momentum_steps(
    parameters: Sequence[Tensor],
    velocities: Sequence[Tensor],
    gradients: Sequence[Tensor],
    *,
    scale: Tensor | None,
    rate: Tensor,
    momentum: float,
    weight_decay: float,
    active: Tensor | None,
) -> None:
    """Take one step of SGD with momentum in place; `fedrema.engine.kernels.optimiser` says what is what."""
    from fedrema.engine.kernels import optimiser

    optimiser.momentum_steps(
        parameters, velocities, gradients, scale=scale, rate=rate, momentum=momentum, weight_decay=weight_decay,
        active=active,
    )  # fmt: skip


__all__ = ["Operators", "client_norms", "momentum_steps", "usable"]
