"""FedProto: only class prototypes travel."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedrema.core import Answer, Batch, Client, Method, Moment, Reports, Role, State, Uploads
from fedrema.errors import at_least
from fedrema.methods.shared.prototypes import Weighing, aligned_loss, global_prototypes, no_prototypes, own_prototypes
from fedrema.models.body_and_head import Net, Tensors


@dataclass(frozen=True)
class FedProto(Method):
    """Models stay at home; clients agree on the mean feature of each class: CE + λ · d(h, c̄_y).

    Up go a client's class means and how many samples each has, computed after training with one pass over all its
    samples; down come their averages c̄, weighted by those numbers. d is the mean square over features of each
    sample, as in all public code, so that λ weighs less the wider the features are; the paper's own formula measures
    distances of prototypes. A class that has no prototype yet adds nothing.

    A sample is given the class whose prototype lies nearest, as in the paper; the accuracy of the classifier, which
    other code reports, is recorded beside it.
    """

    name: ClassVar[str] = "fedproto"
    title: ClassVar[str] = "FedProto"
    paper: ClassVar[str] = "Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022"
    reports: ClassVar[Reports] = Reports(colour="#E69F00")

    align: float = 1.0
    """λ: how strongly features are drawn to their prototype (authors: 1, on CIFAR-10 0.1); 0 trains as Local."""
    weigh: Weighing = "samples"
    """Average prototypes by sample counts (the paper) or equally over the clients that have them (public codes)."""
    predict_by: Literal["prototype", "classifier"] = "prototype"
    """Predict by the nearest prototype or by the client's own classifier."""

    def __post_init__(self) -> None:
        """Refuse settings without meaning."""
        at_least(0, self, "align")

    def role(self, net: Net, name: str) -> Role:
        """Keep all parameters at home."""
        return Role.PRIVATE

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """CE + λ · mean (1/d)‖h − c̄_y‖²."""
        return aligned_loss(net, client, batch, self.align)

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Send the means of the trained features by class."""
        return client, own_prototypes(net, client, data)

    def predict(self, net: Net, client: Client, x: Tensor) -> Tensor:
        """Return −‖h − c̄_c‖ for every class c that has a prototype; before any is known, the classifier's logits."""
        features = net.features(client.params, x)
        if self.predict_by == "classifier" or "prototypes" not in client.inbox:
            return net.classify(client.params, features)
        nearness = -torch.cdist(features, client.inbox["prototypes"], compute_mode="donot_use_mm_for_euclid_dist")
        return torch.where(client.inbox["known"] > 0, nearness, -torch.inf)

    def beside(self) -> Mapping[str, Method]:
        """Record the classifier's accuracy too."""
        return {} if self.predict_by == "classifier" else {"classifier": replace(self, predict_by="classifier")}

    def server(self, net: Net, clients: int) -> State:
        """Remember the prototypes, for classes whose holders are absent for a while."""
        return no_prototypes(net.classes, net.features_count)

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Average the prototypes, class by class."""
        prototypes = global_prototypes(state, uploads, self.weigh)
        return Answer(shared=prototypes, state={**prototypes})
