"""Norms and momentum steps of stacked clients, one pass over memory each; captured in a CUDA graph as they are."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedrema.engine.kernels import optimiser_programs
from fedrema.engine.kernels.tiles import pieces

BLOCK, STEPS = 1024, 8


def client_norms(gradients: Sequence[Tensor]) -> Tensor:
    """Return each client's norm [k] over all its tensors [k, ...]; stacking more clients changes no bit of it."""
    # A norm does not care for the order, so whatever lies dense is read as it lies.
    dense = [value if _is_dense(value) else value.contiguous() for value in gradients]
    sizes = [value[0].numel() for value in dense]
    stretches = [pieces(size, BLOCK * STEPS) for size in sizes]
    clients, count = len(dense[0]), sum(stretches)
    sums = dense[0].new_empty((clients, count), dtype=torch.float32)
    norms = dense[0].new_empty(clients, dtype=torch.float32)
    first = 0
    for value, size, number in zip(dense, sizes, stretches, strict=True):
        if size:
            optimiser_programs.squares[(number, clients)](
                value, sums, size, count, first, steps=STEPS, block=BLOCK, num_warps=4
            )
        first += number
    optimiser_programs.roots[(clients,)](sums, norms, count, block=BLOCK, num_warps=4)
    return norms


def momentum_step(
    parameter: Tensor,
    velocity: Tensor,
    gradient: Tensor,
    *,
    scale: Tensor | None,
    rate: Tensor,
    momentum: float,
    weight_decay: float,
    active: Tensor | None,
) -> None:
    """Take one step of SGD with momentum in place, for all clients.

    Parameters
    ----------
    parameter, velocity
        Tensors [k, ...] of one memory order, without gaps, the client axis first.
    gradient
        The gradient [k, ...]; copied where its memory order is another.
    scale
        Factors [k] of the gradient (clipping), before weight decay.
    rate
        The learning rate, a tensor of no dimension: a captured graph reads it anew each time.
    active
        Numbers [k]; a client with 0 stays bit for bit as it was, even where its gradient is no number.
    """
    if not _is_dense(parameter) or velocity.stride() != parameter.stride():
        raise ValueError("parameter and velocity must have one dense memory order with the client axis first")
    if gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter).copy_(gradient)
    size = parameter[0].numel()
    if not size:
        return
    optimiser_programs.momentum[(pieces(size, BLOCK), len(parameter))](
        parameter, velocity, gradient, parameter if scale is None else scale, rate,
        parameter if active is None else active, size, float(momentum), float(weight_decay),
        has_scale=scale is not None, has_active=active is not None, block=BLOCK, num_warps=4,
    )  # fmt: skip


def _is_dense(value: Tensor) -> bool:
    """Whether each client's values lie together without gaps, one client after the other."""
    expected = 1
    axes = sorted(range(1, value.dim()), key=lambda axis: (value.stride(axis), value.shape[axis]))
    for axis in (*axes, 0):
        if value.shape[axis] != 1 and value.stride(axis) != expected:
            return False
        expected *= value.shape[axis]
    return True
