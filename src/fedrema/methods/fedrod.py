"""FedRoD: one body, two heads: a generic one for all, a personal one beside it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedrema.core import Batch, Client, Method, Moment, Reports, Role, cross_entropy
from fedrema.errors import at_least
from fedrema.methods.shared.prototypes import class_members
from fedrema.methods.shared.second_models import copied, copy_of, model_of
from fedrema.models.body_and_head import Net

NEVER = -1e4
"""The logarithm of no sample at all: far below any logit, and still a number."""


@dataclass(frozen=True)
class FedRoD(Method):
    """Federated robust decoupling: a balanced loss trains what is shared, the plain loss trains what is personal.

    Body θ and generic head φ_g minimise the balanced softmax −log[n_y^γ e^{z_y} / Σ_c n_c^γ e^{z_c}], z = φ_g(h), n_c
    being the client's numbers of samples by class: local imbalance no longer pulls them apart. The personal head φ_k
    minimises the cross-entropy of z + φ_k(h), with z and h held fixed. θ and φ_g are averaged by sample counts and
    travel; φ_k stays at home. Clients are scored with z + φ_k(h); the generic head's accuracy is recorded beside it.

    φ_k begins as a copy of the generic head whose last layer is 0, so that a client begins with the generic model. The
    paper's variant that generates φ_k by a hypernetwork is not here.
    """

    name: ClassVar[str] = "fedrod"
    title: ClassVar[str] = "FedRoD"
    paper: ClassVar[str] = (
        "Chen and Chao, On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR 2022"
    )
    revision: ClassVar[int] = 2
    reports: ClassVar[Reports] = Reports(colour="#CC79A7", stroke="-.")

    gamma: float = 1.0
    """γ: power of the class counts in the balanced loss (public code: 1); 0 trains the generic model as FedAvg."""
    predict_by: Literal["personal", "generic"] = "personal"
    """Answer with both heads together, or with the generic one."""

    def __post_init__(self) -> None:
        """Refuse settings without meaning."""
        at_least(0, self, "gamma")

    def role(self, net: Net, name: str) -> Role:
        """Share all but the personal head."""
        return Role.PRIVATE if name.startswith("personal.") else Role.SHARED

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Add a personal head that says nothing yet."""
        head = {name: value for name, value in client.params.items() if net.in_head(name)}
        last = list(head)[-1].rpartition(".")[0]
        own = {name: value * 0 if name.rpartition(".")[0] == last else value for name, value in head.items()}
        return client.having(params={**client.params, **copied(own, "personal")})

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Compute γ log n_c."""
        counts = class_members(data, net.classes, data.mask.dtype).sum(dim=0)
        prior = torch.where(counts > 0, self.gamma * counts.clamp(min=1).log(), NEVER if self.gamma else 0.0)
        return client.having(inbox={**client.inbox, "prior": prior})

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return the balanced loss of the generic model plus the plain loss of the personal head."""
        features = net.features(client.params, batch.x)
        generic = net.classify(client.params, features)
        personal = net.classify(copy_of(client.params, "personal"), features.detach())
        balanced = cross_entropy(generic + client.inbox["prior"], batch)
        return balanced + cross_entropy(generic.detach() + personal, batch)

    def predict(self, net: Net, client: Client, x: Tensor) -> Tensor:
        """Answer with z + φ_k(h)."""
        features = net.features(client.params, x)
        generic = net.classify(model_of(net, client.params), features)
        if self.predict_by == "generic":
            return generic
        return generic + net.classify(copy_of(client.params, "personal"), features)

    def beside(self) -> Mapping[str, Method]:
        """Record the generic head's accuracy too."""
        return {} if self.predict_by == "generic" else {"generic": replace(self, predict_by="generic")}
