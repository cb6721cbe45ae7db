"""MOON: FedAvg with a contrastive loss that attracts features to those of the global model."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fedrema.core import Batch, Client, Method, Moment, Reports, task_loss
from fedrema.errors import above_zero, at_least
from fedrema.methods.shared.second_models import copied, copy_of
from fedrema.models.body_and_head import Net, Tensors


@dataclass(frozen=True)
class MOON(Method):
    """Model-contrastive learning: CE + µ · mean −log[e^{s_g/τ} / (e^{s_g/τ} + e^{s_p/τ})].

    s_g and s_p are the cosines between the features of the model in training and those of the received global model and
    of the client's previously trained model. Before a client has trained, there is no previous model and the term is 0
    (the authors' code does this in the first round only; later it contrasts with a random network). Aggregation and
    evaluation are those of FedAvg.

    The authors contrast the output of a two-layer projection (width 256) inside the network, before the
    classifier. `--projection 256` adds it, for any method, which allows a fair comparison. The default contrasts the
    features themselves, as other public code and the FedReMa paper do; after a ReLU their cosines are close to 1.

    The features of the two fixed models are computed once per round for all samples, not in every step.
    """

    name: ClassVar[str] = "moon"
    title: ClassVar[str] = "MOON"
    paper: ClassVar[str] = "Li et al., Model-Contrastive Federated Learning, CVPR 2021"
    reports: ClassVar[Reports] = Reports(colour="#000000")

    mu: float = 1.0
    """µ: weight of the contrastive loss (authors: 1, 5 or 10, depending on the dataset); 0 is FedAvg."""
    temperature: float = 0.5
    """τ: divides the cosines; a smaller value gives a sharper contrast."""

    def needs_head(self) -> bool:
        return True

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(0, self, "mu")
        above_zero(self, "temperature")

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Initialise the stored previous body."""
        return client.having(memory={**_stored_body(net, client), "trained": client.count.new_zeros(())})

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Compute z_glob and z_prev, normalised, for every sample."""
        received = functional.normalize(net.features(client.params, data.x), dim=1)
        previous = functional.normalize(net.features(copy_of(client.memory, "previous"), data.x), dim=1)
        return client.having(inbox={**client.inbox, "z_global": received, "z_previous": previous})

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return ℓ_sup + µ ℓ_con."""
        features = net.features(client.params, batch.x)
        losses = contrastive_loss(
            features, client.inbox["z_global"][batch.index], client.inbox["z_previous"][batch.index], self.temperature
        )
        contrast = (losses * batch.mask).sum() / batch.mask.sum().clamp(min=1) * client.memory["trained"]
        return task_loss(net, net.classify(client.params, features), batch) + self.mu * contrast

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Store the trained body."""
        return client.having(
            memory={**_stored_body(net, client), "trained": torch.ones_like(client.memory["trained"])}
        ), {}


def contrastive_loss(features: Tensor, z_global: Tensor, z_previous: Tensor, temperature: float) -> Tensor:
    """Return ℓ_con of each sample [n]; `z_global` and `z_previous` are normalised."""
    direction = functional.normalize(features, dim=1)
    to_global, to_previous = ((direction * z).sum(dim=1) / temperature for z in (z_global, z_previous))
    return functional.softplus(to_previous - to_global)  # −log[e^a / (e^a + e^b)] = log(1 + e^{b−a})


def _stored_body(net: Net, client: Client) -> Tensors:
    return copied({name: value for name, value in client.params.items() if net.in_body(name)}, "previous")
