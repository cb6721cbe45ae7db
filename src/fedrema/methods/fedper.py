"""FedPer: a shared body, and a private head on every client."""

from dataclasses import dataclass
from typing import ClassVar

from fedrema.core import Method, Reports, Role
from fedrema.models.body_and_head import Net


@dataclass(frozen=True)
class FedPer(Method):
    """The feature extractor is averaged, θ ← Σ (n_k/n) θ̂_k; the classifier φ_k never leaves its client.

    Both are trained jointly on the cross-entropy. Clients are evaluated with the averaged θ and their own φ_k.
    """

    name: ClassVar[str] = "fedper"
    title: ClassVar[str] = "FedPer"
    paper: ClassVar[str] = "Arivazhagan et al., Federated Learning with Personalization Layers, 2019, arXiv:1912.00818"
    reports: ClassVar[Reports] = Reports(colour="#009E73")

    def needs_head(self) -> bool:
        return True

    def role(self, net: Net, name: str) -> Role:
        """Share the body only."""
        return Role.PRIVATE if net.in_head(name) else Role.SHARED
