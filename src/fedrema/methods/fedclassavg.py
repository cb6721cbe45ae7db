"""FedClassAvg: only classifiers are averaged; a contrastive loss aligns the features of two views of a sample."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedrema.core import Batch, Client, Method, Moment, Reports, Role, task_loss
from fedrema.errors import at_least
from fedrema.methods.shared.second_models import copied, copy_of
from fedrema.methods.shared.views import apply_views, draw_views
from fedrema.models.body_and_head import Net, Tensors
from fedrema.tasks import Task

TEMPERATURE, BASE_TEMPERATURE = 100.0, 0.07
"""Temperatures of the contrastive loss in the authors' code, which does not normalise the features."""


@dataclass(frozen=True)
class FedClassAvg(Method):
    """Bodies are private, heads are averaged: CE(x₁) + ρ SupCon(x₁, x₂) + (µ/2) Σ_tensors MSE(φ, φ_received).

    x₁ and x₂ are two random views of each sample. SupCon attracts the features of all views of one class and repels
    those of other classes: the mean over all i of −(T/0.07) · mean_{p ∈ P(i)} log[e^{h_i·h_p/T} / Σ_{a≠i}
    e^{h_i·h_a/T}], T = 100. The head is averaged by sample counts, φ ← Σ (n_k/n) φ̂_k, and is the only part that is
    sent. As in the authors' code, clients are evaluated after local training, with their own head.

    A view of an image is shifted and has a random brightness and contrast; other samples only have the latter. The
    views of a sample are drawn once per round, from the sample's position among its client's samples (the authors train
    one epoch per round). The authors train with Adam, which scales the step of each parameter separately, and with ρ =
    1. With SGD and clipped gradients, as for all methods here, a contrastive loss of that size (its factor T/0.07 is
    1429) would dominate the cross-entropy. The authors also start with an uncounted epoch of local training.
    """

    name: ClassVar[str] = "fedclassavg"
    title: ClassVar[str] = "FedClassAvg"
    paper: ClassVar[str] = (
        "Jang et al., FedClassAvg: Local Representation Learning for Personalized Federated Learning on"
        " Heterogeneous Neural Networks, ICPP 2022"
    )
    reports: ClassVar[Reports] = Reports(colour="#CC79A7", stroke=":")

    hold: float = 0.1
    """µ: strength of the regularisation of the head towards the received one (authors: 0.1; their code's default:
    0)."""
    contrast: float = 0.01
    """ρ: weight of the contrastive loss; 0 disables it. The authors' value 1 is for Adam, see above."""
    shift: float = 0.07
    """Largest shift of a view in each direction, as a share of the image side; 2 pixels of 28 or 32."""
    jitter: float = 0.2
    """Largest change of a view's contrast and brightness."""

    def needs_head(self) -> bool:
        return True

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(0, self, "hold", "contrast", "shift", "jitter")

    def supports(self, task: Task) -> bool:
        """Support classes only: the contrastive loss compares samples of equal and different classes."""
        return task.has_softmax

    def role(self, net: Net, name: str) -> Role:
        """Share the head only."""
        return Role.SHARED if net.in_head(name) else Role.PRIVATE

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Store the client's head."""
        return client.having(memory=_stored_head(net, client))

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Draw the views of this round."""
        return client.having(inbox={**client.inbox, "views": draw_views(moment, self.shift, self.jitter).to(data.x)})

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return CE(x₁) + ρ SupCon(x₁, x₂) + (µ/2) Σ_tensors MSE(φ, φ_received)."""
        first, second = (
            net.features(client.params, apply_views(batch.x, batch.index, client.inbox["views"][view]))
            for view in (0, 1)
        )
        loss = task_loss(net, net.classify(client.params, first), batch)
        if self.contrast:
            features, labels = torch.cat([first, second]), torch.cat([batch.y, batch.y])
            loss = loss + self.contrast * supervised_contrastive_loss(
                features, labels, torch.cat([batch.mask, batch.mask])
            )
        names = [name for name in net.initial if net.in_head(name) and name in net.trainable]
        differences = [(client.params[name] - client.received[name]).square().mean() for name in names]
        return loss + self.hold / 2 * torch.stack(differences).sum()

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Store the trained head."""
        return client.having(memory=_stored_head(net, client)), {}

    def model(self, net: Net, client: Client) -> Tensors:
        """Return the model with the client's own head."""
        return {**client.params, **copy_of(client.memory, "own")}


def _stored_head(net: Net, client: Client) -> Tensors:
    return copied({name: value for name, value in client.params.items() if net.in_head(name)}, "own")


def supervised_contrastive_loss(features: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Return SupCon over features [n, d]: each view against all other views; padding is ignored."""
    others = mask * (1 - torch.eye(len(labels), device=mask.device, dtype=mask.dtype))  # [n, n]
    products = features @ features.T / TEMPERATURE
    log_probability = products - torch.logsumexp(products.masked_fill(others == 0, -torch.inf), dim=1, keepdim=True)
    same_class = others * (labels[:, None] == labels)
    mean = (log_probability * same_class).sum(dim=1) / same_class.sum(dim=1).clamp(min=1)
    return -TEMPERATURE / BASE_TEMPERATURE * (mean * mask).sum() / mask.sum().clamp(min=1)
