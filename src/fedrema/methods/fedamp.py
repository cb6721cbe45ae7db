"""FedAMP: each client receives a personal cloud model in which similar clients have larger weights."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedrema.core import (
    Answer,
    Batch,
    Client,
    Matrix,
    Method,
    Moment,
    Reports,
    Role,
    State,
    Trace,
    Uploads,
    mix,
    task_loss,
)
from fedrema.errors import BadInput, above_zero, at_least
from fedrema.methods.shared.second_models import copied, copy_of, squared_distance
from fedrema.models.body_and_head import Net, Tensors

LEAST_ALPHA = 1.0
"""Lower bound of α: in long runs a smaller α would fix every client at its cloud model."""


@dataclass(frozen=True)
class FedAMP(Method):
    """Attentive message passing: the server computes a cloud model u_k = Σ_j ξ_kj w_j for each client k.

    With distance attention (the paper's FedAMP), ξ_kj = α A′(‖w_k − w_j‖²) for j ≠ k, where A′(x) = e^{−x/σ}/σ, and
    ξ_kk is the remainder to 1; if the weights of the peers sum to more than 1, they are scaled to sum to 1. With cosine
    attention (the paper's HeurFedAMP, recommended by the authors for deep networks, and the default here), ξ_kk is
    fixed and the remainder is distributed in proportion to e^{σ cos(w_k, w_j)}. Clients start from u_k and minimise
    F_k(w) + (λ/2α) ‖w − u_k‖². They send w_k and receive u_k, and are evaluated with the w_k that they trained. α
    decreases tenfold every 30 rounds, to at least 1. A client that has not participated yet has the mean
    of the others' u_k.

    There is no official code; the defaults are those of FLGo, a public re-implementation.
    """

    name: ClassVar[str] = "fedamp"
    title: ClassVar[str] = "FedAMP"
    paper: ClassVar[str] = "Huang et al., Personalized Cross-Silo Federated Learning on Non-IID Data, AAAI 2021"
    absence_revision: ClassVar[int] = 2
    reports: ClassVar[Reports] = Reports(
        colour="#56B4E9",
        stroke=":",
        traces=(
            Trace(
                "own_weight",
                "own weight",
                percent=True,
                description="Mean weight of a client's own model in the model that it receives.",
            ),
        ),
        matrices=(
            Matrix(
                "weights",
                "Weights of models",
                "weights",
                description="Weight of the column's client in the model that the row's client receives.",
            ),
        ),
    )

    attention: Literal["cosine", "distance"] = "cosine"
    """Similarity of two clients: the cosine between their models (HeurFedAMP) or their distance (FedAMP)."""
    sigma: float = 25.0
    """σ: sharpness of the cosine weights, or width of the distance weights (then of the order of squared distances)."""
    own_weight: float = 0.0
    """ξ_kk with cosine attention; 0: 1 divided by the number of clients."""
    step: float = 1e4
    """α: initial step size of message passing."""
    step_decay: float = 0.1
    """Factor by which α changes every 30 rounds."""
    tie: float = 1.0
    """λ: the model is regularised towards u_k with strength λ/2α."""

    def __post_init__(self) -> None:
        """Validate the settings."""
        above_zero(self, "sigma", "step")
        at_least(0, self, "tie")
        if not 0 <= self.own_weight <= 1:
            raise BadInput(f"--own-weight must be in [0, 1], got {self.own_weight}.")
        if not 0 < self.step_decay <= 1:
            raise BadInput(f"--step-decay must be in (0, 1], got {self.step_decay}.")

    def alpha(self, moment: Moment) -> float:
        """Return α of a round."""
        return max(self.step * self.step_decay ** ((moment.round - 1) // 30), min(self.step, LEAST_ALPHA))

    def role(self, net: Net, name: str) -> Role:
        """Send every parameter; each client receives its own copy."""
        return Role.PERSONAL

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Store w_k."""
        return client.having(memory=copied(client.params, "own"))

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Compute λ/2α."""
        strength = self.tie / (2 * self.alpha(moment))
        return client.having(inbox={**client.inbox, "strength": client.count.new_full((), strength)})

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return F_k(w) + (λ/2α) ‖w − u_k‖²."""
        distance = squared_distance(net, client.params, client.received)
        return task_loss(net, net(client.params, batch.x), batch) + client.inbox["strength"] * distance

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Store the trained w_k."""
        return client.having(memory=copied(client.params, "own")), {}

    def model(self, net: Net, client: Client) -> Tensors:
        """Return w_k."""
        return copy_of(client.memory, "own")

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Compute u_k for every client."""
        models = {name: uploads.params[name] for name in net.initial if name in net.trainable}
        weights = self.weights(models, self.alpha(moment)).to(uploads.counts)
        trace = {"own_weight": weights.diagonal().mean(), "weights": weights}
        return Answer(shared={}, personal=mix(uploads.params, weights), state=state, trace=trace)

    def weights(self, models: Tensors, alpha: float) -> Tensor:
        """Return the attention weights ξ [k, k]."""
        # Double precision: the squared norms of two similar large models nearly cancel.
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
