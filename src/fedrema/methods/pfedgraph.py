"""pFedGraph: each client receives a mean of models, with weights from a collaboration graph."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedrema.core import (
    Answer,
    Batch,
    Client,
    LocalTraining,
    Matrix,
    Method,
    Moment,
    Phase,
    Reports,
    Role,
    State,
    Trace,
    Uploads,
    mix,
    task_loss,
)
from fedrema.core.aggregation import per_client
from fedrema.errors import BadInput, above_zero
from fedrema.methods.shared.second_models import copied, copy_of
from fedrema.methods.shared.simplex import project_onto_simplex
from fedrema.models.body_and_head import Net, Tensors

ALIKE = 0.9
"""A larger cosine counts as 1, as in the authors' code."""


@dataclass(frozen=True)
class PFedGraph(Method):
    """The server infers which clients should collaborate: client k receives u_k = Σ_j w_kj θ̂_j.

    The weights minimise Σ_j w_j d_kj + α ‖w − p‖² subject to Σ w = 1, w ≥ 0. p holds the clients' shares of the
    samples, and d_kj = −cos(θ̂_k − θ_0, θ̂_j − θ_0) compares how far the models have moved from the initial model θ_0.
    The solution is the projection of p − d_k/2α onto the simplex. From the second round on, clients minimise F_k(θ) − λ
    cos(θ, u_k), starting from u_k. They send θ̂_k, receive u_k, and are evaluated with u_k. The accuracy directly after
    local training, of which the authors report the better one, is recorded too.

    The authors' code contains two versions of the second term: cos(θ, u_k), the default here, and Σ_j w_kj cos(θ, θ̂_j)
    (`--pull-to models`), for which the server sends Σ_j w_kj θ̂_j/‖θ̂_j‖ in addition; a client that participates for the
    first time is compared with the model that it receives. In both versions, their code adds
    λ cos to the loss instead of subtracting it, which moves models away from each other; `--pull -0.01` does the same.
    The authors reset the momentum in every round: `--no-keep-momentum`.
    """

    name: ClassVar[str] = "pfedgraph"
    title: ClassVar[str] = "pFedGraph"
    paper: ClassVar[str] = "Ye et al., Personalized Federated Learning with Inferred Collaboration Graphs, ICML 2023"
    revision: ClassVar[int] = 2
    reports: ClassVar[Reports] = Reports(
        colour="#882255",
        traces=(
            Trace(
                "own_weight",
                "own weight",
                percent=True,
                description="Mean weight of a client's own model in the model that it receives.",
            ),
            Trace(
                "set_sizes",
                "number of peers",
                per_client=True,
                description="From how many clients each one learns, itself included: those with a weight above 0.",
            ),
        ),
        matrices=(
            Matrix(
                "weights",
                "Collaboration graph",
                "weights",
                description="Weight of the column's client in the model that the row's client receives.",
            ),
        ),
    )

    spread: float = 0.8
    """α: how strongly the weights are kept close to the shares of samples (authors: 0.8); a large value gives
    FedAvg."""
    pull: float = 0.01
    """λ: strength with which a model is pulled towards the received one (authors: 0.01, with the opposite sign in their
    code); 0 disables it."""
    pull_to: Literal["aggregate", "models"] = "aggregate"
    """Compare a model with the received mean of models, or with each of these models."""

    def __post_init__(self) -> None:
        """Validate the settings."""
        above_zero(self, "spread")
        if not abs(self.pull) < torch.inf:
            raise BadInput(f"--pull must be a finite number, got {self.pull}.")

    def role(self, net: Net, name: str) -> Role:
        """Send every parameter; each client receives its own copy."""
        return Role.PERSONAL

    def phases(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """Plan E epochs; in the first round, no model has been aggregated yet."""
        loss = super().loss if moment.round == 1 else None
        return (Phase(local.epochs, local.rate(moment), local.momentum, loss=loss),)

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Compute u_k/‖u_k‖, unless the server has sent Σ_j w_kj θ̂_j/‖θ̂_j‖; a client's first one is zeros."""
        length = inner_product(net, client.params, client.params).sqrt().clamp(min=1e-30)
        reference = {name: client.params[name] / length for name in net.initial if name in net.trainable}
        if self.pull_to == "models" and (sent := copy_of(client.inbox, "reference")):
            is_sent = inner_product(net, sent, sent) > 0
            reference = {name: torch.where(is_sent, sent[name], value) for name, value in reference.items()}
        return client.having(inbox={**client.inbox, **copied(reference, "reference")})

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return F_k(θ) − λ cos(θ, u_k), or F_k(θ) − λ Σ_j w_kj cos(θ, θ̂_j)."""
        length = inner_product(net, client.params, client.params).sqrt().clamp(min=1e-30)
        cosine = inner_product(net, client.params, copy_of(client.inbox, "reference")) / length
        return task_loss(net, net(client.params, batch.x), batch) - self.pull * cosine

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Infer the graph, and compute u_k for every client."""
        models = {name: uploads.params[name] for name in net.initial if name in net.trainable}
        weights = self.weights(models, net.initial, uploads.counts).to(uploads.counts)
        personal = mix(uploads.params, weights)
        if self.pull_to == "models":
            lengths = _rows(models).norm(dim=1).clamp(min=1e-30)
            scaled = {name: value / per_client(lengths.to(value), value) for name, value in models.items()}
            personal |= copied(mix(scaled, weights), "reference")
        trace = {"own_weight": weights.diagonal().mean(), "set_sizes": (weights > 0).sum(dim=1), "weights": weights}
        return Answer(shared={}, personal=personal, state=state, trace=trace)

    def weights(self, models: Tensors, initial: Tensors, counts: Tensor) -> Tensor:
        """Return the weights w [k, k] in float64."""
        moved = _rows({name: value - initial[name].to(value) for name, value in models.items()})
        lengths = moved.norm(dim=1).clamp(min=1e-30)
        cosines = (moved @ moved.T) / (lengths[:, None] * lengths)
        cosines = torch.where(cosines > ALIKE, 1.0, cosines)
        share = counts.double() / counts.double().sum()
        return project_onto_simplex(share + cosines / (2 * self.spread))


def inner_product(net: Net, first: Tensors, second: Tensors) -> Tensor:
    """Return ⟨v, w⟩ over the network's trainable tensors."""
    products = [(first[name] * second[name]).sum() for name in net.initial if name in net.trainable]
    return sum(products[1:], start=products[0])


def _rows(models: Tensors) -> Tensor:
    """Return one row of float64 numbers per client."""
    return torch.cat([value.flatten(1).double() for value in models.values()], dim=1)
