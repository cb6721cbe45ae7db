"""FedALA: each client learns, parameter by parameter, how much of the global model to adopt."""

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
    task_loss,
)
from fedrema.errors import above_zero, at_least
from fedrema.methods.shared.second_models import copied, copy_of
from fedrema.models.body_and_head import Net, Tensors


@dataclass(frozen=True)
class FedALA(Method):
    """Before training, a client merges the received model w_g into its own last model w_k: ŵ = w_k + (w_g − w_k) ⊙ W.

    Only the last p tensors are merged; the others are taken from w_g. The weights W ∈ [0, 1] are initialised with 1,
    learnt by W ← clip[W − η ∇_ŵ F_k ⊙ (w_g − w_k)], and kept between rounds. A client learns them for several epochs
    before its first merge and for one epoch before each later one. If w_k equals w_g, as in the first round, there is
    nothing to merge. ŵ is then trained for E epochs and averaged as in FedAvg; all parameters are sent. As in the
    authors' code, clients are evaluated with ŵ merged from the new global model, for which W is learnt on a copy.

    The authors learn W on a random 80 % of the samples, the first time until its loss converges; here all samples are
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
    """p: number of tensors, counted from the output, that are merged; 2 is the last layer's weight and bias (authors:
    2)."""
    weight_lr: float = 1.0
    """η: learning rate of W (authors: 1)."""
    first_epochs: int = 10
    """Epochs of learning W before a client's first merge; before later merges it is one."""

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(1, self, "merged_tensors")
        at_least(0, self, "first_epochs")
        above_zero(self, "weight_lr")

    def role(self, net: Net, name: str) -> Role:
        """Share everything except W."""
        return Role.PRIVATE if name.startswith("weight.") else Role.SHARED

    def trains(self, net: Net, name: str) -> bool:
        """Exclude W: `weight_step` assigns it."""
        return name in net.trainable

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Initialise W = 1 and the stored copy of the client's own model."""
        trainable = [name for name in net.initial if name in net.trainable]
        top = trainable[max(0, len(trainable) - self.merged_tensors) :]
        ones = {name: client.params[name].new_ones(client.params[name].shape) for name in top}
        own = {name: client.params[name] for name in top}
        memory = {**copied(own, "own"), "merged": client.count.new_zeros(())}
        return client.having(params={**client.params, **copied(ones, "weight")}, memory=memory)

    def phases(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """Plan learning W, merging and training; the first round only trains, because there is nothing to merge."""
        training = Phase(local.epochs, local.rate(moment), local.momentum)
        if moment.round == 1:
            return (training,)
        merge = Phase(1, lr=0.0, momentum=0.0, step=self.merge_step, steps=1)
        return self._weight_phase(), merge, training

    def adapt(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """Learn W for the newly received global model."""
        return (self._weight_phase(),)

    def _weight_phase(self) -> Phase:
        return Phase(
            epochs=max(self.first_epochs, 1),
            lr=self.weight_lr,
            momentum=0.0,
            loss=self.merged_loss,
            step=self.weight_step,
            epochs_of=self.learning_epochs,
        )

    def learning_epochs(self, client: Client) -> Tensor:
        """Return the number of epochs that learn W: more before the first merge, 0 if there is nothing to merge."""
        epochs = torch.where(client.memory["merged"] > 0, 1, self.first_epochs)
        return torch.where(differs(client.params, copy_of(client.memory, "own")), epochs, 0)

    def merged_loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return F_k, differentiated with respect to the merged tensors only."""
        top = copy_of(client.memory, "own")
        params = {name: value if name in top else value.detach() for name, value in client.params.items()}
        return task_loss(net, net(params, batch.x), batch)

    def weight_step(self, gradient: Gradient, client: Client, batches: tuple[Batch, ...]) -> Move:
        """Compute W ← clip[W − η ∇_ŵ F_k ⊙ (w_g − w_k)]."""
        gradients = gradient(client.having(params={**client.params, **merged(client)}), batches[0])
        own, weights = copy_of(client.memory, "own"), copy_of(client.params, "weight")
        updated = {
            name: (weight - self.weight_lr * gradients[name] * (client.params[name] - own[name])).clamp(0, 1)
            for name, weight in weights.items()
        }
        return Move(put=copied(updated, "weight"))

    def merge_step(self, gradient: Gradient, client: Client, batches: tuple[Batch, ...]) -> Move:
        """Assign ŵ to the merged tensors."""
        return Move(put=merged(client))

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Store the trained model, and whether the client has merged."""
        before = copy_of(client.memory, "own")
        own = {name: client.params[name] for name in before}
        merged = torch.where(differs(client.received, before), 1.0, client.memory["merged"])
        return client.having(memory={**copied(own, "own"), "merged": merged}), {}

    def model(self, net: Net, client: Client) -> Tensors:
        """Return ŵ."""
        return {**client.params, **merged(client)}


def differs(params: Tensors, own: Tensors) -> Tensor:
    """Return whether the received model differs from the client's own."""
    return torch.stack([(params[name] != value).any() for name, value in own.items()]).any()


def merged(client: Client) -> Tensors:
    """Return the merged tensors of ŵ = w_k + (w_g − w_k) ⊙ W."""
    weights = copy_of(client.params, "weight")
    return {
        name: own + (client.params[name] - own) * weights[name] for name, own in copy_of(client.memory, "own").items()
    }
