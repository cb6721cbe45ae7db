"""GPFL: shared class embeddings guide generic features; personal features serve a private head."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fedrema.core import Batch, Client, Method, Moment, Reports, Role, task_loss
from fedrema.errors import at_least
from fedrema.methods.shared.layers import linear_layer
from fedrema.methods.shared.prototypes import class_membership
from fedrema.models.body_and_head import Net, Tensors
from fedrema.tasks import Task

VALVES = ("gain", "lift")
"""Names of the two layers that compute γ and β."""


@dataclass(frozen=True)
class GPFL(Method):
    """Global and personalised features: CE(φ_k(h_P), y) + CE(cos(h_G, E), y) + λ ‖h_G − e_y‖ + (µ/2)(‖E‖² + ‖V‖²).

    Features h are changed under a condition c in two ways: ReLU((1 + γ(c)) ⊙ h + β(c)), where γ and β are linear layers
    followed by ReLU and layer norm; V are their parameters. h_P has as its condition the mean of the class embeddings E
    [C, d] weighted by the client's class frequencies, h_G their plain mean; both conditions are constant during a
    round. The private head φ_k uses h_P. h_G is compared with the embeddings: with those in training by their cosines,
    which are the logits of the second term, and with the received ones by the norm of all differences in a batch.

    The body, V and E are averaged by sample counts. Clients are evaluated with φ_k(h_P).

    In the authors' code, the conditions of the first round are 0, and later follow from the embeddings that the client
    itself had trained before the average; here they always follow from the received embeddings, as in the paper.
    """

    name: ClassVar[str] = "gpfl"
    title: ClassVar[str] = "GPFL"
    paper: ClassVar[str] = (
        "Zhang et al., GPFL: Simultaneously Learning Global and Personalized Feature Information for Personalized"
        " Federated Learning, ICCV 2023"
    )
    revision: ClassVar[int] = 2
    reports: ClassVar[Reports] = Reports(colour="#AA4499", stroke="--")

    guide: float = 0.01
    """λ: strength of the pull of generic features to their class embedding (authors: 0.01; 0.0001 for ResNet-18)."""
    decay: float = 0.1
    """µ: weight decay of E and V (authors: 0.1; 0 for ResNet-18)."""

    def needs_head(self) -> bool:
        return True

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(0, self, "guide", "decay")

    def supports(self, task: Task) -> bool:
        """Support classes only: each has an embedding."""
        return task.has_softmax

    def role(self, net: Net, name: str) -> Role:
        """Share everything except the head."""
        return Role.PRIVATE if net.in_head(name) else Role.SHARED

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Add E and V, identical for all clients, and room for the class frequencies."""
        width, like = net.features_count, client.count
        drawn = torch.randn(net.classes, width, generator=moment.generator("embeddings"), dtype=torch.float64)
        added: Tensors = {"embeddings": drawn.to(like)}
        for name in VALVES:
            added |= linear_layer(name, width, width, moment, like)
            added |= {f"{name}.scale": like.new_ones(width), f"{name}.offset": like.new_zeros(width)}
        frequencies = like.new_full((net.classes,), 1 / net.classes)
        return client.having(params={**client.params, **added}, memory={**client.memory, "frequencies": frequencies})

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Compute the class frequencies."""
        counts = class_membership(data, net.classes, client.count.dtype).sum(dim=0)
        return client.having(memory={**client.memory, "frequencies": counts / counts.sum().clamp(min=1)})

    def ready(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Compute the class frequencies, also of a client that has never trained."""
        return self.begin(net, client, data, moment)

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return CE(φ_k(h_P), y) + CE(cos(h_G, E), y) + λ ‖h_G − e_y‖ + (µ/2)(‖E‖² + ‖V‖²)."""
        params, embeddings = client.params, client.received["embeddings"]
        features = net.features(params, batch.x)
        personal = conditioned(params, features, client.memory["frequencies"] @ embeddings)
        generic = conditioned(params, features, embeddings.mean(dim=0))
        cosines = functional.normalize(generic) @ functional.normalize(params["embeddings"]).T
        distances = (generic - embeddings[batch.y]) * batch.mask[:, None]
        regularised = [value for name, value in params.items() if is_shared_addition(name)]
        guidance: Tensor = torch.linalg.vector_norm(distances)
        squares = torch.stack([value.square().sum() for value in regularised]).sum()
        loss = task_loss(net, net.classify(params, personal), batch) + task_loss(net, cosines, batch)
        return loss + self.guide * guidance + self.decay / 2 * squares

    def predict(self, net: Net, client: Client, x: Tensor) -> Tensor:
        """Return φ_k(h_P)."""
        condition = client.memory["frequencies"] @ client.params["embeddings"]
        return net.classify(client.params, conditioned(client.params, net.features(client.params, x), condition))


def conditioned(params: Tensors, features: Tensor, condition: Tensor) -> Tensor:
    """Return ReLU((1 + γ(c)) ⊙ h + β(c)) for features h [n, d] and a condition c [d]."""

    def layer(name: str) -> Tensor:
        hidden = (params[f"{name}.weight"] @ condition + params[f"{name}.bias"]).relu()
        return functional.layer_norm(hidden, hidden.shape, params[f"{name}.scale"], params[f"{name}.offset"])

    gain, lift = (layer(name) for name in VALVES)
    return ((1 + gain) * features + lift).relu()


def is_shared_addition(name: str) -> bool:
    """Return whether a parameter belongs to E or V."""
    return name == "embeddings" or name.partition(".")[0] in VALVES
