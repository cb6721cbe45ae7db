"""FedProto: only class prototypes are exchanged."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedrema.core import Alternative, Answer, Batch, Client, Method, Moment, Reports, Role, State, Uploads
from fedrema.errors import at_least
from fedrema.methods.shared.prototypes import (
    Weighting,
    aligned_loss,
    client_prototypes,
    global_prototypes,
    initial_prototypes,
)
from fedrema.models.body_and_head import Net, Tensors
from fedrema.tasks import Task


@dataclass(frozen=True)
class FedProto(Method):
    """Models are private; clients align their features with the mean feature of each class: CE + λ · d(h, c̄_y).

    A client sends the mean feature and the number of samples of each class, computed after training in one pass over
    all its samples, and receives their averages c̄, weighted by these numbers. d is the squared distance of each sample
    averaged over the features, as in all public code, so that the same λ has less effect with wider features; the
    paper's formula measures distances between prototypes. A class without a prototype does not contribute.

    As in the paper, a sample is assigned the class of the nearest prototype. The accuracy of the classifier, which
    other code reports, is recorded too.
    """

    name: ClassVar[str] = "fedproto"
    title: ClassVar[str] = "FedProto"
    paper: ClassVar[str] = "Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022"
    reports: ClassVar[Reports] = Reports(colour="#E69F00", alternatives=(Alternative("classifier", "classifier"),))

    align: float = 1.0
    """λ: strength of the alignment of features with their prototype (authors: 1; 0.1 on CIFAR-10); 0 trains as
    Local."""
    weigh: Weighting = "samples"
    """Average prototypes by sample counts (paper) or with equal weights over the clients that have them (public
    code)."""
    predict_by: Literal["prototype", "classifier"] = "prototype"
    """Predict with the nearest prototype or with the client's own classifier."""

    def needs_head(self) -> bool:
        return True

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(0, self, "align")

    def supports(self, task: Task) -> bool:
        """Support classes only: there is a prototype for each class."""
        return task.has_softmax

    def role(self, net: Net, name: str) -> Role:
        """Keep all parameters private."""
        return Role.PRIVATE

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return CE + λ · mean (1/d)‖h − c̄_y‖²."""
        return aligned_loss(net, client, batch, self.align)

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Send the mean features by class after training."""
        return client, client_prototypes(net, client, data)

    def predict(self, net: Net, client: Client, x: Tensor) -> Tensor:
        """Return −‖h − c̄_c‖ for every class c with a prototype; before any is known, the classifier's logits."""
        features = net.features(client.params, x)
        if self.predict_by == "classifier" or "prototypes" not in client.inbox:
            return net.classify(client.params, features)
        negative_distances = -torch.cdist(
            features, client.inbox["prototypes"], compute_mode="donot_use_mm_for_euclid_dist"
        )
        return torch.where(client.inbox["known"] > 0, negative_distances, -torch.inf)

    def beside(self) -> Mapping[str, Method]:
        """Also record the accuracy of the classifier."""
        return {} if self.predict_by == "classifier" else {"classifier": replace(self, predict_by="classifier")}

    def server(self, net: Net, clients: int) -> State:
        """Return the initial prototypes; they are kept for classes whose clients are absent in a round."""
        return initial_prototypes(net.classes, net.features_count)

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Average the prototypes of each class."""
        prototypes = global_prototypes(state, uploads, self.weigh)
        return Answer(shared=prototypes, state={**prototypes})
