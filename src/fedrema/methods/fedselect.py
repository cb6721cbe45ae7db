"""FedSelect: each client selects, during training, which of its parameters are personal."""

import math
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
    Phase,
    Reports,
    State,
    Trace,
    Uploads,
)
from fedrema.errors import BadInput, at_least
from fedrema.methods.shared.second_models import copied, copy_of, network_tensors
from fedrema.models.body_and_head import Net, Tensors


@dataclass(frozen=True)
class FedSelect(Method):
    """Every client has a mask m_k over the entries of its weights: 1 is personal, 0 is shared; initially all are 0.

    An epoch is one pass that updates the personal entries and one pass that updates the shared ones, by plain SGD
    without momentum. Selections take place after round `select_every` + 1 and every `select_every` rounds from then on:
    in each weight tensor, the quarter of the shared entries that have changed most since the last selection become
    personal, unless more than 80 % of the tensor already are. Biases stay shared, and so do entries that have not
    changed. The server averages every entry over the clients that share it, Σ_k n_k (1 − m_k) w_k / Σ_k n_k (1 − m_k);
    entries that have just become personal receive one last average. Clients are evaluated with their models after local
    training.

    Clients send the shared entries and the mask, and receive the averages. In the authors' default run of four rounds,
    the only selection happens in the last round and has no effect.
    """

    name: ClassVar[str] = "fedselect"
    title: ClassVar[str] = "FedSelect"
    paper: ClassVar[str] = (
        "Tamirisa et al., FedSelect: Personalized Federated Learning with Customized Selection of Parameters for"
        " Fine-Tuning, CVPR 2024"
    )
    revision: ClassVar[int] = 2
    reports: ClassVar[Reports] = Reports(
        colour="#000000",
        stroke="-.",
        traces=(
            Trace(
                "personal_share",
                "personal parameters",
                percent=True,
                description="Mean share of the parameters that clients keep personal.",
            ),
        ),
    )

    select_every: int = 3
    """Rounds between selections (authors: 3)."""
    select_share: float = 0.25
    """Share of the remaining shared entries that a selection makes personal (authors: 0.25)."""
    most_personal: float = 0.8
    """No further selection in a tensor of which more than this share is personal (authors: 0.8)."""

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(1, self, "select_every")
        for name in ("select_share", "most_personal"):
            if not 0 <= getattr(self, name) <= 1:
                raise BadInput(f"--{name.replace('_', '-')} must be in [0, 1], got {getattr(self, name)}.")

    def trains(self, net: Net, name: str) -> bool:
        """Exclude the masks."""
        return name in net.trainable

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Initialise the masks with 0; `sharing`, which is sent, is 1 − m_k."""
        zeros = {name: value.new_zeros(value.shape) for name, value in client.params.items()}
        ones = {name: value.new_ones(value.shape) for name, value in client.params.items()}
        models = {**copied(client.params, "own"), **copied(client.params, "selected")}
        return client.having(
            params={**client.params, **copied(ones, "sharing")}, memory={**copied(zeros, "mask"), **models}
        )

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Insert the client's personal entries into the received model; if a selection is due, select more of them."""
        masks, own = copy_of(client.memory, "mask"), copy_of(client.memory, "own")
        model = {name: torch.where(mask > 0, own[name], client.params[name]) for name, mask in masks.items()}
        memory = client.memory
        if moment.round > 2 and (moment.round - 2) % self.select_every == 0:  # the authors count rounds from 0
            selected = copy_of(client.memory, "selected")
            masks = {
                name: self.selection(mask, (own[name] - selected[name]).abs())
                if mask.dim() > 1 and name in net.trainable
                else mask
                for name, mask in masks.items()
            }
            memory = {**memory, **copied(masks, "mask"), **copied(own, "selected")}
        return client.having(params={**client.params, **model}, memory=memory)

    def selection(self, mask: Tensor, change: Tensor) -> Tensor:
        """Add the n − round((1 − share) n) most changed of the n shared entries to a mask."""
        shared = (mask == 0).sum()
        selected_count = shared - torch.round((1 - self.select_share) * shared.double()).long()  # rounds half to even
        ranked = torch.where(mask == 0, change, -1.0).flatten().sort(descending=True).values
        threshold = ranked[(selected_count - 1).clamp(min=0)]
        # A client that has not trained since the last selection has no changes to rank.
        chosen = (mask == 0) & (change >= threshold) & (change > 0) & (selected_count > 0)
        is_full = mask.mean() > self.most_personal
        return torch.where(chosen & ~is_full, 1.0, mask)

    def phases(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """Plan E times a pass for the personal and one for the shared entries; before any selection, shared only."""
        rate = local.rate(moment)
        shared = Phase(1, rate, momentum=0.0, step=self.shared_step)
        personal = Phase(1, rate, momentum=0.0, step=self.personal_step)
        if moment.round <= self.select_every + 1:
            return (shared,) * local.epochs
        return (personal, shared) * local.epochs

    def personal_step(self, gradient: Gradient, client: Client, batches: tuple[Batch, ...]) -> Tensors:
        """Return m ⊙ g."""
        return {name: value * client.memory[f"mask.{name}"] for name, value in gradient(client, batches[0]).items()}

    def shared_step(self, gradient: Gradient, client: Client, batches: tuple[Batch, ...]) -> Tensors:
        """Return (1 − m) ⊙ g."""
        gradients = gradient(client, batches[0])
        return {name: value * (1 - client.memory[f"mask.{name}"]) for name, value in gradients.items()}

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Store the trained model; send the shared entries only."""
        own = network_tensors(net, client.params)
        sharing = {name: 1 - client.memory[f"mask.{name}"] for name in own}
        sent = {name: value * sharing[name] for name, value in own.items()}
        params = {**sent, **copied(sharing, "sharing")}
        return client.having(params=params, memory={**client.memory, **copied(own, "own")}), {}

    def model(self, net: Net, client: Client) -> Tensors:
        """Return the model after local training."""
        return copy_of(client.memory, "own")

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Average every entry over the clients that share it; an entry that no client shares keeps its value."""
        sharing = copy_of(uploads.mean, "sharing")
        averaged = {
            name: torch.where(weight > 0, uploads.mean[name] / weight.clamp(min=1e-12), uploads.before[name])
            for name, weight in sharing.items()
        }
        personal = 1 - sum(float(value.sum()) for value in sharing.values()) / sum(
            math.prod(value.shape) for value in sharing.values()
        )
        return Answer({**averaged, **copied(sharing, "sharing")}, state=state, trace={"personal_share": personal})
