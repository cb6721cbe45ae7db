"""LG-FedAvg: local representations, a global classifier."""

from dataclasses import dataclass
from typing import ClassVar

from fedrema.core import Method, Reports, Role
from fedrema.models.body_and_head import Net


@dataclass(frozen=True)
class LGFedAvg(Method):
    """The reverse of FedPer: the head is averaged, φ ← Σ (n_k/n) φ̂_k; the body θ_k never leaves its client.

    Both are trained jointly on the cross-entropy. Only the head is sent, which is the smaller part of most networks.
    Clients are evaluated with their own θ_k and the averaged φ. The authors start from a model that FedAvg has trained
    for hundreds of rounds; here, as for all methods, all clients start from the same random network, so that no
    uncounted rounds are used. The authors' code for CIFAR-10 shares the convolutions, the reverse of the idea; here the
    head is shared for every network.
    """

    name: ClassVar[str] = "lg-fedavg"
    title: ClassVar[str] = "LG-FedAvg"
    paper: ClassVar[str] = (
        "Liang et al., Think Locally, Act Globally: Federated Learning with Local and Global Representations, 2020,"
        " arXiv:2001.01523"
    )
    reports: ClassVar[Reports] = Reports(colour="#999999", stroke="-.")

    def needs_head(self) -> bool:
        return True

    def role(self, net: Net, name: str) -> Role:
        """Share the head only."""
        return Role.SHARED if net.in_head(name) else Role.PRIVATE
