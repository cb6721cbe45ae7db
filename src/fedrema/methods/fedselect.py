"""FedSelect: which entries are personal is found out while training."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedrema.core import Answer, Batch, Client, Gradient, LocalTraining, Method, Moment, Phase, Reports, State, Uploads
from fedrema.errors import BadInput, at_least
from fedrema.methods.shared.second_models import copied, copy_of, model_of
from fedrema.models.body_and_head import Net, Tensors


@dataclass(frozen=True)
class FedSelect(Method):
    """Every client has a mask m_k over all entries of its weights: 1 is personal, 0 is shared; at first all are shared.

    An epoch is one pass that updates the personal entries and one that updates the shared ones, by plain SGD without
    momentum. After round `select_every` + 1, and every `select_every` rounds from then on, in each weight tensor, the
    quarter of the shared entries that have changed most since the last selection become personal, unless more than
    80 % of the tensor already are; biases stay shared, and so does what has not changed at all. The server averages
    every entry over those who share it, Σ_k n_k (1 − m_k) w_k / Σ_k n_k (1 − m_k), and entries that have just become
    personal receive one last average. Clients are scored with their models after local training.

    The shared entries and the mask travel up, the averages down; the authors' default run of four rounds makes its
    only selection in the last of them, where it is never used.
    """

    name: ClassVar[str] = "fedselect"
    title: ClassVar[str] = "FedSelect"
    paper: ClassVar[str] = (
        "Tamirisa et al., FedSelect: Personalized Federated Learning with Customized Selection of Parameters for"
        " Fine-Tuning, CVPR 2024"
    )
    revision: ClassVar[int] = 2
    reports: ClassVar[Reports] = Reports(colour="#000000", stroke="-.")

    select_every: int = 3
    """Rounds between selections (authors: 3)."""
    select_share: float = 0.25
    """Share of the still shared entries that a selection makes personal (authors: 0.25)."""
    most_personal: float = 0.8
    """Tensors of which more than this share is personal are left alone (authors: 0.8)."""

    def __post_init__(self) -> None:
        """Refuse settings without meaning."""
        at_least(1, self, "select_every")
        for name in ("select_share", "most_personal"):
            if not 0 <= getattr(self, name) <= 1:
                raise BadInput(f"--{name.replace('_', '-')} must lie in [0, 1], got {getattr(self, name)}.")

    def trains(self, net: Net, name: str) -> bool:
        """Leave masks out."""
        return name in net.trainable

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Add masks of zeros; `sharing` travels and is 1 − m_k."""
        zeros = {name: value.new_zeros(value.shape) for name, value in client.params.items()}
        ones = {name: value.new_ones(value.shape) for name, value in client.params.items()}
        models = {**copied(client.params, "own"), **copied(client.params, "selected")}
        return client.having(
            params={**client.params, **copied(ones, "sharing")}, memory={**copied(zeros, "mask"), **models}
        )

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Put one's own entries into the received model; when it is due, select more of them."""
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
        """Return a mask with the most changed of the n shared entries added: n − round((1 − share) n) of them."""
        shared = (mask == 0).sum()
        wanted = shared - torch.round((1 - self.select_share) * shared.double()).long()  # halves to even numbers
        ranked = torch.where(mask == 0, change, -1.0).flatten().sort(descending=True).values
        least = ranked[(wanted - 1).clamp(min=0)]
        # A client that has not trained since the last selection has nothing to choose by.
        chosen = (mask == 0) & (change >= least) & (change > 0) & (wanted > 0)
        full = mask.mean() > self.most_personal
        return torch.where(chosen & ~full, 1.0, mask)

    def phases(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """E times a pass for the personal entries and one for the shared; before the first selection all are shared."""
        rate = local.rate(moment)
        shared = Phase(1, rate, momentum=0.0, step=self.shared_step)
        personal = Phase(1, rate, momentum=0.0, step=self.personal_step)
        if moment.round <= self.select_every + 1:
            return (shared,) * local.epochs
        return (personal, shared) * local.epochs

    def personal_step(self, gradient: Gradient, client: Client, batches: tuple[Batch, ...]) -> Tensors:
        """Descend along m ⊙ g."""
        return {name: value * client.memory[f"mask.{name}"] for name, value in gradient(client, batches[0]).items()}

    def shared_step(self, gradient: Gradient, client: Client, batches: tuple[Batch, ...]) -> Tensors:
        """Descend along (1 − m) ⊙ g."""
        slopes = gradient(client, batches[0])
        return {name: value * (1 - client.memory[f"mask.{name}"]) for name, value in slopes.items()}

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Keep one's own model; send the shared entries only."""
        own = model_of(net, client.params)
        sharing = {name: 1 - client.memory[f"mask.{name}"] for name in own}
        sent = {name: value * sharing[name] for name, value in own.items()}
        params = {**sent, **copied(sharing, "sharing")}
        return client.having(params=params, memory={**client.memory, **copied(own, "own")}), {}

    def model(self, net: Net, client: Client) -> Tensors:
        """Answer with the model as it was trained here."""
        return copy_of(client.memory, "own")

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Average every entry over those who share it; one that nobody shares stays as it was."""
        sharing = copy_of(uploads.mean, "sharing")
        averaged = {
            name: torch.where(weight > 0, uploads.mean[name] / weight.clamp(min=1e-12), uploads.before[name])
            for name, weight in sharing.items()
        }
        personal = 1 - sum(float(value.sum()) for value in sharing.values()) / sum(
            math.prod(value.shape) for value in sharing.values()
        )
        return Answer({**averaged, **copied(sharing, "sharing")}, state=state, trace={"personal_share": personal})
