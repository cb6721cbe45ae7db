"""kNN-Per: FedAvg, whose predictions are mixed with those of the nearest of a client's own samples."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedrema.core import Alternative, Batch, Client, Method, Moment, Reports, task_loss
from fedrema.errors import BadInput, above_zero, at_least
from fedrema.methods.shared.prototypes import class_membership
from fedrema.models.body_and_head import Net
from fedrema.tasks import Task

SHARES = 11
"""Number of candidate values of λ: 0, 0.1, …, 1 (authors)."""
STORED = ("stored_features", "stored_classes")
"""What a client keeps of each sample: features [d], and a row [C] that is 1 at its class, or 0 for padding."""


@dataclass(frozen=True)
class KNNPer(Method):
    """Personalisation through local memorisation: p_k(y) = λ_k p_near(y) + (1 − λ_k) p_w(y), with FedAvg's model w.

    p_w is the softmax output of w. p_near is the weighted share of class y among the m nearest of the client's own
    training samples: Σ_i e^{−‖h − h_i‖²/(d s)} 1[y_i = y] / Σ_i e^{−‖h − h_i‖²/(d s)} over these neighbours i, where h
    are the features that w computes, and d is their number. Only w is trained and sent, exactly as in FedAvg; the
    features of a client's samples are computed when a model is received, and stay on the client.

    By default, λ is the same for all clients (`--share`), as in the authors' evaluation, which tries 0, 0.1, …, 1 on
    test samples. In the paper, each client chooses its λ_k: with `--held-out`, a share of its samples is excluded from
    training, and λ_k is the value in this list that minimises their cross-entropy. This needs clients with many
    samples. The accuracy of w alone is recorded too.

    The paper weighs neighbours by e^{−distance}; the squared distance divided by d s is that of the authors' code. The
    exported model of a client contains the features and classes of its training samples.
    """

    name: ClassVar[str] = "knn-per"
    title: ClassVar[str] = "kNN-Per"
    paper: ClassVar[str] = "Marfoq et al., Personalized Federated Learning through Local Memorization, ICML 2022"
    reports: ClassVar[Reports] = Reports(
        colour="#882255", stroke="--", alternatives=(Alternative("global", "global model"),)
    )

    neighbours: int = 10
    """m: number of nearest own samples that vote (authors: 10)."""
    kernel_width: float = 1.0
    """s: width of the kernel, relative to the number of features (authors: 1)."""
    share: float = 0.5
    """λ: weight of the neighbours' votes, for clients that hold out no samples."""
    held_out: float = 0.0
    """Share of a client's samples that is excluded from training to choose λ_k; 0: none, λ is `--share`."""
    predict_by: Literal["mixture", "global"] = "mixture"
    """Predict with the mixture or with the global model."""

    def needs_head(self) -> bool:
        return True

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(1, self, "neighbours")
        above_zero(self, "kernel_width")
        if not 0 <= self.held_out <= 0.5:
            raise BadInput(f"--held-out must be in [0, 0.5], got {self.held_out}.")
        if not 0 <= self.share <= 1:
            raise BadInput(f"--share must be in [0, 1], got {self.share}.")

    def supports(self, task: Task) -> bool:
        """Support classes only: neighbours vote for their class."""
        return task.has_softmax

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return the loss of FedAvg without the held-out samples."""
        batch = replace(batch, mask=batch.mask * (1 - self.is_held_out(batch)))
        return task_loss(net, net(client.params, batch.x), batch)

    def ready(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Compute the features of all samples, and λ_k."""
        if self.predict_by == "global":
            return client
        features = net.features(client.params, data.x)
        classes = class_membership(data, net.classes, features.dtype)
        share = client.count.new_full((), self.share)
        if self.held_out:
            held = data.mask * self.is_held_out(data)
            near = self.neighbour_votes(features, features, classes * (1 - held)[:, None])
            shares = torch.linspace(0, 1, SHARES).to(near)
            probabilities = mixed(shares[:, None, None], near, net.classify(client.params, features).softmax(dim=1))
            losses = -torch.einsum("snc,nc->s", probabilities.log(), classes * held[:, None])
            share = torch.where(held.sum() > 0, shares[losses.argmin()], share)
        kept = dict(zip(STORED, (features, classes), strict=True))
        return client.having(inbox={**client.inbox, **kept, "share": share})

    def predict(self, net: Net, client: Client, x: Tensor) -> Tensor:
        """Return log p_k; without stored samples, the outputs of the global model."""
        features = net.features(client.params, x)
        outputs = net.classify(client.params, features)
        if self.predict_by == "global" or "share" not in client.inbox:
            return outputs
        near = self.neighbour_votes(features, *(client.inbox[name] for name in STORED))
        return mixed(client.inbox["share"], near, outputs.softmax(dim=1)).log()

    def beside(self) -> Mapping[str, Method]:
        """Also record the accuracy of the global model."""
        return {} if self.predict_by == "global" else {"global": replace(self, predict_by="global")}

    def neighbour_votes(self, features: Tensor, stored: Tensor, classes: Tensor) -> Tensor:
        """Return p_near [n, C] of features [n, d], from stored features [m, d] and classes [m, C]."""
        squares = (features.square().sum(dim=1)[:, None] + stored.square().sum(dim=1)).clamp(min=0)
        distances = (squares - 2 * features @ stored.T).clamp(min=0)
        distances = torch.where(classes.sum(dim=1) > 0, distances, torch.inf)
        nearest, places = distances.topk(min(self.neighbours, len(stored)), dim=1, largest=False)
        similarities = -nearest / (features.shape[1] * self.kernel_width)
        # If no sample is stored, all similarities are −inf, and nobody votes.
        weights = torch.where(similarities.isfinite(), similarities.softmax(dim=1), 0.0)
        return torch.einsum("nk,nkc->nc", weights, classes[places])

    def is_held_out(self, batch: Batch) -> Tensor:
        """Return 1 for held-out samples, else 0: with 0.2, every fifth sample of a client."""
        if not self.held_out:
            return torch.zeros_like(batch.mask)
        every = round(1 / self.held_out)
        return (batch.index % every == every - 1).to(batch.mask)


def mixed(share: Tensor, near: Tensor, probabilities: Tensor) -> Tensor:
    """Return λ p_near + (1 − λ) p_w, kept above 0 so that its logarithm is finite."""
    return (share * near + (1 - share) * probabilities).clamp(min=torch.finfo(near.dtype).tiny)
