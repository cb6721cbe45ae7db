"""FedFA: features are aligned to shared anchors, and the head is calibrated on the anchors."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fedrema.base.random import torch_generator
from fedrema.core import Batch, Client, Method, Moment, Reports, task_loss
from fedrema.errors import BadInput, at_least
from fedrema.methods.shared.prototypes import class_means
from fedrema.models.body_and_head import Net, Tensors
from fedrema.tasks import Task


@dataclass(frozen=True)
class FedFA(Method):
    """Feature anchors: F_k + (λ/C) Σ_c mean_{y=c} ‖h − a_c‖² + κ CE(φ(a_c), c), with one anchor a_c per class c.

    The second term, over the classes in a batch, aligns features between clients. The third, over all classes,
    calibrates the head φ on the anchors, including those of classes that a client does not have. Anchors are constant
    during local training; afterwards a client moves those of its own classes half-way to the mean of its features. The
    server averages the model and the anchors by sample counts; both are sent. Clients are evaluated with the global
    model: FedFA is not a personalised method, but it is compared with personalised ones.

    The authors calibrate with a step of Adam after every batch and move the anchors once per epoch; here calibration is
    part of the loss, and anchors move once per round. They are initialised with distinct random axis-aligned unit
    vectors. Two other methods are also called FedFA; this one is the FedFA of feature anchors.
    """

    name: ClassVar[str] = "fedfa"
    title: ClassVar[str] = "FedFA"
    paper: ClassVar[str] = (
        "Zhou et al., FedFA: Federated Learning with Feature Anchors to Align Features and Classifiers for"
        " Heterogeneous Data, IEEE Transactions on Mobile Computing 2023"
    )
    reports: ClassVar[Reports] = Reports(colour="#E69F00", stroke=":")

    align: float = 0.1
    """λ: strength of the alignment of features with their anchors (authors: 0.1)."""
    calibrate: float = 1.0
    """κ: weight of the cross-entropy of the anchors; 0 disables calibration."""
    anchor_step: float = 0.5
    """How far an anchor moves towards the mean of a client's features: 0 not at all, 1 all the way (authors: 0.5)."""

    def needs_head(self) -> bool:
        return True

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(0, self, "align", "calibrate")
        if not 0 <= self.anchor_step <= 1:
            raise BadInput(f"--anchor-step must be in [0, 1], got {self.anchor_step}.")

    def supports(self, task: Task) -> bool:
        """Support classes only: there is an anchor for each class."""
        return task.has_softmax

    def trains(self, net: Net, name: str) -> bool:
        """Exclude the anchors."""
        return net.trains(name) and name != "anchors"

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Add the anchors, identical for all clients."""
        anchors = initial_anchors(net.classes, net.features_count, moment).to(client.count)
        return client.having(params={**client.params, "anchors": anchors})

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return F_k + (λ/C) Σ_c mean_{y=c} ‖h − a_c‖² + κ CE(φ(a), ·)."""
        anchors = client.params["anchors"]
        features = net.features(client.params, batch.x)
        loss = task_loss(net, net.classify(client.params, features), batch)
        distances = (features - anchors[batch.y]).square().sum(dim=1, keepdim=True)
        by_class, _ = class_means(distances, batch, net.classes)
        if self.calibrate:
            labels = torch.arange(net.classes, device=anchors.device)
            logits = net.classify(client.params, anchors, mask=anchors.new_ones(net.classes))
            loss = loss + self.calibrate * functional.cross_entropy(logits, labels)
        return loss + self.align * by_class.sum() / net.classes

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Move the anchors of the client's classes towards the means of its features."""
        means, counts = class_means(net.features(client.params, data.x), data, net.classes)
        before = client.params["anchors"]
        moved = torch.where(counts[:, None] > 0, before + self.anchor_step * (means - before), before)
        return client.having(params={**client.params, "anchors": moved}), {}


def initial_anchors(classes: int, width: int, moment: Moment) -> Tensor:
    """Return distinct random axis-aligned unit vectors [C, d]; random directions if C > d."""
    generator = torch_generator(moment.seed, "anchors")
    if classes <= width:
        return torch.eye(width)[torch.randperm(width, generator=generator)[:classes]]
    return functional.normalize(torch.randn(classes, width, generator=generator), dim=1)
