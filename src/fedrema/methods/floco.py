"""Floco: the last layer is a simplex of weights, in which every client has its own region."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedrema.core import (
    Alternative,
    Answer,
    Batch,
    Client,
    LocalTraining,
    Method,
    Moment,
    Phase,
    Reports,
    Role,
    State,
    Trace,
    Uploads,
    average,
    task_loss,
)
from fedrema.errors import BadInput, at_least
from fedrema.methods.shared.initial_models import initial_model
from fedrema.methods.shared.second_models import copied, copy_of, network_tensors
from fedrema.methods.shared.simplex import project_onto_simplex
from fedrema.models.body_and_head import Net, Tensors, last_layer

DRAWS = 997
"""Number of points drawn per round; a batch uses one of them, chosen by its key."""
SCALES = 1000
"""Number of scales among which `project_clients` chooses."""
CLOSEST = 1e-4
"""Smaller distances between clients count as this one."""


@dataclass(frozen=True)
class Floco(Method):
    """Federated learning over connected modes: the last layer's weight is Σ_m α_m φ_m, a point of a simplex.

    All clients train the same M endpoints φ_m. In every step the point α is drawn: uniformly from the simplex in the
    first part of training, and then, uniformly in direction and radius, from the ball ‖α − c_k‖₁ ≤ ρ around the
    client's own point c_k. The server computes these points once, in round τ, from the changes of the endpoints that
    the clients have sent: it reduces them to M principal components and projects these onto a simplex, scaled such that
    the clients are spread as evenly as possible (the smallest Riesz energy Σ 1/‖c_k − c_j‖²). Bodies, endpoints and
    biases are averaged as in FedAvg. Clients are evaluated at c_k; before round τ, at the centre of the
    simplex. The accuracy of the global model, at the centre, is recorded too.

    Floco+ (`--tie 1`) also trains a personal copy v_k of all parameters to minimise F_k(v) + (λ/2) ‖v − w_g‖², like
    Ditto, with which clients are then evaluated.

    The authors ask all clients to train in round τ; here, a client that is absent receives its point when it next
    participates, from the same components and scale; until then it trains and predicts like a client without a point.
    With fewer clients than endpoints, there are fewer components. As in the authors' code, the points drawn around c_k
    are not restricted to the simplex: weights may be negative, and their sum is in [1 − ρ, 1 + ρ].
    """

    name: ClassVar[str] = "floco"
    title: ClassVar[str] = "Floco"
    paper: ClassVar[str] = "Grinwald et al., Federated Learning over Connected Modes, NeurIPS 2024"
    revision: ClassVar[int] = 2
    reports: ClassVar[Reports] = Reports(
        colour="#999933",
        alternatives=(Alternative("global", "global model"),),
        traces=(
            Trace(
                "spread",
                "distance of clients",
                description="Mean distance between the points of two clients in the simplex; 0 before they have one.",
            ),
        ),
    )

    endpoints: int = 10
    """M: number of endpoints of the simplex (authors: 10)."""
    radius: float = 0.3
    """ρ: radius of a client's region (authors: 0.3 with a Dirichlet partition, 0.1 with groups of classes)."""
    first_stage: float = 0.5
    """Part of the rounds after which clients receive their points: τ is the last of these rounds (authors: 0.5)."""
    tie: float = 0.0
    """λ: strength with which a personal model is regularised towards the global one; 0: no personal models (authors:
    0 for Floco, 1 for Floco+)."""
    predict_by: Literal["own", "global"] = "own"
    """Predict at the client's own point, with its personal model if it has one, or with the global model at the centre
    of the simplex."""

    def needs_head(self) -> bool:
        return True

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(2, self, "endpoints")
        at_least(0, self, "radius", "tie")
        if not 0 <= self.first_stage <= 1:
            raise BadInput(f"--first-stage must be in [0, 1], got {self.first_stage}.")

    def called(self) -> str:
        """Return Floco+ if there are personal models."""
        return "Floco+" if self.tie else self.title

    def role(self, net: Net, name: str) -> Role:
        """Send everything except personal models; of the endpoints, the server gets each client's."""
        if name.startswith("personal."):
            return Role.PRIVATE
        return Role.COLLECTED if name in ("endpoints", last_layer(net)[0]) else Role.SHARED

    def clip_group(self, net: Net, name: str) -> str:
        """Clip a phase by one norm: the endpoints belong to the model that the phase trains."""
        return ""

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Add the endpoints from the second on [M − 1, C, d], and the personal model; the network has the first."""
        weight, _ = last_layer(net)
        others = [initial_model(net, number, moment, client.params)[weight] for number in range(1, self.endpoints)]
        params = {"endpoints": torch.stack(others), **client.params}
        return client.having(params={**params, **copied(params, "personal")} if self.tie else params)

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Draw the points of this round."""
        generator = moment.generator("points")
        drawn = torch.empty(DRAWS, self.endpoints, dtype=torch.float64).exponential_(generator=generator)
        points = (drawn / drawn.sum(dim=1, keepdim=True)).to(client.count)
        if (centre := client.inbox.get("centre")) is not None:
            generator = moment.generator("points")
            drawn = 2 * torch.rand(DRAWS, self.endpoints, generator=generator, dtype=torch.float64) - 1
            lengths = self.radius * torch.rand(DRAWS, 1, generator=generator, dtype=torch.float64)
            offsets = lengths * drawn / drawn.abs().sum(dim=1, keepdim=True)
            points = torch.where(_is_point(centre), centre + offsets.to(client.count), points)
        return client.having(inbox={**client.inbox, "points": points})

    def phases(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """Plan E epochs of the global model and, if there is one, of the personal model."""
        plan = (local.epochs, local.rate(moment), local.momentum)
        phases = Phase(*plan, trains=_is_global), Phase(*plan, trains=_is_personal, loss=self.personal_loss)
        return phases if self.tie else phases[:1]

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return F_k at a point of the simplex."""
        point = client.inbox["points"][0 if batch.key is None else batch.key % DRAWS]
        return task_loss(net, net(at_point(net, client.params, point), batch.x), batch)

    def personal_loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return F_k(v) + (λ/2) ‖v − w_g‖²."""
        own = copy_of(client.params, "personal")
        names = [name for name in own if name in net.trainable or name == "endpoints"]
        distance = torch.stack([(own[name] - client.received[name]).square().sum() for name in names]).sum()
        return self.loss(net, client.having(params=own), batch) + self.tie / 2 * distance

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Send the client's point, so that the server need not store it; 0 if it has none."""
        centre = client.inbox.get("centre", client.inbox["points"].new_zeros(self.endpoints))
        return client, {"centre": centre}

    def model(self, net: Net, client: Client) -> Tensors:
        """Return the network at c_k, or at the centre with `predict_by="global"`."""
        centre = client.count.new_full((self.endpoints,), 1 / self.endpoints)
        if self.predict_by == "global":
            return at_point(net, client.params, centre)
        params = copy_of(client.params, "personal") if self.tie else client.params
        own = client.inbox.get("centre", centre)
        return at_point(net, params, torch.where(_is_point(own), own, centre))

    def beside(self) -> Mapping[str, Method]:
        """Also record the accuracy of the global model."""
        return {} if self.predict_by == "global" else {"global": replace(self, predict_by="global")}

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Average, and from round τ on send each client its point."""
        shared = {**uploads.mean, **average(uploads.params, uploads.counts)}
        if moment.round < self.first_stage * moment.rounds:
            return Answer(shared, state=state, trace={"spread": 0.0})
        names = (last_layer(net)[0], "endpoints")
        changes = torch.cat(
            [(uploads.before[each] - uploads.params[each]).flatten(1) for each in names], dim=1
        ).double()
        basis = {name: torch.as_tensor(value).to(changes) for name, value in state.items()}
        basis = basis or principal_components(changes, self.endpoints)
        centres, basis = project_clients(changes, basis)
        had = uploads.extras["centre"].double()
        centres = torch.where(had.sum(dim=1, keepdim=True) > 0.5, had, centres)
        return Answer(
            shared,
            personal={"centre": centres.to(uploads.counts)},
            state={**basis},
            trace={"spread": torch.pdist(centres).mean() if len(centres) > 1 else 0.0},
        )


def at_point(net: Net, params: Tensors, point: Tensor) -> Tensors:
    """Return the network with the last layer's weight Σ_m α_m φ_m."""
    weight, _ = last_layer(net)
    mixed = point[0] * params[weight] + torch.tensordot(point[1:], params["endpoints"], dims=1)
    return {**network_tensors(net, params), weight: mixed}


def principal_components(changes: Tensor, number: int) -> Tensors:
    """Return the mean [d] and the first principal components [number, d] of rows; components without variance are 0.

    The largest entry of a component is positive, so that its sign does not depend on the order of the rows.
    """
    mean = changes.mean(dim=0)
    _, lengths, directions = torch.linalg.svd(changes - mean, full_matrices=False)
    directions = directions[:number]
    largest = directions.gather(1, directions.abs().argmax(dim=1, keepdim=True))
    has_variance = lengths[:number] > 1e-10 * lengths[0]
    components = changes.new_zeros(number, changes.shape[1])
    components[: len(directions)] = directions * largest.sign() * has_variance[:, None]
    return {"mean": mean, "components": components}


def project_clients(changes: Tensor, basis: Tensors) -> tuple[Tensor, Tensors]:
    """Return the clients' points in the simplex [k, M], and the basis with the scale that spreads them most.

    A scale z projects onto {w ≥ 0, Σ w = z}, which is z times the projection of the rows divided by z.
    """
    reduced = (changes - basis["mean"]) @ basis["components"].T
    if "scale" in basis:
        return project_onto_simplex(reduced / basis["scale"]), basis
    best, lowest, scale = project_onto_simplex(reduced), torch.inf, 1.0
    pairs = torch.triu_indices(len(reduced), len(reduced), offset=1)
    for each in torch.linspace(1e-4, 1, SCALES, dtype=torch.float64).tolist():
        points = project_onto_simplex(reduced / each)
        distances = (points[pairs[0]] - points[pairs[1]]).norm(dim=1).clamp(min=CLOSEST)
        energy = float((1 / distances.square()).sum())
        if len(reduced) > 1 and energy < lowest:
            best, lowest, scale = points, energy, each
    return best, {**basis, "scale": changes.new_tensor(scale)}


def _is_point(centre: Tensor) -> Tensor:
    """Return whether a client has a point; until it participates after round τ, it has received zeros."""
    return centre.sum() > 0.5


def _is_personal(name: str) -> bool:
    return name.startswith("personal.")


def _is_global(name: str) -> bool:
    return not name.startswith("personal.")
