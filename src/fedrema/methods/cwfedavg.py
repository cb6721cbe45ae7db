"""cwFedAvg: models are averaged separately for each class, and combined again for each client."""

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
from fedrema.errors import at_least
from fedrema.methods.shared.prototypes import class_membership
from fedrema.models.body_and_head import Net, Tensors, last_layer
from fedrema.tasks import Task


@dataclass(frozen=True)
class CwFedAvg(Method):
    """Class-wise averaging: the server forms a model W_c of each class c, and client k receives Σ_c p̃_kc W_c.

    W_c = Σ_k n_k p̃_kc ŵ_k / Σ_k n_k p̃_kc, so that client k receives Σ_j A_kj ŵ_j with A_kj = Σ_c p̃_kc n_j p̃_jc / Σ_i
    n_i p̃_ic. The shares p̃_kc = ‖φ_c‖ / Σ_i ‖φ_i‖ are not class frequencies but are read from the uploaded model: φ_c is
    the row of class c of the last layer. A regulariser makes them follow the frequencies p_k of the client's classes:
    clients minimise F_k + (λ/2) ‖p_k − p̃_k‖. Clients send and receive as much as in FedAvg, and are evaluated with the
    model that they receive.

    The authors apply this to all layers or to the last one only (`--layers head`). Their code also updates clients that
    do not participate in a round, but its aggregation requires that all clients participate; here, absent clients keep
    their model, and one that has not participated yet has the mean of the others'.
    """

    name: ClassVar[str] = "cwfedavg"
    title: ClassVar[str] = "cwFedAvg"
    paper: ClassVar[str] = "Lee et al., Class-Wise Federated Averaging for Efficient Personalization, ICCV 2025"
    absence_revision: ClassVar[int] = 2
    reports: ClassVar[Reports] = Reports(
        colour="#332288",
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

    regularise: float = 10.0
    """λ: strength with which the norms of the last layer's rows follow the class frequencies (authors: 10)."""
    layers: Literal["all", "head"] = "all"
    """Average all layers by class, or the head only; the body is then averaged as in FedAvg."""
    shares: Literal["norms", "labels"] = "norms"
    """Derive p̃ from the norms of the last layer's rows, or send the class frequencies themselves."""

    def needs_head(self) -> bool:
        return True

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(0, self, "regularise")

    def supports(self, task: Task) -> bool:
        """Support classes only: there is a model for each class."""
        return task.has_softmax

    def role(self, net: Net, name: str) -> Role:
        """Send every parameter; each client receives its own copy of what is averaged by class."""
        return Role.PERSONAL if self.layers == "all" or net.in_head(name) else Role.SHARED

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Compute p_k."""
        frequencies = class_membership(data, net.classes, data.mask.dtype).sum(dim=0) / client.count
        return client.having(inbox={**client.inbox, "frequencies": frequencies.to(client.count.dtype)})

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return F_k + (λ/2) ‖p_k − p̃_k‖."""
        difference = client.inbox["frequencies"] - shares_by_norm(net, client.params)
        distance: Tensor = torch.linalg.vector_norm(difference)
        return task_loss(net, net(client.params, batch.x), batch) + self.regularise / 2 * distance

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Send p_k, if the server uses it."""
        return client, {"frequencies": client.inbox["frequencies"]} if self.shares == "labels" else {}

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Average by class, and combine the classes for each client."""
        shares = uploads.extras["frequencies"] if self.shares == "labels" else shares_by_norm(net, uploads.params)
        weights = class_wise_weights(shares, uploads.counts).to(uploads.counts)
        trace = {"own_weight": weights.diagonal().mean(), "weights": weights}
        return Answer(shared=uploads.mean, personal=mix(uploads.params, weights), state=state, trace=trace)


def shares_by_norm(net: Net, params: Tensors) -> Tensor:
    """Return p̃ [..., C]: the norm of each row of the last layer, divided by the sum of these norms."""
    norms: Tensor = torch.linalg.vector_norm(params[last_layer(net)[0]], dim=-1)
    return norms / norms.sum(dim=-1, keepdim=True).clamp(min=1e-30)


def class_wise_weights(shares: Tensor, counts: Tensor) -> Tensor:
    """Return A [k, k] in float64 from the shares [k, C] and the sample counts [k].

    Shares are normalised, because clients can send anything: negative ones count as 0, and a row of zeros as uniform.
    """
    shares = shares.double().clamp(min=0)
    total = shares.sum(dim=1, keepdim=True)
    shares = torch.where(total > 0, shares / total.clamp(min=1e-300), 1 / shares.shape[1])
    held = counts.double()[:, None] * shares
    return shares @ (held / held.sum(dim=0).clamp(min=1e-30)).T
