"""Local training of one client, or of all at once: the same lines serve both backends.

Tensors have a leading client axis where the losses have one; otherwise they are a single client's.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fedrema.core import Batch, Client, LocalTraining, Loss, Method, Phase
from fedrema.net import Net, Tensors

Feed = Iterator[tuple[tuple[Batch, ...], Tensor | None]]
"""Yields for each step its batches and, where some clients have finished, who is still active [k]."""


@dataclass
class Losses:
    """Running mean of the training loss, on the device: nothing waits for it."""

    total: Tensor
    steps: Tensor

    def add(self, value: Tensor, active: Tensor | None) -> None:
        """Count one step."""
        self.total += value if active is None else value.masked_fill(active == 0, 0)
        self.steps += 1 if active is None else active

    def mean(self) -> Tensor:
        """Return the mean per client; 0 for one that took no step."""
        return self.total / self.steps.clamp(min=1)


def train_phase(
    method: Method,
    net: Net,
    phase: Phase,
    local: LocalTraining,
    client: Client,
    velocity: Tensors,
    feed: Feed,
    losses: Losses,
    value_of: Callable[[Loss, Client, Batch], Tensor],
) -> None:
    """Descend through one phase; `client.params` and `velocity` are changed in place.

    `value_of` returns the loss, one number or one per client; clients are independent, so the gradient of their
    sum is each one's own.
    """
    loss: Loss = phase.loss or method.loss
    names = [name for name in client.params if name in velocity and phase.trains(name)]
    axes = losses.total.dim()
    for batches, active in feed:
        recorded = False

        def gradient(at: Client, batch: Batch, active: Tensor | None = active) -> Tensors:
            nonlocal recorded
            leaves = {name: at.params[name].detach().requires_grad_() for name in names}
            with torch.enable_grad():
                value = value_of(loss, at.having(params={**at.params, **leaves}), batch)
                found = torch.autograd.grad(value.sum(), list(leaves.values()), materialize_grads=True)
            if not recorded:  # where a step takes several gradients, the first is what other methods take
                losses.add(value.detach(), active)
                recorded = True
            return clipped(dict(zip(names, found, strict=True)), local.clip, axes)

        direction = phase.step(gradient, client, batches)
        descend(client.params, velocity, direction, phase, local, active)


def descend(
    params: Tensors,
    velocity: Tensors,
    direction: Tensors,
    phase: Phase,
    local: LocalTraining,
    active: Tensor | None,
) -> None:
    """Take one step of SGD with momentum, in place; a client that is not active stays as it is."""
    keep: Tensor | float = phase.momentum
    if active is not None:
        keep = torch.full_like(active, phase.momentum).masked_fill_(active == 0, 1.0)
    for name, value in direction.items():
        if local.weight_decay:  # after clipping, as it is in torch's SGD
            value = value + local.weight_decay * params[name]
        if active is not None:  # not times 0: what comes of an empty batch need not be a number
            value = value.masked_fill(_per_client(active == 0, value), 0)
        velocity[name].mul_(_spread(keep, value)).add_(value)
        if active is None:
            params[name].add_(velocity[name], alpha=-phase.lr)
        else:
            params[name].sub_(velocity[name] * _spread(phase.lr * active, value))


def clipped(gradient: Tensors, limit: float, axes: int) -> Tensors:
    """Scale down gradients whose norm over all tensors exceeds a limit, each client's by itself; 0 is no limit."""
    if not limit:
        return gradient
    norms = [
        torch.linalg.vector_norm(value, dim=tuple(range(axes, value.dim()))) if value.dim() > axes else value.abs()
        for value in gradient.values()
    ]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms), dim=0)
    scale = (limit / (norm + 1e-6)).clamp(max=1)
    return {name: value * _spread(scale, value) for name, value in gradient.items()}


def _spread(factor: Tensor | float, like: Tensor) -> Tensor | float:
    """Give one number per client the shape to multiply that client's tensor with."""
    if isinstance(factor, float) or factor.dim() == 0:
        return factor
    return _per_client(factor.to(like.dtype), like)


def _per_client(values: Tensor, like: Tensor) -> Tensor:
    return values.reshape(-1, *[1] * (like.dim() - 1))
