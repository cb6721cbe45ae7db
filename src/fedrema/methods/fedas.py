"""FedAS: the received body is first aligned with the client's own; well-trained clients count more in the average."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedrema.core import (
    Answer,
    Batch,
    Client,
    Gradient,
    LocalTraining,
    Method,
    Moment,
    Move,
    Phase,
    Reports,
    Role,
    State,
    Trace,
    Uploads,
    average,
)
from fedrema.errors import above_zero, at_least
from fedrema.methods.shared.prototypes import class_means, class_membership
from fedrema.methods.shared.second_models import copied, copy_of, network_tensors
from fedrema.models.body_and_head import Net, Tensors
from fedrema.tasks import Task


@dataclass(frozen=True)
class FisherStep:
    """Adds ‖∇ F_b‖² to F_k. Steps with the same weight decay are equal, as joint training and CUDA graphs require."""

    decay: float
    """The gradient includes weight decay, which is not part of F_b."""

    def __call__(self, gradient: Gradient, client: Client, batches: tuple[Batch, ...]) -> Move:
        """Return the new F_k."""
        total = client.params["fisher"]
        for name, value in gradient(client, batches[0]).items():
            squares = (value - self.decay * client.params[name]).square()
            total = total + squares.reshape(*total.shape, -1).sum(dim=-1)
        return Move(put={"fisher": total})


@dataclass(frozen=True)
class AlignmentStep:
    """Plain SGD with a learning rate of its own, as the authors' separate optimiser.

    It assigns the values: a `Phase` without momentum would overwrite the momentum of local training.
    """

    lr: float
    decay: float
    """The gradient includes weight decay, which is not part of the alignment."""

    def __call__(self, gradient: Gradient, client: Client, batches: tuple[Batch, ...]) -> Move:
        """Return the new body."""
        params = client.params
        slopes = gradient(client, batches[0])
        return Move(
            put={name: params[name] - self.lr * (slope - self.decay * params[name]) for name, slope in slopes.items()}
        )


@dataclass(frozen=True)
class FedAS(Method):
    """The head is private, and the body is averaged by Fisher information: θ ← Σ F_k θ̂_k / Σ F_k.

    A client first aligns the received body with its own last body: for one epoch of plain SGD it minimises Σ_c
    mean_{y=c} (1/d)‖h − µ_kc‖², where µ_kc is the mean feature of class c under its own body, and the sum is over the
    classes of a batch. It then trains body and head for E epochs. F_k = Σ_b ‖∇ F_b‖², computed in one more epoch, is
    the trace of the Fisher information of the trained model, estimated from the loss F_b of each batch b. The authors
    use it to give less weight to clients that have rarely trained. As in their code, clients are evaluated with their
    own model after local training.

    In the authors' code, clients align the server's model itself one after the other, so that each one receives what
    the clients before it have changed; here, every client aligns its own copy. ∇ F_b is clipped to `--clip`, and layers
    such as dropout and batch norm work as in training; the authors evaluate them as in prediction.
    """

    name: ClassVar[str] = "fedas"
    title: ClassVar[str] = "FedAS"
    paper: ClassVar[str] = "Yang et al., FedAS: Bridging Inconsistency in Personalized Federated Learning, CVPR 2024"
    revision: ClassVar[int] = 2
    reports: ClassVar[Reports] = Reports(
        colour="#117733",
        traces=(
            Trace(
                "fisher_shares",
                "weight in the average",
                per_client=True,
                percent=True,
                description="Weight of each client's body in the average: its share of the Fisher information.",
            ),
        ),
    )

    align_epochs: int = 1
    """Epochs of alignment before local training (authors: 1); 0 disables alignment."""
    align_lr: float = 0.01
    """Learning rate of the alignment, not affected by --schedule (authors: 0.01)."""

    def needs_head(self) -> bool:
        return True

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(0, self, "align_epochs")
        above_zero(self, "align_lr")

    def supports(self, task: Task) -> bool:
        """Support classes only: features are aligned by class."""
        return task.has_softmax

    def role(self, net: Net, name: str) -> Role:
        """Send the body; the server weighs each client's."""
        return Role.PRIVATE if net.in_head(name) or name == "fisher" else Role.COLLECTED

    def trains(self, net: Net, name: str) -> bool:
        """Exclude F_k: `FisherStep` assigns it."""
        return name in net.trainable

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Store the client's own model, and initialise F_k."""
        own = copied(client.params, "own")
        return client.having(params={**client.params, "fisher": client.count.new_zeros(())}, memory=own)

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Compute µ_k with the client's own body, and set F_k = 0."""
        own = copy_of(client.memory, "own")
        means, _ = class_means(net.features(own, data.x), data, net.classes)
        params = {**client.params, "fisher": torch.zeros_like(client.params["fisher"])}
        return client.having(params=params, inbox={**client.inbox, "means": means})

    def phases(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """Align the body, train everything, and compute F_k."""
        align = AlignmentStep(self.align_lr, local.weight_decay)
        return (
            Phase(self.align_epochs, 0.0, 0.0, trains=Net.in_body, loss=self.alignment_loss, step=align),
            Phase(local.epochs, local.rate(moment), local.momentum),
            Phase(1, lr=0.0, momentum=0.0, step=FisherStep(local.weight_decay)),
        )

    def alignment_loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return Σ_c mean_{y=c} (1/d)‖h − µ_kc‖² over the classes of a batch."""
        features = net.features(client.params, batch.x)
        distances = (features - client.inbox["means"][batch.y]).square().mean(dim=1)
        member = class_membership(batch, net.classes, distances.dtype)
        return (member.T @ distances / member.sum(dim=0).clamp(min=1)).sum()

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Store the trained model, and send F_k."""
        own = copied(network_tensors(net, client.params), "own")
        return client.having(memory=own), {"fisher": client.params["fisher"]}

    def model(self, net: Net, client: Client) -> Tensors:
        """Return the client's own model after local training."""
        return copy_of(client.memory, "own")

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Average the bodies by F_k; if all are 0, by sample counts."""
        fisher = uploads.extras["fisher"].clamp(min=0)
        weights = torch.where(fisher.sum() > 0, fisher, uploads.counts.to(fisher))
        shares = weights / weights.sum()
        return Answer(average(uploads.params, shares), state=state, trace={"fisher_shares": shares})
