"""FedRoD: a shared body with two heads, a shared generic one and a private personal one."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedrema.core import Alternative, Batch, Client, Method, Moment, Reports, Role, task_loss
from fedrema.errors import at_least
from fedrema.methods.shared.prototypes import class_membership
from fedrema.methods.shared.second_models import copied, copy_of, network_tensors
from fedrema.models.body_and_head import Net
from fedrema.tasks import Task

LOG_ZERO = -1e4
"""Stands for log 0: far below any logit, but finite."""


@dataclass(frozen=True)
class FedRoD(Method):
    """Federated robust decoupling: shared parameters minimise a balanced loss, personal ones the plain loss.

    The body θ and the generic head φ_g minimise the balanced softmax −log[n_y^γ e^{z_y} / Σ_c n_c^γ e^{z_c}], where z =
    φ_g(h) and n_c is the client's number of samples of class c: they no longer fit the local class imbalance. The
    personal head φ_k minimises the cross-entropy of z + φ_k(h), with z and h held fixed. θ and φ_g are sent and
    averaged by sample counts; φ_k is private. Clients are evaluated with z + φ_k(h); the accuracy of the generic head
    is recorded too.

    φ_k is initialised as a copy of the generic head with a last layer of zeros, so that a client starts with the
    generic model. The paper's variant that generates φ_k with a hypernetwork is not implemented.
    """

    name: ClassVar[str] = "fedrod"
    title: ClassVar[str] = "FedRoD"
    paper: ClassVar[str] = (
        "Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR 2022"
    )
    revision: ClassVar[int] = 2
    reports: ClassVar[Reports] = Reports(
        colour="#CC79A7", stroke="-.", alternatives=(Alternative("generic", "generic head"),)
    )

    gamma: float = 1.0
    """γ: exponent of the class counts in the balanced loss (public code: 1); 0 trains the generic model as FedAvg."""
    predict_by: Literal["personal", "generic"] = "personal"
    """Predict with the sum of both heads, or with the generic head."""

    def needs_head(self) -> bool:
        return True

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(0, self, "gamma")

    def supports(self, task: Task) -> bool:
        """Support classes only: the loss is balanced by class frequencies."""
        return task.has_softmax

    def role(self, net: Net, name: str) -> Role:
        """Share everything except the personal head."""
        return Role.PRIVATE if name.startswith("personal.") else Role.SHARED

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Add the personal head, whose initial output is 0."""
        head = {name: value for name, value in client.params.items() if net.in_head(name)}
        last = list(head)[-1].rpartition(".")[0]
        own = {name: value * 0 if name.rpartition(".")[0] == last else value for name, value in head.items()}
        return client.having(params={**client.params, **copied(own, "personal")})

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Compute γ log n_c."""
        counts = class_membership(data, net.classes, data.mask.dtype).sum(dim=0)
        prior = torch.where(counts > 0, self.gamma * counts.clamp(min=1).log(), LOG_ZERO if self.gamma else 0.0)
        return client.having(inbox={**client.inbox, "prior": prior})

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return the balanced loss of the generic model plus the plain loss of the personal head."""
        features = net.features(client.params, batch.x)
        generic = net.classify(client.params, features)
        personal = net.classify(copy_of(client.params, "personal"), features.detach())
        balanced = task_loss(net, generic + client.inbox["prior"], batch)
        return balanced + task_loss(net, generic.detach() + personal, batch)

    def predict(self, net: Net, client: Client, x: Tensor) -> Tensor:
        """Return z + φ_k(h), or z with `predict_by="generic"`."""
        features = net.features(client.params, x)
        generic = net.classify(network_tensors(net, client.params), features)
        if self.predict_by == "generic":
            return generic
        return generic + net.classify(copy_of(client.params, "personal"), features)

    def beside(self) -> Mapping[str, Method]:
        """Also record the accuracy of the generic head."""
        return {} if self.predict_by == "generic" else {"generic": replace(self, predict_by="generic")}
