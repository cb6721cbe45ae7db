"""Local training of one client, or of all at once: the same lines serve both backends.

Tensors have a leading client axis where the losses have one; otherwise they are a single client's.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedrema.core import Batch, Client, LocalTraining, Loss, Method, Move, Phase, gradient_step
from fedrema.engine import kernels
from fedrema.methods.shared.second_models import per_client
from fedrema.models.body_and_head import Tensors


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


def _no_prefix(name: str) -> str:
    return ""


class Descent:
    """The steps of one phase: made once, then taken with one batch after the other."""

    def __init__(
        self,
        method: Method,
        phase: Phase,
        local: LocalTraining,
        names: Iterable[str],
        value_of: Callable[[Loss, Client, Batch], Tensor],
        axes: int,
        fused: bool = False,
        prefix_of: Callable[[str], str] = _no_prefix,
    ) -> None:
        """Prepare.

        Parameters
        ----------
        method, phase, local
            What is to be done.
        names
            Of all parameters that are ever trained.
        value_of
            Returns the loss, one number or one per client; clients are independent, so the gradient of their sum is
            each one's own.
        axes
            1 where tensors have a leading client axis, else 0.
        fused
            Norms and steps by the programs for stacked clients on a GPU.
        prefix_of
            Returns the prefix of the model that a parameter belongs to: each model is clipped by its own norm.
        """
        self.phase, self.local, self.value_of, self.axes, self.fused = phase, local, value_of, axes, fused
        self.loss: Loss = phase.loss or method.loss
        self.names = tuple(name for name in names if phase.trains(name))
        self.prefixes = {name: prefix_of(name) for name in self.names}

    def step(
        self,
        client: Client,
        velocity: Tensors,
        losses: Losses,
        batches: tuple[Batch, ...],
        active: Tensor | None,
        rate: Tensor | None = None,
    ) -> None:
        """Descend once; `client.params`, `velocity` and `losses` are changed in place.

        `rate` is the phase's learning rate as a tensor, where the step is recorded and the rate may change later.
        """
        recorded = False

        def slope(at: Client, batch: Batch) -> Tensors:
            nonlocal recorded
            leaves = {name: at.params[name].detach().requires_grad_() for name in self.names}
            with torch.enable_grad():
                value = self.value_of(self.loss, at.having(params={**at.params, **leaves}), batch)
                found = torch.autograd.grad(value.sum(), list(leaves.values()), materialize_grads=True)
            if not recorded:  # where a step takes several gradients, the first is what other methods take
                losses.add(value.detach(), active)
                recorded = True
            return dict(zip(self.names, found, strict=True))

        def gradient(at: Client, batch: Batch) -> Tensors:
            clipped: Tensors = {}
            for model in self._models(slope(at, batch)):
                clipped |= scaled(model, self._clip_factor(model))
            return decayed(clipped, at.params, self.local.weight_decay)

        if self.fused and rate is not None and self.phase.step is gradient_step:
            # Clipping, weight decay, momentum and the step in one pass.
            decay = self.local.weight_decay
            for model in self._models(slope(client, batches[0])):
                self._fused_descend(client.params, velocity, model, self._clip_factor(model), decay, rate, active)
            return
        wanted = self.phase.step(gradient, client, batches)
        move = wanted if isinstance(wanted, Move) else Move(along=wanted)
        if self.fused and rate is not None:
            self._fused_descend(client.params, velocity, move.along, None, 0.0, rate, active)
        else:
            descend(client.params, velocity, move.along, self.phase, active)
        place(client.params, move.put, active)

    def _models(self, gradient: Tensors) -> list[Tensors]:
        """Return the gradient of each model that the phase trains."""
        models: dict[str, Tensors] = {}
        for name, value in gradient.items():
            models.setdefault(self.prefixes[name], {})[name] = value
        return list(models.values())

    def _clip_factor(self, gradient: Tensors) -> Tensor | None:
        if not self.local.clip or not gradient:
            return None
        norm = kernels.client_norms(list(gradient.values())) if self.fused else norms(gradient, self.axes)
        return (self.local.clip / (norm + 1e-6)).clamp(max=1)

    def _fused_descend(
        self,
        params: Tensors,
        velocity: Tensors,
        direction: Tensors,
        scale: Tensor | None,
        weight_decay: float,
        rate: Tensor,
        active: Tensor | None,
    ) -> None:
        if not direction:
            return
        kernels.momentum_steps(
            [params[name] for name in direction],
            [velocity[name] for name in direction],
            list(direction.values()),
            scale=scale,
            rate=rate,
            momentum=self.phase.momentum,
            weight_decay=weight_decay,
            active=active,
        )


def descend(
    params: Tensors,
    velocity: Tensors,
    direction: Tensors,
    phase: Phase,
    active: Tensor | None,
) -> None:
    """Take one step of SGD with momentum, in place; a client that is not active stays as it is."""
    keep: Tensor | float = phase.momentum
    if active is not None:
        keep = torch.full_like(active, phase.momentum).masked_fill_(active == 0, 1.0)
    for name, value in direction.items():
        if active is not None:  # not times 0: what comes of an empty batch need not be a number
            value = value.masked_fill(per_client(active == 0, value), 0)
        velocity[name].mul_(_spread(keep, value)).add_(value)
        if active is None:
            params[name].add_(velocity[name], alpha=-phase.lr)
        else:
            params[name].sub_(velocity[name] * _spread(phase.lr * active, value))


def place(params: Tensors, values: Tensors, active: Tensor | None) -> None:
    """Put values in place; a client that is not active stays as it is."""
    for name, value in values.items():
        if active is not None:
            value = torch.where(per_client(active == 0, params[name]), params[name], value)
        params[name].copy_(value)


def norms(gradient: Tensors, axes: int) -> Tensor:
    """Return the norm over all tensors: one number, or one per client."""
    each = [
        torch.linalg.vector_norm(value, dim=tuple(range(axes, value.dim()))) if value.dim() > axes else value.abs()
        for value in gradient.values()
    ]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(each), dim=0)
    return norm


def scaled(gradient: Tensors, factor: Tensor | None) -> Tensors:
    """Return a gradient times a factor, each client's its own."""
    if factor is None:
        return gradient
    return {name: value * _spread(factor, value) for name, value in gradient.items()}


def decayed(gradient: Tensors, params: Tensors, weight_decay: float) -> Tensors:
    """Return a gradient with weight decay: after clipping, as it is in torch's SGD."""
    if not weight_decay:
        return gradient
    return {name: value + weight_decay * params[name] for name, value in gradient.items()}


def _spread(factor: Tensor | float, like: Tensor) -> Tensor | float:
    """Give one number per client the shape to multiply that client's tensor with."""
    return factor if isinstance(factor, float) else per_client(factor.to(like.dtype), like)
