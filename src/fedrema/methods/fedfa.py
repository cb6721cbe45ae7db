"""FedFA: everyone draws features to common anchors, and classifies the anchors right."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fedrema.base.random import torch_generator
from fedrema.core import Batch, Client, Method, Moment, Reports, cross_entropy
from fedrema.errors import BadInput, at_least
from fedrema.methods.shared.prototypes import class_means
from fedrema.models.body_and_head import Net, Tensors


@dataclass(frozen=True)
class FedFA(Method):
    """Feature anchors: F_k + (λ/C) Σ_c mean_{y=c} ‖h − a_c‖² + κ CE(φ(a_c), c), with an anchor a_c for every class c.

    The second term, over the classes in a batch, aligns features between clients; the third, over all classes,
    calibrates the head φ with anchors of classes that a client may not have. Anchors stay as they are while a client
    trains; afterwards those of its own classes move half-way to the mean of its features. The server averages model
    and anchors by sample counts; both travel. Clients are scored with the global model: FedFA is not a personalised
    method, though it is compared with some.

    The authors calibrate by a step of Adam after every batch, and move anchors once per epoch; here calibration is
    part of the loss, and anchors move once per round. They begin as random distinct unit vectors of the axes. This is
    the FedFA of feature anchors; two other methods have the same name.
    """

    name: ClassVar[str] = "fedfa"
    title: ClassVar[str] = "FedFA"
    paper: ClassVar[str] = (
        "Zhou et al., FedFA: Federated Learning with Feature Anchors to Align Features and Classifiers for"
        " Heterogeneous Data, IEEE Transactions on Mobile Computing 2023"
    )
    reports: ClassVar[Reports] = Reports(colour="#E69F00", stroke=":")

    align: float = 0.1
    """λ: how strongly features are drawn to their anchors (authors: 0.1)."""
    calibrate: float = 1.0
    """κ: weight of the anchors' own classification; 0 switches calibration off."""
    anchor_step: float = 0.5
    """How far an anchor moves to the mean of a client's features (authors: 0.5)."""

    def __post_init__(self) -> None:
        """Refuse settings without meaning."""
        at_least(0, self, "align", "calibrate")
        if not 0 <= self.anchor_step <= 1:
            raise BadInput(f"--anchor-step must lie in [0, 1], got {self.anchor_step}.")

    def trains(self, net: Net, name: str) -> bool:
        """Leave anchors out."""
        return net.trains(name) and name != "anchors"

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Add the anchors, the same for all."""
        anchors = first_anchors(net.classes, net.features_count, moment).to(client.count)
        return client.having(params={**client.params, "anchors": anchors})

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """F_k + (λ/C) Σ_c mean_{y=c} ‖h − a_c‖² + κ CE(φ(a), ·)."""
        anchors = client.params["anchors"]
        features = net.features(client.params, batch.x)
        loss = cross_entropy(net.classify(client.params, features), batch)
        distances = (features - anchors[batch.y]).square().sum(dim=1, keepdim=True)
        by_class, _ = class_means(distances, batch, net.classes)
        if self.calibrate:
            named = torch.arange(net.classes, device=anchors.device)
            logits = net.classify(client.params, anchors, mask=anchors.new_ones(net.classes))
            loss = loss + self.calibrate * functional.cross_entropy(logits, named)
        return loss + self.align * by_class.sum() / net.classes

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Move the anchors of one's own classes."""
        means, counts = class_means(net.features(client.params, data.x), data, net.classes)
        before = client.params["anchors"]
        moved = torch.where(counts[:, None] > 0, before + self.anchor_step * (means - before), before)
        return client.having(params={**client.params, "anchors": moved}), {}


def first_anchors(classes: int, width: int, moment: Moment) -> Tensor:
    """Return distinct unit vectors of the axes [C, d] in random order; random directions where there are too few."""
    generator = torch_generator(moment.seed, "anchors")
    if classes <= width:
        return torch.eye(width)[torch.randperm(width, generator=generator)[:classes]]
    return functional.normalize(torch.randn(classes, width, generator=generator), dim=1)
