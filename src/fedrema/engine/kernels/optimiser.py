"""Launches gradient norms and momentum steps of stacked clients, one pass over memory each."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedrema.engine.kernels import optimiser_programs
from fedrema.engine.kernels.tiles import pieces

BLOCK, STRETCH = 1024, 8192
TOGETHER = 16
"""Tensors per launch; a kernel is compiled for each number of tensors."""


def client_norms(gradients: Sequence[Tensor]) -> Tensor:
    """Return each client's norm [k] over all its tensors [k, ...]; it does not depend on the number of clients."""
    # A norm does not depend on the order of values, so dense tensors are read in their memory order.
    dense = [value if _is_dense(value) else value.contiguous() for value in gradients]
    stretches = [pieces(value[0].numel(), STRETCH) for value in dense]
    clients, count = len(dense[0]), sum(stretches)
    sums = dense[0].new_empty((clients, count), dtype=torch.float32)
    norms = dense[0].new_empty(clients, dtype=torch.float32)
    first = 0
    for begin in range(0, len(dense), TOGETHER):
        group = tuple(dense[begin : begin + TOGETHER])
        number = sum(stretches[begin : begin + TOGETHER])
        if number:
            optimiser_programs.squares[(number, clients)](
                group, _sizes(group), sums, count, first, block=STRETCH, num_warps=4
            )
        first += number
    optimiser_programs.roots[(clients,)](sums, norms, count, block=BLOCK, num_warps=4)
    return norms


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
    """Take one step of SGD with momentum in place, for all clients and tensors.

    Parameters
    ----------
    parameters, velocities
        Tensors [k, ...]; the two of one name have the same dense memory layout with the client axis first.
    gradients
        The gradients [k, ...]; copied if their memory layout differs.
    scale
        Factors [k] of the gradient (clipping), before weight decay.
    rate
        The learning rate, a tensor without dimensions: a captured graph reads it at each replay.
    active
        Numbers [k]; a client with 0 does not change, even if its gradient is NaN.
    """
    slopes = []
    for parameter, velocity, gradient in zip(parameters, velocities, gradients, strict=True):
        if not _is_dense(parameter) or velocity.stride() != parameter.stride():
            raise ValueError("parameter and velocity must have one dense memory order with the client axis first")
        same = gradient.stride() == parameter.stride()
        slopes.append(gradient if same else torch.empty_like(parameter).copy_(gradient))
    for begin in range(0, len(slopes), TOGETHER):
        group = tuple(parameters[begin : begin + TOGETHER])
        sizes = _sizes(group)
        number = sum(pieces(size, BLOCK) for size in sizes)
        if number:
            optimiser_programs.momentum[(number, len(group[0]))](
                group, tuple(velocities[begin : begin + TOGETHER]), tuple(slopes[begin : begin + TOGETHER]), sizes,
                rate if scale is None else scale, rate, rate if active is None else active,
                float(momentum), float(weight_decay),
                has_scale=scale is not None, has_active=active is not None, block=BLOCK, num_warps=4,
            )  # fmt: skip


def _sizes(group: tuple[Tensor, ...]) -> tuple[int, ...]:
    """Return the number of values per client of each tensor."""
    return tuple(value[0].numel() for value in group)


def _is_dense(value: Tensor) -> bool:
    """Return whether each client's values are contiguous in memory, one client after another."""
    expected = 1
    axes = sorted(range(1, value.dim()), key=lambda axis: (value.stride(axis), value.shape[axis]))
    for axis in (*axes, 0):
        if value.shape[axis] != 1 and value.stride(axis) != expected:
            return False
        expected *= value.shape[axis]
    return True
