"""Other ways of finding peers, and of weighing them."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fedrema.core import Batch, Client, Moment, State, Uploads
from fedrema.core.similarity import head_similarity, maximum_difference_segmentation
from fedrema.methods.shared.prototypes import class_means
from fedrema.models.body_and_head import Net, Tensors

from .base import Candidate, Matched, alike_in_learning, by_spread


@dataclass(frozen=True)
class Updates(Candidate):
    """Peers by what heads learned: cosines between their differences to the mean head, instead of probes."""

    name: ClassVar[str] = "updates"
    title: ClassVar[str] = "peers by updates"

    def similarity(self, net: Net, heads: Tensors, uploads: Uploads, moment: Moment) -> Tensor:
        """Return cosines between heads, less their mean."""
        return alike_in_learning(heads)


@dataclass(frozen=True)
class Prototypes(Candidate):
    """Peers by cosines between class prototypes, each times the share of its class, instead of probes."""

    name: ClassVar[str] = "prototypes"
    title: ClassVar[str] = "peers by prototypes"

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Send p_c µ_c."""
        means, counts = class_means(net.features(client.params, data.x), data, net.classes)
        return client, {"weighted": means * (counts / client.count)[:, None]}

    def similarity(self, net: Net, heads: Tensors, uploads: Uploads, moment: Moment) -> Tensor:
        """Return cosines between what was sent."""
        rows = functional.normalize(uploads.extras["weighted"].flatten(1), dim=1)
        return rows @ rows.T


@dataclass(frozen=True)
class PrototypeProbes(Candidate):
    """The probes are the mean features of the classes, instead of random numbers."""

    name: ClassVar[str] = "prototype-probes"
    title: ClassVar[str] = "prototypes as probes"

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Send sums and numbers of the classes' features."""
        means, counts = class_means(net.features(client.params, data.x), data, net.classes)
        return client, {"sums": means * counts[:, None], "held": counts}

    def similarity(self, net: Net, heads: Tensors, uploads: Uploads, moment: Moment) -> Tensor:
        """Return how alike heads answer the prototypes."""
        held = uploads.extras["held"].sum(dim=0).clamp(min=1)
        probes = uploads.extras["sums"].sum(dim=0) / held[:, None]
        return head_similarity(net, heads, probes[None], self.temperature)


@dataclass(frozen=True)
class Significant(Candidate):
    """Nobody is cut off unless the largest gap among peers is wider than those of exchangeable clients."""

    name: ClassVar[str] = "significant"
    title: ClassVar[str] = "significant gap"
    probes: int = 32
    level: float = 0.05
    """How often exchangeable clients, of normal similarities, are cut all the same."""

    def widest_by_chance(self, peers: int) -> float:
        """Return the quantile of the largest gap, in deviations, of independent normal numbers."""
        draws = torch.randn(4000, peers, generator=torch.Generator().manual_seed(peers), dtype=torch.float64)
        gaps = draws.sort(dim=1).values.diff(dim=1).max(dim=1).values / draws.std(dim=1)
        return float(gaps.quantile(1 - self.level))

    def _relevant(self, net: Net, heads: Tensors, uploads: Uploads, moment: Moment) -> tuple[Tensor, Tensor]:
        rows = self.similarity(net, heads, uploads, moment)
        relevant, gaps = maximum_difference_segmentation(rows, gap_to_self=False)
        if len(rows) < 4:
            return relevant, gaps
        itself = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
        _, spread = by_spread(rows, itself)
        significant = gaps / spread[:, 0] > self.widest_by_chance(len(rows) - 1)
        return relevant | ~significant[:, None], gaps


@dataclass(frozen=True)
class Soft(Significant):
    """Every peer counts by e^{z/τ}, z being how many deviations it is more alike than the usual peer."""

    name: ClassVar[str] = "soft"
    title: ClassVar[str] = "soft weights"
    softness: float = 0.5
    """τ."""

    def match(self, net: Net, state: State, heads: Tensors, uploads: Uploads, moment: Moment) -> Matched:
        """Weigh in every round."""
        rows = self.similarity(net, heads, uploads, moment)
        itself = torch.eye(len(rows), dtype=torch.bool, device=rows.device)
        mean, spread = by_spread(rows, itself)
        z = ((rows - mean) / spread).masked_fill(itself, -torch.inf)
        z = torch.where(itself, z.max(dim=1, keepdim=True).values, z)  # oneself counts as one's nearest peer
        return torch.softmax(z / self.softness, dim=1) * uploads.counts, state, {}
