"""What the candidates share: their base class, a small network, and similarities."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedrema.core import Moment, State, Uploads
from fedrema.core.similarity import draw_probes, head_similarity, maximum_difference_segmentation
from fedrema.methods.fedrema import FedReMa
from fedrema.models.body_and_head import Net, Tensors

OURS = "a candidate of docs/beyond.md"
Matched = tuple[Tensor, State, dict[str, object]]


def small_network(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return a network that a CPU trains in seconds, on images of half the size; its head has two layers."""
    body = nn.Sequential(
        nn.AvgPool2d(2),
        nn.Conv2d(shape[0], 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
    )  # fmt: skip
    features = 32 * (shape[1] // 8) * (shape[2] // 8)
    return nn.Sequential(OrderedDict(body=body, head=nn.Sequential(nn.Linear(features, 64), nn.Linear(64, classes))))


def among_everyone(uploads: Uploads) -> Tensor:
    """Return the weights [k, k] with which everyone gets the global head."""
    return uploads.counts.expand(len(uploads.clients), -1)


def by_spread(rows: Tensor, itself: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the deviation [k, 1] of each row's similarities to others."""
    others = rows.masked_fill(itself, 0)
    count = rows.shape[1] - 1
    mean = others.sum(dim=1, keepdim=True) / count
    square = ((rows - mean).square().masked_fill(itself, 0)).sum(dim=1, keepdim=True) / max(count - 1, 1)
    return mean, square.sqrt().clamp(min=1e-12)


def alike_in_learning(params: Tensors) -> Tensor:
    """Return the cosines [k, k] between clients' parameters, less their mean."""
    flat = torch.cat([value.flatten(1) for value in params.values()], dim=1)
    moved = functional.normalize(flat - flat.mean(dim=0), dim=1)
    return moved @ moved.T


@dataclass(frozen=True)
class Candidate(FedReMa):
    """FedReMa, of which a variant may change how similarities are found."""

    paper: ClassVar[str] = OURS

    def similarity(self, net: Net, heads: Tensors, uploads: Uploads, moment: Moment) -> Tensor:
        """Return S [k, k]."""
        return head_similarity(net, heads, draw_probes(net, moment, self.probes, self.probe_high), self.temperature)

    def _relevant(self, net: Net, heads: Tensors, uploads: Uploads, moment: Moment) -> tuple[Tensor, Tensor]:
        rows = self.similarity(net, heads, uploads, moment)
        return maximum_difference_segmentation(rows, self.gap_to_self, self.include_below_gap)
