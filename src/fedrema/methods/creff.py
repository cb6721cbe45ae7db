"""CReFF: the classifier is retrained on synthetic features that the server fits to the clients' gradients."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedrema.core import Answer, Batch, Client, Method, Moment, Reports, State, Trace, Uploads
from fedrema.errors import above_zero, at_least
from fedrema.methods.shared.prototypes import class_membership
from fedrema.models.body_and_head import Net, Tensors, last_layer, last_layer_inputs
from fedrema.tasks import Task


@dataclass(frozen=True)
class CReFF(Method):
    """FedAvg whose last layer φ̂ = (W, b) is retrained on synthetic features on the server in every round.

    For each class c that it holds, a client also sends the gradient of the cross-entropy with respect to φ̂ at the
    received model; for a linear layer this is the mean of (p − e_c) ⊗ h over the samples of c. The server averages
    these gradients with equal weights over the clients that hold c. It then takes `match_steps` gradient steps on its
    own features, 100 per class, which align their gradients with the clients': min Σ_c Σ_rows (1 − cos(g_synthetic,
    g_real)), with the bias as one more row. A newly initialised φ̂ is trained on these features and sent to all
    clients. The averaged model continues to train as in FedAvg. Clients are evaluated with the averaged model whose
    last layer is replaced by φ̂.

    φ̂ is the last linear layer, whatever the rest of the network is. The authors average the gradients of ten augmented
    draws of at most 32 images per class; here every sample is used once, without augmentation. Training φ̂ takes most
    of the time: 300 epochs over a thousand features in every round.
    """

    name: ClassVar[str] = "creff"
    title: ClassVar[str] = "CReFF"
    paper: ClassVar[str] = (
        "Shang et al., Federated Learning on Heterogeneous and Long-Tailed Data via Classifier Re-Training with"
        " Federated Features, IJCAI 2022"
    )
    reports: ClassVar[Reports] = Reports(
        colour="#CC79A7",
        stroke="--",
        traces=(
            Trace(
                "apart",
                "gradient distance",
                description="Distance between the gradients of synthetic and real features after matching.",
            ),
        ),
    )

    synthetic: int = 100
    """Number of synthetic features per class (authors: 100)."""
    match_steps: int = 100
    """Gradient-matching steps on the synthetic features per round (authors: 100)."""
    match_lr: float = 0.1
    """Learning rate of the gradient-matching steps (authors: 0.1)."""
    retrain_epochs: int = 300
    """Epochs of retraining the last layer on the synthetic features (authors: 300)."""
    retrain_lr: float = 0.01
    """Learning rate of retraining (authors: 0.01)."""
    retrain_batch: int = 32
    """Batch size of retraining (authors: 32)."""

    def needs_head(self) -> bool:
        return True

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(1, self, "synthetic", "retrain_batch")
        at_least(0, self, "match_steps", "retrain_epochs")
        above_zero(self, "match_lr", "retrain_lr")

    def supports(self, task: Task) -> bool:
        """Support classes only: features are synthesised for each class."""
        return task.has_softmax

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Send which classes are held, and for each the gradient [C, d + 1] with respect to φ̂ at the received model."""
        weight, bias = last_layer(net)
        inputs = last_layer_inputs(net, client.received, data.x)
        received = client.inbox if "classifier.weight" in client.inbox else client.received
        names = ("classifier.weight", "classifier.bias") if received is client.inbox else (weight, bias)
        probabilities = torch.softmax(inputs @ received[names[0]].T + received[names[1]], dim=1)
        membership = class_membership(data, net.classes, probabilities.dtype)
        errors = (probabilities - functional.one_hot(data.y, net.classes)) * data.mask[:, None]  # p − e_c
        with_bias = torch.cat([inputs, torch.ones_like(inputs[:, :1])], dim=1)  # the bias is the weight of a constant 1
        counts = membership.sum(dim=0)
        gradients = torch.einsum("nc,no,nd->cod", membership, errors, with_bias) / counts.clamp(min=1)[:, None, None]
        return client, {"gradients": gradients, "holds": (counts > 0).to(gradients)}

    def model(self, net: Net, client: Client) -> Tensors:
        """Return the averaged model with φ̂ as its last layer; in the first round, the averaged model alone."""
        if "classifier.weight" not in client.inbox:
            return client.params
        weight, bias = last_layer(net)
        layer = {weight: client.inbox["classifier.weight"], bias: client.inbox["classifier.bias"]}
        return {**client.params, **layer}

    def server(self, net: Net, clients: int) -> State:
        """Return the initial state: synthetic features, drawn in the first round, and the initial last layer."""
        weight, bias = (net.initial[name] for name in last_layer(net))
        features = torch.zeros(net.classes, self.synthetic, weight.shape[1])
        return {"features": features, "classifier.weight": weight, "classifier.bias": bias}

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Match the gradients of the synthetic features, then retrain φ̂ from a new initialisation."""
        gradients, holds = uploads.extras["gradients"], uploads.extras["holds"]
        holders = holds.sum(dim=0)
        real = torch.einsum("kc,kcod->cod", holds, gradients) / holders.clamp(min=1)[:, None, None]
        initial = torch.as_tensor(state["features"])
        if moment.round == 1:
            initial = torch.randn(initial.shape, generator=moment.generator("features"), dtype=torch.float64)
        layer = [torch.as_tensor(state[name]).to(real) for name in ("classifier.weight", "classifier.bias")]
        features, distance = self.match(initial.to(real), real, (holders > 0).to(real), *layer)
        weight, bias = self.retrain(features, moment)
        sent = {"classifier.weight": weight, "classifier.bias": bias}
        return Answer({**uploads.mean, **sent}, state={"features": features, **sent}, trace={"apart": distance})

    def match(self, features: Tensor, real: Tensor, held: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, float]:
        """Return features [C, m, d] whose gradients align with the real ones [C, C, d + 1], and the last distance."""
        last_distance = 0.0
        for _ in range(self.match_steps):
            with torch.enable_grad():
                variable = features.detach().requires_grad_()
                distance = (gradient_distance(variable, real, weight, bias) * held).sum()
                (gradient,) = torch.autograd.grad(distance, variable)
            features, last_distance = features - self.match_lr * gradient, float(distance.detach())
        return features, last_distance

    def retrain(self, features: Tensor, moment: Moment) -> tuple[Tensor, Tensor]:
        """Return W and b after plain SGD on the cross-entropy of the features, from a new initialisation.

        Uses NumPy: the call overhead of torch or of a GPU would dominate ten thousand tiny steps.
        """
        classes, per_class, width = features.shape
        generator = moment.generator("classifier")
        drawn = 2 * torch.rand(classes, width + 1, generator=generator, dtype=torch.float64) - 1
        layer = drawn.numpy() * width**-0.5  # the bias is its last column
        x = features.flatten(0, 1).cpu().double().numpy()
        x = np.concatenate([x, np.ones((len(x), 1))], axis=1)
        targets = np.repeat(np.eye(classes), per_class, axis=0)
        for _ in range(self.retrain_epochs):
            order = torch.randperm(len(x), generator=generator).numpy()
            for first in range(0, len(x), self.retrain_batch):
                rows = order[first : first + self.retrain_batch]
                inputs = x[rows]
                logits = inputs @ layer.T
                exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
                errors = exponentials / exponentials.sum(axis=1, keepdims=True) - targets[rows]
                layer -= self.retrain_lr / len(rows) * (errors.T @ inputs)
        result = torch.from_numpy(layer).to(features)
        return result[:, :-1].contiguous(), result[:, -1].contiguous()


def gradient_distance(features: Tensor, real: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return Σ_rows (1 − cos) [C] between mean gradients (p − e_c) ⊗ h per class and real ones; the bias is a row."""
    classes, per_class, _ = features.shape
    targets = torch.eye(classes, device=features.device, dtype=features.dtype)[:, None, :]
    errors = (torch.softmax(features @ weight.T + bias, dim=2) - targets) / per_class
    weight_gradients, bias_gradients = torch.einsum("cmo,cmd->cod", errors, features), errors.sum(dim=1)
    rows = 1 - functional.cosine_similarity(weight_gradients, real[..., :-1], dim=2)
    return rows.sum(dim=1) + 1 - functional.cosine_similarity(bias_gradients, real[..., -1], dim=1)
