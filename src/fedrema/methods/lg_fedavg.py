"""LG-FedAvg: local representations, a global classifier."""

from dataclasses import dataclass
from typing import ClassVar

from fedrema.core import Method, Reports, Role
from fedrema.models.body_and_head import Net


@dataclass(frozen=True)
class LGFedAvg(Method):
    """FedPer the other way round: the head is averaged, φ ← Σ (n_k/n) φ̂_k; the body θ_k never leaves its client.

    Both are trained together on the cross-entropy. Only the head travels, which is the smaller part of most networks.
    Clients are scored with their own θ_k and the averaged φ. The authors begin with a model that FedAvg has trained
    for hundreds of rounds; here everyone begins with the same random network, as for all methods, so that nobody gets
    rounds that are not counted. Their public code shares convolutions on CIFAR-10, the reverse of the idea; here it is
    the head, whatever the network.
    """

    name: ClassVar[str] = "lg-fedavg"
    title: ClassVar[str] = "LG-FedAvg"
    paper: ClassVar[str] = (
        "Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global Representations, 2020,"
        " arXiv:2001.01523"
    )
    reports: ClassVar[Reports] = Reports(colour="#999999", stroke="-.")

    def role(self, net: Net, name: str) -> Role:
        """Share the head only."""
        return Role.SHARED if net.in_head(name) else Role.PRIVATE
