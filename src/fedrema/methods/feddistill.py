"""FedDistill: clients exchange mean outputs per class and learn from those of the others."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from fedrema.core import Answer, Batch, Client, Method, Moment, Reports, Role, State, Uploads, task_loss
from fedrema.errors import at_least
from fedrema.methods.shared.prototypes import class_means
from fedrema.models.body_and_head import Net, Tensors
from fedrema.tasks import Task


@dataclass(frozen=True)
class FedDistill(Method):
    """Federated distillation (FD): CE(z, y) + γ · ℓ(z, t_y) with t_c the mean output of the other clients on class c.

    Models are private. For each label that it holds, a client sends its mean output and the number of samples; it
    receives the means over the other clients that hold the label, with equal weights. A label that no other client
    holds has no target and does not contribute. Clients are evaluated with their own models.

    In the paper the outputs are softmax vectors and ℓ is the cross-entropy with them. Other code uses the mean squared
    error between logits (`mse`) and includes a client's own outputs in its targets (`--include-own`). Outputs are
    averaged in one pass after training; code that averages during training includes outputs of outdated models.
    """

    name: ClassVar[str] = "feddistill"
    title: ClassVar[str] = "FedDistill"
    paper: ClassVar[str] = (
        "Jeong et al., Communication-Efficient On-Device Machine Learning: Federated Distillation and Augmentation"
        " under Non-IID Private Data, 2018, arXiv:1811.11479"
    )
    reports: ClassVar[Reports] = Reports(colour="#E69F00", stroke="--")

    gamma: float = 0.01
    """γ: weight of the distillation loss (authors: 0.01); 0 is Local."""
    target_loss: Literal["cross-entropy", "mse"] = "cross-entropy"
    """Compare softmax outputs by cross-entropy (paper) or logits by mean squared error (public code)."""
    include_own: bool = False
    """Include a client's own outputs in its targets (public code)."""

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(0, self, "gamma")

    def supports(self, task: Task) -> bool:
        """Support classes only: logits are averaged by class."""
        return task.has_softmax

    def role(self, net: Net, name: str) -> Role:
        """Keep all parameters private."""
        return Role.PRIVATE

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return CE(z, y) + γ · mean ℓ(z, t_y)."""
        logits = net(client.params, batch.x)
        loss = task_loss(net, logits, batch)
        if "targets" in client.inbox:
            targets, counted = client.inbox["targets"][batch.y], batch.mask * client.inbox["taught"][batch.y]
            distillation = (self.target_losses(logits, targets) * counted).sum() / batch.mask.sum().clamp(min=1)
            loss = loss + self.gamma * distillation
        return loss

    def target_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return ℓ of each sample [n]."""
        if self.target_loss == "mse":
            return (logits - targets).square().mean(dim=1)
        return -(targets * functional.log_softmax(logits, dim=1)).sum(dim=1)

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Send the mean outputs of the trained model per label."""
        logits = net(client.params, data.x)
        outputs = logits if self.target_loss == "mse" else torch.softmax(logits, dim=1)
        means, counts = class_means(outputs, data, net.classes)
        return client, {"outputs": means, "label_counts": counts}

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Send each client the mean over the other clients that hold a label."""
        outputs, counts = uploads.extras["outputs"], uploads.extras["label_counts"]
        holds = (counts > 0).to(outputs.dtype)
        teaches = torch.ones(len(holds), len(holds)).to(outputs)
        if not self.include_own:
            teaches.fill_diagonal_(0)
        teachers = teaches @ holds  # [k, C] number of other clients that hold the label
        targets = torch.einsum("ij,jc,jco->ico", teaches, holds, outputs) / teachers.clamp(min=1)[..., None]
        return Answer(shared={}, personal={"targets": targets, "taught": (teachers > 0).to(outputs)}, state=state)
