"""Predictions of several clients next to their targets: what metrics are computed from."""

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from fedrema.tasks.task import Task


@dataclass(frozen=True)
class Predictions:
    """Outputs of k clients' networks on n samples each, with targets; padding is masked."""

    task: Task
    outputs: Tensor
    """[k, n, outputs]"""
    target: Tensor
    """[k, n], or [k, n, L] for labels"""
    mask: Tensor
    """[k, n] whether there is a sample"""

    @cached_property
    def predicted(self) -> Tensor:
        """Predicted classes, levels, labels or quantities; same shape as `target`."""
        return self.task.predict(self.outputs)

    @cached_property
    def probabilities(self) -> Tensor:
        """[k, n, C] probabilities of classes, levels or labels."""
        found = self.task.probabilities(self.outputs)
        assert found is not None, self.task.name
        return found[..., : self.task.classes]  # a network can have outputs for classes that do not occur

    @cached_property
    def counts(self) -> Tensor:
        """[k] numbers of samples."""
        return self.mask.sum(1).to(self.outputs.dtype)

    def mean(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum over samples of values [k, n], and the number of samples: [k] each."""
        return torch.where(self.mask, values, 0).sum(1).to(self.outputs.dtype), self.counts

    def with_halves(self) -> "Predictions":
        """Return 3 · k clients: each one with the first half of its samples, with the second half, and with all.

        Every second sample makes a fair half, because samples are in random order. Metrics are computed for all three
        at once, because most of their time is the overhead of many small operations.
        """
        is_first = torch.arange(self.mask.shape[1], device=self.mask.device) % 2 == 0
        masks = torch.cat([self.mask & is_first, self.mask & ~is_first, self.mask])
        outputs, target = (each.repeat(3, *[1] * (each.dim() - 1)) for each in (self.outputs, self.target))
        return replace(self, outputs=outputs, target=target, mask=masks)
