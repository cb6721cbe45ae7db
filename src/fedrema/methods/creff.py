"""CReFF: a classifier trained again on federated features that the server makes up from gradients."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedrema.core import Answer, Batch, Client, Method, Moment, Reports, State, Uploads
from fedrema.errors import above_zero, at_least
from fedrema.methods.shared.prototypes import class_members
from fedrema.models.body_and_head import Net, Tensors
from fedrema.models.last_layer import inputs_of_last, last_layer


@dataclass(frozen=True)
class CReFF(Method):
    """FedAvg, whose last layer is trained again in every round on synthetic features: (W, b) ← φ̂.

    Clients also send, for each class c they hold, the gradient of the cross-entropy in φ̂ at the received model: for a
    linear layer the mean of (p − e_c) ⊗ h over the samples of c. The server averages these equally over those who hold
    c, and moves its own features, 100 per class, by `match_steps` steps until their gradients point the same way: min
    Σ_c Σ_rows (1 − cos(g_synthetic, g_real)), the bias being one row. Then a fresh φ̂ is trained on them and sent to
    everyone. The averaged model goes on by itself, as FedAvg's. Clients are scored with the averaged model under φ̂.

    φ̂ stands for the last linear layer, whatever lies before it. The authors average the gradients of ten augmented
    draws of at most 32 images per class; here all samples are used once, as they are. Most of the time goes into
    training φ̂: 300 epochs over a thousand features, in every round.
    """

    name: ClassVar[str] = "creff"
    title: ClassVar[str] = "CReFF"
    paper: ClassVar[str] = (
        "Shang et al., Federated Learning on Heterogeneous and Long-Tailed Data via Classifier Re-Training with"
        " Federated Features, IJCAI 2022"
    )
    reports: ClassVar[Reports] = Reports(colour="#CC79A7", stroke="--")

    synthetic: int = 100
    """Synthetic features per class (authors: 100)."""
    match_steps: int = 100
    """Steps that move them in every round (authors: 100)."""
    match_lr: float = 0.1
    """Learning rate of these steps (authors: 0.1)."""
    retrain_epochs: int = 300
    """Epochs that train the last layer on them (authors: 300)."""
    retrain_lr: float = 0.01
    """Learning rate of these epochs (authors: 0.01)."""
    retrain_batch: int = 32
    """Their batches (authors: 32)."""

    def __post_init__(self) -> None:
        """Refuse settings without meaning."""
        at_least(1, self, "synthetic", "retrain_batch")
        at_least(0, self, "match_steps", "retrain_epochs")
        above_zero(self, "match_lr", "retrain_lr")

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Send the gradients in φ̂ by class [C, C, d + 1], at the model that was received, and the classes held."""
        weight, bias = last_layer(net)
        inputs = inputs_of_last(net, client.received, data.x)
        received = client.inbox if "classifier.weight" in client.inbox else client.received
        names = ("classifier.weight", "classifier.bias") if received is client.inbox else (weight, bias)
        chances = torch.softmax(inputs @ received[names[0]].T + received[names[1]], dim=1)
        member = class_members(data, net.classes, chances.dtype)
        wrong = (chances - functional.one_hot(data.y, net.classes)) * data.mask[:, None]
        ones = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)
        counts = member.sum(dim=0)
        gradients = torch.einsum("nc,no,nd->cod", member, wrong, ones) / counts.clamp(min=1)[:, None, None]
        return client, {"gradients": gradients, "holds": (counts > 0).to(gradients)}

    def model(self, net: Net, client: Client) -> Tensors:
        """Answer with the averaged model under φ̂; before there is one, with the averaged model."""
        if "classifier.weight" not in client.inbox:
            return client.params
        weight, bias = last_layer(net)
        layer = {weight: client.inbox["classifier.weight"], bias: client.inbox["classifier.bias"]}
        return {**client.params, **layer}

    def server(self, net: Net, clients: int) -> State:
        """Remember the synthetic features; there are none before the first round."""
        weight, bias = (net.initial[name] for name in last_layer(net))
        features = torch.zeros(net.classes, self.synthetic, weight.shape[1])
        return {"features": features, "classifier.weight": weight, "classifier.bias": bias}

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Match the gradients, then train φ̂ anew."""
        gradients, holds = uploads.extras["gradients"], uploads.extras["holds"]
        owners = holds.sum(dim=0)
        real = torch.einsum("kc,kcod->cod", holds, gradients) / owners.clamp(min=1)[:, None, None]
        known = torch.as_tensor(state["features"])
        if moment.round == 1:
            known = torch.randn(known.shape, generator=moment.generator("features"), dtype=torch.float64)
        at = [torch.as_tensor(state[name]).to(real) for name in ("classifier.weight", "classifier.bias")]
        features, apart = self.match(known.to(real), real, (owners > 0).to(real), *at)
        weight, bias = self.retrain(features, moment)
        sent = {"classifier.weight": weight, "classifier.bias": bias}
        return Answer({**uploads.mean, **sent}, state={"features": features, **sent}, trace={"apart": apart})

    def match(
        self, features: Tensor, real: Tensor, known: Tensor, weight: Tensor, bias: Tensor
    ) -> tuple[Tensor, float]:
        """Move features [C, m, d] until their gradients in (W, b) point as the real ones [C, C, d + 1] do."""
        apart = 0.0
        for _ in range(self.match_steps):
            with torch.enable_grad():
                moving = features.detach().requires_grad_()
                distance = (gradients_apart(moving, real, weight, bias) * known).sum()
                (slope,) = torch.autograd.grad(distance, moving)
            features, apart = features - self.match_lr * slope, float(distance.detach())
        return features, apart

    def retrain(self, features: Tensor, moment: Moment) -> tuple[Tensor, Tensor]:
        """Return W and b after plain SGD on the cross-entropy of the features, from a fresh start.

        By NumPy: ten thousand tiny steps take several times as long where threads or a GPU have to be asked for each.
        """
        classes, each, width = features.shape
        generator = moment.generator("classifier")
        drawn = 2 * torch.rand(classes, width + 1, generator=generator, dtype=torch.float64) - 1
        layer = drawn.numpy() * width**-0.5  # the bias is its last column
        x = features.flatten(0, 1).cpu().double().numpy()
        x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
        truth = np.repeat(np.eye(classes), each, axis=0)
        for _ in range(self.retrain_epochs):
            order = torch.randperm(len(x), generator=generator).numpy()
            for first in range(0, len(x), self.retrain_batch):
                rows = order[first : first + self.retrain_batch]
                inputs = x[rows]
                logits = inputs @ layer.T
                chances = np.exp(logits - logits.max(axis=1, keepdims=True))
                wrong = chances / chances.sum(axis=1, keepdims=True) - truth[rows]
                layer -= self.retrain_lr / len(rows) * (wrong.T @ inputs)
        found = torch.from_numpy(layer).to(features)
        return found[:, :-1].contiguous(), found[:, -1].contiguous()


def gradients_apart(features: Tensor, real: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return Σ_rows (1 − cos) [C] between classes' mean gradients (p − e_c) ⊗ h and real ones; the bias is a row."""
    classes, each, _ = features.shape
    truth = torch.eye(classes, device=features.device, dtype=features.dtype)[:, None, :]
    wrong = (torch.softmax(features @ weight.T + bias, dim=2) - truth) / each
    by_weight, by_bias = torch.einsum("cmo,cmd->cod", wrong, features), wrong.sum(dim=1)
    rows = 1 - functional.cosine_similarity(by_weight, real[..., :-1], dim=2)
    return rows.sum(dim=1) + 1 - functional.cosine_similarity(by_bias, real[..., -1], dim=1)
