"""FedAMP: every client gets a cloud model in which similar clients weigh more."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedrema.core import Answer, Batch, Client, Method, Moment, Reports, Role, State, Uploads, cross_entropy, mix
from fedrema.errors import BadInput, above_zero, at_least
from fedrema.methods.shared.second_models import copied, copy_of, squared_distance
from fedrema.models.body_and_head import Net, Tensors

LEAST_ALPHA = 1.0
"""α falls no further: in long runs a smaller one would freeze every client at its cloud model."""


@dataclass(frozen=True)
class FedAMP(Method):
    """Attentive message passing: the server makes for client k the model u_k = Σ_j ξ_kj w_j out of everybody's.

    By distance (the paper's FedAMP), ξ_kj = α A′(‖w_k − w_j‖²) for j ≠ k with A′(x) = e^{−x/σ}/σ, and ξ_kk is the rest
    to 1; where peers' weights would sum to more than 1, they are scaled down to 1. By cosine (its HeurFedAMP, which the
    authors advise for deep networks, and the default), ξ_kk is fixed and the rest is shared out in proportion to
    e^{σ cos(w_k, w_j)}. Clients begin with u_k and minimise F_k(w) + (λ/2α) ‖w − u_k‖². Up goes w_k, down comes u_k.
    Clients are scored with the w_k they trained. α falls tenfold every 30 rounds, to no less than 1.

    There is no official code: the defaults are those of FLGo, a public re-implementation.
    """

    name: ClassVar[str] = "fedamp"
    title: ClassVar[str] = "FedAMP"
    paper: ClassVar[str] = "Huang et al., Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI 2021"
    reports: ClassVar[Reports] = Reports(colour="#56B4E9", stroke=":")

    attention: Literal["cosine", "distance"] = "cosine"
    """What makes clients similar: the angle between their models (HeurFedAMP) or their distance (FedAMP)."""
    sigma: float = 25.0
    """σ: sharpness of the cosines' weights, or width of the distances' (then as large as squared distances are)."""
    own_weight: float = 0.0
    """ξ_kk with cosines; 0: one in as many as there are clients."""
    step: float = 1e4
    """α: step of message passing, at first."""
    step_decay: float = 0.1
    """Factor of α every 30 rounds."""
    tie: float = 1.0
    """λ: clients are held to u_k with strength λ/2α."""

    def __post_init__(self) -> None:
        """Refuse settings without meaning."""
        above_zero(self, "sigma", "step")
        at_least(0, self, "tie")
        if not 0 <= self.own_weight <= 1:
            raise BadInput(f"--own-weight must lie in [0, 1], got {self.own_weight}.")
        if not 0 < self.step_decay <= 1:
            raise BadInput(f"--step-decay must lie in (0, 1], got {self.step_decay}.")

    def alpha(self, moment: Moment) -> float:
        """Return α in a round."""
        return max(self.step * self.step_decay ** ((moment.round - 1) // 30), min(self.step, LEAST_ALPHA))

    def role(self, net: Net, name: str) -> Role:
        """Everything travels and comes back as one's own."""
        return Role.PERSONAL

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Make room for w_k."""
        return client.having(memory=copied(client.params, "own"))

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Compute λ/2α."""
        strength = self.tie / (2 * self.alpha(moment))
        return client.having(inbox={**client.inbox, "strength": client.count.new_full((), strength)})

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """F_k(w) + (λ/2α) ‖w − u_k‖²."""
        distance = squared_distance(net, client.params, client.received)
        return cross_entropy(net(client.params, batch.x), batch) + client.inbox["strength"] * distance

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Keep w_k."""
        return client.having(memory=copied(client.params, "own")), {}

    def model(self, net: Net, client: Client) -> Tensors:
        """Answer with w_k."""
        return copy_of(client.memory, "own")

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Make u_k for everyone."""
        models = {name: uploads.params[name] for name in net.initial if name in net.trainable}
        weights = self.weights(models, self.alpha(moment)).to(uploads.counts)
        trace = {"own_weight": weights.diagonal().mean(), "weights": weights}
        return Answer(shared={}, personal=mix(uploads.params, weights), state=state, trace=trace)

    def weights(self, models: Tensors, alpha: float) -> Tensor:
        """Return ξ [k, k]."""
        # In double precision: the squares of large models nearly cancel where two are alike.
        rows = torch.cat([value.flatten(1).double() for value in models.values()], dim=1)
        gram = rows @ rows.T
        squares = gram.diagonal()
        if self.attention == "cosine":
            lengths = squares.sqrt().clamp(min=1e-30)
            peers = torch.exp(self.sigma * (gram / (lengths[:, None] * lengths) - 1))
            peers.fill_diagonal_(0)
            total = 1 - (self.own_weight or 1 / len(gram))
            peers = total * peers / peers.sum(dim=1, keepdim=True).clamp(min=1e-300)
        else:
            distances = (squares[:, None] + squares - 2 * gram).clamp(min=0)
            peers = alpha / self.sigma * torch.exp(-distances / self.sigma)
            peers.fill_diagonal_(0)
            peers = peers / peers.sum(dim=1, keepdim=True).clamp(min=1)
        return peers + torch.diag(1 - peers.sum(dim=1))
