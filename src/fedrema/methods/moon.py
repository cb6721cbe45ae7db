"""MOON: FedAvg whose features agree with the global model's rather than with one's own past."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fedrema.core import Batch, Client, Method, Moment, Reports, cross_entropy
from fedrema.errors import above_zero, at_least
from fedrema.methods.shared.second_models import copied, copy_of
from fedrema.models.body_and_head import Net, Tensors


@dataclass(frozen=True)
class MOON(Method):
    """Model-contrastive learning: CE + µ · mean −log[e^{s_g/τ} / (e^{s_g/τ} + e^{s_p/τ})].

    s_g and s_p are cosines between the features of the model in training and those of the received global model, and
    of the model this client trained last. Before a client has trained there is nothing to keep away from, and the
    term is 0 (the authors' code does so in the first round only, and later contrasts with a random network).
    Averaged and scored as FedAvg.

    The authors contrast the output of a two-layer projection (256 wide) that lies in the network before the classifier:
    `--projection 256` puts it there, for any method, so that a comparison is fair. The default is what other public
    code and the FedReMa paper contrast: the features as they are, whose cosines are close to 1 after a ReLU.

    The features of both fixed models are computed once per round for all samples, not in every step.
    """

    name: ClassVar[str] = "moon"
    title: ClassVar[str] = "MOON"
    paper: ClassVar[str] = "Li et al., Model-Contrastive Federated Learning, CVPR 2021"
    reports: ClassVar[Reports] = Reports(colour="#000000")

    mu: float = 1.0
    """µ: weight of the contrast (authors: 1, 5 or 10, by dataset); 0 is FedAvg."""
    temperature: float = 0.5
    """τ: divides the cosines; smaller is sharper."""

    def __post_init__(self) -> None:
        """Refuse settings without meaning."""
        at_least(0, self, "mu")
        above_zero(self, "temperature")

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Make room for the feature extractor trained last."""
        return client.having(memory={**_body(net, client), "trained": client.count.new_zeros(())})

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Compute z_glob and z_prev, of which only the direction matters, for every sample."""
        received = functional.normalize(net.features(client.params, data.x), dim=1)
        previous = functional.normalize(net.features(copy_of(client.memory, "previous"), data.x), dim=1)
        return client.having(inbox={**client.inbox, "z_global": received, "z_previous": previous})

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """ℓ_sup + µ ℓ_con."""
        features = net.features(client.params, batch.x)
        contrasts = contrast(
            features, client.inbox["z_global"][batch.index], client.inbox["z_previous"][batch.index], self.temperature
        )
        contrasted = (contrasts * batch.mask).sum() / batch.mask.sum().clamp(min=1) * client.memory["trained"]
        return cross_entropy(net.classify(client.params, features), batch) + self.mu * contrasted

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Keep the trained feature extractor."""
        return client.having(memory={**_body(net, client), "trained": torch.ones_like(client.memory["trained"])}), {}


def contrast(features: Tensor, z_global: Tensor, z_previous: Tensor, temperature: float) -> Tensor:
    """Return ℓ_con of each sample [n]; its last two inputs have length 1."""
    direction = functional.normalize(features, dim=1)
    towards, away = ((direction * z).sum(dim=1) / temperature for z in (z_global, z_previous))
    return functional.softplus(away - towards)  # −log[e^a / (e^a + e^b)] = log(1 + e^{b−a})


def _body(net: Net, client: Client) -> Tensors:
    return copied({name: value for name, value in client.params.items() if net.in_body(name)}, "previous")
