"""FedClassAvg: only classifiers are averaged; features of two views of a sample agree."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedrema.core import Batch, Client, Method, Moment, Reports, Role, cross_entropy
from fedrema.errors import at_least
from fedrema.methods.shared.second_models import copied, copy_of
from fedrema.methods.shared.views import draw_views, seen
from fedrema.models.body_and_head import Net, Tensors

TEMPERATURE, BASE_TEMPERATURE = 100.0, 0.07
"""Of the contrast, as in the authors' code, where features are not brought to one length."""


@dataclass(frozen=True)
class FedClassAvg(Method):
    """Bodies stay at home, heads are averaged: CE(x₁) + ρ SupCon(x₁, x₂) + (µ/2) Σ_tensors MSE(φ, φ_received).

    x₁ and x₂ are two random views of each sample. SupCon draws together the features of all views of one class against
    those of the others: the mean over all i of −(T/0.07) · mean_{p ∈ P(i)} log[e^{h_i·h_p/T} / Σ_{a≠i} e^{h_i·h_a/T}],
    T = 100. The head is averaged by sample counts, φ ← Σ (n_k/n) φ̂_k, and alone travels. Clients are scored as the
    authors do, after local training, with their own head.

    Views are shifted, and brighter or darker, with more or less contrast; samples that are not
    images only the latter. They are drawn anew in every round (the authors train one epoch per round), by a sample's
    place among its client's. The authors train with Adam, which scales each parameter's step by itself, and with ρ = 1;
    with SGD and clipped gradients, as for all methods here, a contrast of that size (its factor T/0.07 is 1429) would
    drown the cross-entropy. They also begin with an epoch of local training that is not counted.
    """

    name: ClassVar[str] = "fedclassavg"
    title: ClassVar[str] = "FedClassAvg"
    paper: ClassVar[str] = (
        "Jang et al., FedClassAvg: Local Representation Learning for Personalized Federated Learning on"
        " Heterogeneous Neural Networks, ICPP 2022"
    )
    reports: ClassVar[Reports] = Reports(colour="#CC79A7", stroke=":")

    hold: float = 0.1
    """µ: how strongly the head is held to the received one (authors: 0.1, their code's default 0)."""
    contrast: float = 0.01
    """ρ: weight of the contrast; 0 switches it off. The authors' 1 belongs to Adam, see above."""
    shift: float = 0.07
    """Share of an image's side by which a view is shifted at most, in each direction; 2 pixels of 28 or 32."""
    jitter: float = 0.2
    """How much contrast and brightness of a view change at most."""

    def __post_init__(self) -> None:
        """Refuse settings without meaning."""
        at_least(0, self, "hold", "contrast", "shift", "jitter")

    def role(self, net: Net, name: str) -> Role:
        """Share the head only."""
        return Role.SHARED if net.in_head(name) else Role.PRIVATE

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Make room for one's own head."""
        return client.having(memory=_own(net, client))

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Draw this round's views."""
        return client.having(inbox={**client.inbox, "views": draw_views(moment, self.shift, self.jitter).to(data.x)})

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """CE(x₁) + ρ SupCon(x₁, x₂) + (µ/2) Σ_tensors MSE(φ, φ_received)."""
        first, second = (
            net.features(client.params, seen(batch.x, batch.index, client.inbox["views"][view])) for view in (0, 1)
        )
        loss = cross_entropy(net.classify(client.params, first), batch)
        if self.contrast:
            features, labels = torch.cat([first, second]), torch.cat([batch.y, batch.y])
            loss = loss + self.contrast * supervised_contrast(features, labels, torch.cat([batch.mask, batch.mask]))
        names = [name for name in net.initial if net.in_head(name) and name in net.trainable]
        apart = [(client.params[name] - client.received[name]).square().mean() for name in names]
        return loss + self.hold / 2 * torch.stack(apart).sum()

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Keep one's own head."""
        return client.having(memory=_own(net, client)), {}

    def model(self, net: Net, client: Client) -> Tensors:
        """Answer with one's own head."""
        return {**client.params, **copy_of(client.memory, "own")}


def _own(net: Net, client: Client) -> Tensors:
    return copied({name: value for name, value in client.params.items() if net.in_head(name)}, "own")


def supervised_contrast(features: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Return SupCon over features [n, d]; a view is contrasted with all others, and padding counts nowhere."""
    others = mask * (1 - torch.eye(len(labels), device=mask.device, dtype=mask.dtype))  # [n, n]
    products = features @ features.T / TEMPERATURE
    log_chance = products - torch.logsumexp(products.masked_fill(others == 0, -torch.inf), dim=1, keepdim=True)
    alike = others * (labels[:, None] == labels)
    mean = (log_chance * alike).sum(dim=1) / alike.sum(dim=1).clamp(min=1)
    return -TEMPERATURE / BASE_TEMPERATURE * (mean * mask).sum() / mask.sum().clamp(min=1)
