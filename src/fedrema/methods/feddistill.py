"""FedDistill: clients teach each other by their mean outputs."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from fedrema.core import Answer, Batch, Client, Method, Moment, Reports, Role, State, Uploads, cross_entropy
from fedrema.errors import at_least
from fedrema.methods.shared.prototypes import class_means
from fedrema.models.body_and_head import Net, Tensors


@dataclass(frozen=True)
class FedDistill(Method):
    """Federated distillation (FD): CE(z, y) + γ · ℓ(z, t_y), t_c being the mean output of *other* clients on class c.

    Models stay at home. Up goes a client's mean output for each label it holds, and how many samples that is of; down
    come the means over the other clients that hold the label, each counting equally. A label that no
    other client holds has no target and adds nothing. Clients are scored with their own models.

    The paper's outputs are softmax vectors and ℓ the cross-entropy with them. Other code compares logits by their mean
    square (`mse`), and lets a client be its own teacher (`--include-own`). Outputs are averaged in one pass after
    training; codes that average while they train mix in outputs of models that no longer exist.
    """

    name: ClassVar[str] = "feddistill"
    title: ClassVar[str] = "FedDistill"
    paper: ClassVar[str] = (
        "Jeong et al., Communication-Efficient On-Device Machine Learning: Federated Distillation and Augmentation"
        " under Non-IID Private Data, 2018, arXiv:1811.11479"
    )
    reports: ClassVar[Reports] = Reports(colour="#E69F00", stroke="--")

    gamma: float = 0.01
    """γ: weight of what the others say (authors: 0.01); 0 is Local."""
    target_loss: Literal["cross-entropy", "mse"] = "cross-entropy"
    """Compare softmax outputs by cross-entropy (the paper) or logits by mean square (public code)."""
    include_own: bool = False
    """Count a client's own outputs among its targets (public code)."""

    def __post_init__(self) -> None:
        """Refuse settings without meaning."""
        at_least(0, self, "gamma")

    def role(self, net: Net, name: str) -> Role:
        """Keep all parameters at home."""
        return Role.PRIVATE

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """CE(z, y) + γ · mean ℓ(z, t_y)."""
        logits = net(client.params, batch.x)
        loss = cross_entropy(logits, batch)
        if "targets" in client.inbox:
            targets, counted = client.inbox["targets"][batch.y], batch.mask * client.inbox["taught"][batch.y]
            told = (self.apart(logits, targets) * counted).sum() / batch.mask.sum().clamp(min=1)
            loss = loss + self.gamma * told
        return loss

    def apart(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return ℓ for each sample [n]."""
        if self.target_loss == "mse":
            return (logits - targets).square().mean(dim=1)
        return -(targets * functional.log_softmax(logits, dim=1)).sum(dim=1)

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Send the mean outputs of the trained model by label."""
        logits = net(client.params, data.x)
        outputs = logits if self.target_loss == "mse" else torch.softmax(logits, dim=1)
        means, counts = class_means(outputs, data, net.classes)
        return client, {"outputs": means, "label_counts": counts}

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Give each client the mean over the others that hold a label."""
        outputs, counts = uploads.extras["outputs"], uploads.extras["label_counts"]
        holds = (counts > 0).to(outputs.dtype)
        teaches = torch.ones(len(holds), len(holds)).to(outputs)
        if not self.include_own:
            teaches.fill_diagonal_(0)
        teachers = teaches @ holds  # [k, C] how many others hold the label
        targets = torch.einsum("ij,jc,jco->ico", teaches, holds, outputs) / teachers.clamp(min=1)[..., None]
        return Answer(shared={}, personal={"targets": targets, "taught": (teachers > 0).to(outputs)}, state=state)
