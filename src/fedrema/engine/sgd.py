"""Steps of SGD for one client, or for all stacked clients at once: both backends use the same code.

Tensors have a leading client axis if the losses have one; otherwise they belong to a single client.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedrema.core import Batch, Client, LocalTraining, Loss, Method, Move, Phase, gradient_step
from fedrema.core.aggregation import per_client
from fedrema.engine import kernels
from fedrema.engine.private_steps import SampleGradients, SampleNoise
from fedrema.errors import BadInput
from fedrema.models.body_and_head import Net, Tensors


@dataclass
class LossMean:
    """Running mean of the training loss; it stays on the device, so that no step waits for it."""

    total: Tensor
    steps: Tensor

    def add(self, value: Tensor, active: Tensor | None) -> None:
        """Add the loss of one step."""
        self.total += value if active is None else value.masked_fill(active == 0, 0)
        self.steps += 1 if active is None else active

    def mean(self) -> Tensor:
        """Return the mean per client; 0 without a step."""
        return self.total / self.steps.clamp(min=1)


class PhaseSGD:
    """SGD with momentum in one phase of local training: created once, then called with the batches of each step."""

    def __init__(
        self,
        method: Method,
        phase: Phase,
        local: LocalTraining,
        names: Iterable[str],
        value_of: Callable[[Loss, Client, Batch], Tensor],
        axes: int,
        fused: bool = False,
        net: Net | None = None,
        noise: SampleNoise | None = None,
        of_samples: SampleGradients | None = None,
    ) -> None:
        """Select the loss and the parameters of a phase.

        Parameters
        ----------
        method, phase, local
            The method, the phase and the settings of local training.
        names
            All parameters that the method ever trains.
        value_of
            Computes the loss: one number, or one per client. Clients are independent, so the gradient of the sum of
            their losses is the gradient of each.
        axes
            1 if tensors have a leading client axis, else 0.
        fused
            Whether to use the GPU kernels for norms and steps of stacked clients.
        net
            The network, which tells copies of parameters from others; each model's gradient is clipped separately.
        noise, of_samples
            With differential privacy for samples: clipping and noise, and the function that computes their gradients.
        """
        self.noise, self.of_samples = noise, of_samples
        self.phase, self.local, self.value_of, self.axes, self.fused = phase, local, value_of, axes, fused
        self.loss: Loss = phase.loss or method.loss
        self.names = tuple(name for name in names if phase.trains(name))
        self.models = {name: "" if net is None else method.clip_group(net, name) for name in self.names}

    def begin(self, velocity: Tensors) -> None:
        """Set the momentum of what the phase trains to zero, in place, if the phase asks for it."""
        if self.phase.reset_momentum:
            for name in self.names:
                if name in velocity:
                    velocity[name].zero_()

    def step(
        self,
        client: Client,
        velocity: Tensors,
        losses: LossMean,
        batches: tuple[Batch, ...],
        active: Tensor | None,
        rate: Tensor | None = None,
    ) -> None:
        """Take one step; `client.params`, `velocity` and `losses` are changed in place.

        `rate` is the phase's learning rate as a tensor, for captured steps: the rate may change between replays.
        """
        loss_added = False

        def private_gradient(at: Client, batch: Batch) -> Tensors:
            nonlocal loss_added
            assert self.noise is not None
            assert self.of_samples is not None
            if loss_added:
                raise BadInput(
                    "--dp sample needs a method that computes one gradient per step, but this one uses more."
                )
            gradients, values = self.of_samples(self.loss, at, batch, self.names)
            values = values.detach().masked_fill(batch.mask == 0, 0)
            losses.add(values.sum(-1) / batch.mask.sum(-1).clamp(min=1), active)
            loss_added = True
            return self.noise.private_gradient(gradients, batch, at.count.clamp(max=self.local.batch), self.axes)

        def raw_gradient(at: Client, batch: Batch) -> Tensors:
            nonlocal loss_added
            if self.noise is not None:
                return private_gradient(at, batch) if self.names else {}
            leaves = {name: at.params[name].detach().requires_grad_() for name in self.names}
            with torch.enable_grad():
                value = self.value_of(self.loss, at.having(params={**at.params, **leaves}), batch)
                found = torch.autograd.grad(value.sum(), list(leaves.values()), materialize_grads=True)
            if not loss_added:  # of several losses in a step, only the first is comparable between methods
                losses.add(value.detach(), active)
                loss_added = True
            return dict(zip(self.names, found, strict=True))

        def gradient(at: Client, batch: Batch) -> Tensors:
            clipped: Tensors = {}
            for model in self._models(raw_gradient(at, batch)):
                clipped |= scaled(model, self._clip_factor(model))
            return with_weight_decay(clipped, at.params, self.local.weight_decay)

        if self.fused and rate is not None and self.phase.step is gradient_step:
            # Clipping, weight decay, momentum and the step in one pass over memory.
            decay = self.local.weight_decay
            for model in self._models(raw_gradient(client, batches[0])):
                self._fused_step(client.params, velocity, model, self._clip_factor(model), decay, rate, active)
            return
        wanted = self.phase.step(gradient, client, batches)
        move = wanted if isinstance(wanted, Move) else Move(along=wanted)
        if self.fused and rate is not None:
            self._fused_step(client.params, velocity, move.along, None, 0.0, rate, active)
        else:
            momentum_step(client.params, velocity, move.along, self.phase, active)
        overwrite(client.params, move.put, active)

    def _models(self, gradient: Tensors) -> list[Tensors]:
        """Return the gradient of each model that the phase trains."""
        models: dict[str, Tensors] = {}
        for name, value in gradient.items():
            models.setdefault(self.models[name], {})[name] = value
        return list(models.values())

    def _clip_factor(self, gradient: Tensors) -> Tensor | None:
        if not self.local.clip or not gradient:
            return None
        norm = kernels.client_norms(list(gradient.values())) if self.fused else gradient_norms(gradient, self.axes)
        return (self.local.clip / (norm + 1e-6)).clamp(max=1)

    def _fused_step(
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


def momentum_step(
    params: Tensors,
    velocity: Tensors,
    direction: Tensors,
    phase: Phase,
    active: Tensor | None,
) -> None:
    """Take one step of SGD with momentum, in place; clients that are not active do not change."""
    keep: Tensor | float = phase.momentum
    if active is not None:
        keep = torch.full_like(active, phase.momentum).masked_fill_(active == 0, 1.0)
    for name, value in direction.items():
        if active is not None:  # not multiplied by 0: the gradient of an empty batch may be NaN
            value = value.masked_fill(per_client(active == 0, value), 0)
        if name in velocity:  # others have no momentum in any phase
            value = velocity[name].mul_(_broadcast(keep, value)).add_(value)
        if active is None:
            params[name].add_(value, alpha=-phase.lr)
        else:
            params[name].sub_(value * _broadcast(phase.lr * active, value))


def overwrite(params: Tensors, values: Tensors, active: Tensor | None) -> None:
    """Overwrite parameters; those of clients that are not active do not change."""
    for name, value in values.items():
        if active is not None:
            value = torch.where(per_client(active == 0, params[name]), params[name], value)
        params[name].copy_(value)


def gradient_norms(gradient: Tensors, axes: int) -> Tensor:
    """Return the norm over all tensors: one number, or one per client."""
    each = [
        torch.linalg.vector_norm(value, dim=tuple(range(axes, value.dim()))) if value.dim() > axes else value.abs()
        for value in gradient.values()
    ]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(each), dim=0)
    return norm


def scaled(gradient: Tensors, factor: Tensor | None) -> Tensors:
    """Return a gradient times a factor, one number or one per client."""
    if factor is None:
        return gradient
    return {name: value * _broadcast(factor, value) for name, value in gradient.items()}


def with_weight_decay(gradient: Tensors, params: Tensors, weight_decay: float) -> Tensors:
    """Return a gradient plus weight decay, which is added after clipping as in torch's SGD."""
    if not weight_decay:
        return gradient
    return {name: value + weight_decay * params[name] for name, value in gradient.items()}


def _broadcast(factor: Tensor | float, like: Tensor) -> Tensor | float:
    """Reshape one number per client so that it multiplies that client's tensor."""
    return factor if isinstance(factor, float) else per_client(factor.to(like.dtype), like)
