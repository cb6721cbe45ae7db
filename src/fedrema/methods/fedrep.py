"""FedRep: a shared body, trained after the private head has been fitted to it."""

from dataclasses import dataclass
from typing import ClassVar

from fedrema.core import LocalTraining, Method, Moment, Phase, Reports, Role
from fedrema.errors import at_least
from fedrema.models.body_and_head import Net


@dataclass(frozen=True)
class FedRep(Method):
    """The body θ is averaged, the head φ_k is private, and the two are trained one after the other.

    In every round a client first fits its head to the received body, φ_k ← argmin F_k(θ, φ) by `head_epochs` epochs,
    and then trains the body for E epochs with that head; no gradient of the other part is computed. The server averages
    the bodies, θ ← Σ (n_k/n) θ̂_k (the authors: equal weights on CIFAR-10, by counts on FEMNIST). Only θ is sent.
    Clients are evaluated with the averaged θ and their own φ_k. After the last round the authors fit all heads for ten
    more epochs; `--finetune-epochs 10` does this on a copy before every evaluation.
    """

    name: ClassVar[str] = "fedrep"
    title: ClassVar[str] = "FedRep"
    paper: ClassVar[str] = (
        "Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021"
    )
    reports: ClassVar[Reports] = Reports(colour="#009E73", stroke="-.")

    head_epochs: int = 10
    """Epochs of fitting the head before the E epochs of the body (authors: 10; their E is 1 or 5, depending on the
    dataset)."""
    finetune_epochs: int = 0
    """Epochs of fitting a copy of the head before a client is evaluated."""

    def needs_head(self) -> bool:
        return True

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(0, self, "head_epochs", "finetune_epochs")

    def role(self, net: Net, name: str) -> Role:
        """Share the body only."""
        return Role.PRIVATE if net.in_head(name) else Role.SHARED

    def phases(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """Train the head only, then the body only."""
        rate, momentum = local.rate(moment), local.momentum
        return (
            Phase(self.head_epochs, rate, momentum, trains=Net.in_head),
            Phase(local.epochs, rate, momentum, trains=Net.in_body),
        )

    def adapt(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """Fit a copy of the head once more if `finetune_epochs` is set."""
        if self.finetune_epochs == 0:
            return ()
        return (Phase(self.finetune_epochs, local.rate(moment), local.momentum, trains=Net.in_head),)
