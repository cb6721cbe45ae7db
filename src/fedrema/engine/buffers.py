"""The tensors of a cohort that trains stacked, and the steps of SGD on them."""

import torch
from torch import Tensor

from fedrema.core import Batch
from fedrema.engine.cohort import Cohort
from fedrema.engine.sgd import LossMean, PhaseSGD
from fedrema.models.body_and_head import Tensors

GROUPS = ("received", "memory", "inbox")


class StaticBuffers:
    """A cohort's tensors at memory addresses that stay the same from round to round, as CUDA graphs require."""

    def __init__(self, cohort: Cohort, params: Tensors, velocity: Tensors) -> None:
        self.client = cohort.all().having(params=params)
        self.velocity = velocity
        self.losses = LossMean(torch.zeros_like(cohort.counts), torch.zeros_like(cohort.counts))
        self.rows = cohort.clients.to(cohort.counts.device)
        self.rate = torch.zeros((), device=cohort.counts.device)

    @classmethod
    def for_training(cls, cohort: Cohort) -> "StaticBuffers":
        """Return buffers in which every client has a copy of all parameters and of its momentum."""
        params = {name: channels_last(value) for name, value in cohort.params.copied(len(cohort)).items()}
        return cls(cohort, params, {name: channels_last(value.clone()) for name, value in cohort.velocity.items()})

    @classmethod
    def for_predictions(cls, cohort: Cohort) -> "StaticBuffers":
        """Return buffers of predictions and hooks, whose parameters do not change; common parameters are held once."""
        return cls(cohort, {name: value.clone() for name, value in cohort.params.merged().items()}, {})

    def copied(self) -> "StaticBuffers":
        """Copy the tensors that are still the cohort's, so that later cohorts can be loaded into these buffers."""
        client = self.client
        groups = {group: {name: value.clone() for name, value in getattr(client, group).items()} for group in GROUPS}
        self.client = client.having(**groups, count=client.count.clone())
        return self

    def load(self, cohort: Cohort, velocity: Tensors) -> None:
        """Copy another cohort of the same shape into the buffers."""
        client, new = self.client, cohort.all()
        pairs = [(self.velocity[name], value) for name, value in velocity.items()]
        for group in GROUPS:
            held = getattr(client, group)
            pairs += [(held[name], value) for name, value in getattr(new, group).items()]
        for name, value in cohort.params.merged().items():
            # In training buffers, common parameters are copied to every client.
            pairs.append((client.params[name], value.expand(client.params[name].shape)))
        if pairs:
            torch._foreach_copy_([target for target, _ in pairs], [value for _, value in pairs])
        client.count.copy_(new.count)
        self.rows.copy_(cohort.clients, non_blocking=True)
        self.losses.total.zero_()
        self.losses.steps.zero_()

    def set_rate(self, rate: float) -> None:
        """Set the learning rate."""
        self.rate.fill_(rate)

    def step(self, sgd: PhaseSGD, batches: tuple[Batch, ...], active: Tensor | None) -> None:
        """Take one step of SGD in place."""
        sgd.step(self.client, self.velocity, self.losses, batches, active, self.rate)

    def result(self, copy: bool) -> tuple[Tensors, Tensors, Tensor]:
        """Return parameters, momentum and mean losses."""
        if not copy:
            return self.client.params, self.velocity, self.losses.mean()
        params, velocity = (
            {name: value.clone(memory_format=torch.contiguous_format) for name, value in group.items()}
            for group in (self.client.params, self.velocity)
        )
        return params, velocity, self.losses.mean()


def channels_last(value: Tensor) -> Tensor:
    """Return convolution weights [k, O, I, h, w] on a GPU with their input channels last, as our kernels read them."""
    if value.dim() != 5 or not value.is_cuda:
        return value
    return value.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
