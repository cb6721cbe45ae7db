"""FedALA: each client learns how much of the global model to take in, entry by entry."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedrema.core import (
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
    cross_entropy,
)
from fedrema.errors import above_zero, at_least
from fedrema.methods.shared.second_models import copied, copy_of
from fedrema.models.body_and_head import Net, Tensors


@dataclass(frozen=True)
class FedALA(Method):
    """Before a client trains, it merges the received model w_g into its own last model w_k: ŵ = w_k + (w_g − w_k) ⊙ W.

    Only the top tensors are merged; the lower ones are taken over from w_g. The weights W ∈ [0, 1], at first 1, are
    learnt by W ← clip[W − η ∇_ŵ F_k ⊙ (w_g − w_k)] and kept from round to round: several epochs the first time that a
    client merges, one epoch from then on. Where w_k is w_g there is nothing to merge, as in the first round. Then ŵ is
    trained for E epochs and averaged as in FedAvg; all parameters travel. Clients are scored as the authors do, with ŵ
    merged from the new global model, for which W is learnt on a copy.

    The authors learn W on a random 80 % of the samples until its loss settles the first time; here all samples are
    used, for a fixed number of epochs. ∇_ŵ is clipped to `--clip`, like every gradient.
    """

    name: ClassVar[str] = "fedala"
    title: ClassVar[str] = "FedALA"
    paper: ClassVar[str] = (
        "Zhang et al., FedALA: Adaptive Local Aggregation for Personalized Federated Learning, AAAI 2023"
    )
    revision: ClassVar[int] = 2
    reports: ClassVar[Reports] = Reports(colour="#000000", stroke="--")

    merged_tensors: int = 2
    """p: how many tensors, from the top, are merged; 2 is the last layer's weight and bias (authors: 2)."""
    weight_lr: float = 1.0
    """η: learning rate of W (authors: 1)."""
    first_epochs: int = 10
    """Epochs that learn W when a client merges for the first time; later it is one."""

    def __post_init__(self) -> None:
        """Refuse settings without meaning."""
        at_least(1, self, "merged_tensors")
        at_least(0, self, "first_epochs")
        above_zero(self, "weight_lr")

    def role(self, net: Net, name: str) -> Role:
        """Share everything but W."""
        return Role.PRIVATE if name.startswith("weight.") else Role.SHARED

    def trains(self, net: Net, name: str) -> bool:
        """Leave W out: it is put in place."""
        return name in net.trainable

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Add W = 1, and make room for one's own last model."""
        trainable = [name for name in net.initial if name in net.trainable]
        top = trainable[max(0, len(trainable) - self.merged_tensors) :]
        ones = {name: client.params[name].new_ones(client.params[name].shape) for name in top}
        own = {name: client.params[name] for name in top}
        memory = {**copied(own, "own"), "merged": client.count.new_zeros(())}
        return client.having(params={**client.params, **copied(ones, "weight")}, memory=memory)

    def phases(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """Learn W, merge, train; in the first round there is nothing to merge yet."""
        training = Phase(local.epochs, local.rate(moment), local.momentum)
        if moment.round == 1:
            return (training,)
        merge = Phase(1, lr=0.0, momentum=0.0, step=self.merge_step, steps=1)
        return self._learning(), merge, training

    def adapt(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """Learn W for the model that has just come."""
        return (self._learning(),)

    def _learning(self) -> Phase:
        return Phase(
            epochs=max(self.first_epochs, 1),
            lr=self.weight_lr,
            momentum=0.0,
            loss=self.merged_loss,
            step=self.weight_step,
            epochs_of=self.learning_epochs,
        )

    def learning_epochs(self, client: Client) -> Tensor:
        """Return how many epochs learn W: several before the first merge, none where there is nothing to merge."""
        epochs = torch.where(client.memory["merged"] > 0, 1, self.first_epochs)
        return torch.where(differs(client.params, copy_of(client.memory, "own")), epochs, 0)

    def merged_loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """F_k, differentiated in the top tensors only."""
        top = copy_of(client.memory, "own")
        params = {name: value if name in top else value.detach() for name, value in client.params.items()}
        return cross_entropy(net(params, batch.x), batch)

    def weight_step(self, gradient: Gradient, client: Client, batches: tuple[Batch, ...]) -> Move:
        """W ← clip[W − η ∇_ŵ F_k ⊙ (w_g − w_k)]."""
        slopes = gradient(client.having(params={**client.params, **merged(client)}), batches[0])
        own, weights = copy_of(client.memory, "own"), copy_of(client.params, "weight")
        found = {
            name: (weight - self.weight_lr * slopes[name] * (client.params[name] - own[name])).clamp(0, 1)
            for name, weight in weights.items()
        }
        return Move(put=copied(found, "weight"))

    def merge_step(self, gradient: Gradient, client: Client, batches: tuple[Batch, ...]) -> Move:
        """Begin with ŵ."""
        return Move(put=merged(client))

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Keep one's own trained model, and whether it has merged."""
        before = copy_of(client.memory, "own")
        own = {name: client.params[name] for name in before}
        merged = torch.where(differs(client.received, before), 1.0, client.memory["merged"])
        return client.having(memory={**copied(own, "own"), "merged": merged}), {}

    def model(self, net: Net, client: Client) -> Tensors:
        """Answer with ŵ."""
        return {**client.params, **merged(client)}


def differs(params: Tensors, own: Tensors) -> Tensor:
    """Tell whether a received model differs from one's own."""
    return torch.stack([(params[name] != value).any() for name, value in own.items()]).any()


def merged(client: Client) -> Tensors:
    """Return the top tensors of ŵ = w_k + (w_g − w_k) ⊙ W."""
    weights = copy_of(client.params, "weight")
    return {
        name: own + (client.params[name] - own) * weights[name] for name, own in copy_of(client.memory, "own").items()
    }
