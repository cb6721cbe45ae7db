"""FedRep: a common representation, learnt with heads that fit each client first."""

from dataclasses import dataclass
from typing import ClassVar

from fedrema.core import LocalTraining, Method, Moment, Phase, Reports, Role
from fedrema.errors import at_least
from fedrema.models.body_and_head import Net


@dataclass(frozen=True)
class FedRep(Method):
    """The body θ is averaged, the head φ_k stays at home, and the two are trained one after the other.

    In every round a client first fits its head to the received body, φ_k ← argmin F_k(θ, φ) by `head_epochs` epochs,
    and then trains the body for E epochs under that head; what is not trained is not even differentiated. The server
    averages bodies, θ ← Σ (n_k/n) θ̂_k (the authors: equally on CIFAR-10, by counts on FEMNIST). Only θ travels.
    Clients are scored with the averaged θ and their own φ_k. After the last round the authors fit all heads once more,
    for ten epochs; `--finetune-epochs 10` does so, on a copy, before every scoring.
    """

    name: ClassVar[str] = "fedrep"
    title: ClassVar[str] = "FedRep"
    paper: ClassVar[str] = (
        "Collins et al., Exploiting Shared Representations for Personalized Federated Learning, ICML 2021"
    )
    reports: ClassVar[Reports] = Reports(colour="#009E73", stroke="-.")

    head_epochs: int = 10
    """Epochs that fit the head before the body's E (authors: 10; their E is 1 or 5, by dataset)."""
    finetune_epochs: int = 0
    """Epochs that fit a copy of the head before a client is scored."""

    def __post_init__(self) -> None:
        """Refuse settings without meaning."""
        at_least(0, self, "head_epochs", "finetune_epochs")

    def role(self, net: Net, name: str) -> Role:
        """Share the body only."""
        return Role.PRIVATE if net.in_head(name) else Role.SHARED

    def phases(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """Train the head alone, then the body alone."""
        rate, momentum = local.rate(moment), local.momentum
        return (
            Phase(self.head_epochs, rate, momentum, trains=Net.in_head),
            Phase(local.epochs, rate, momentum, trains=Net.in_body),
        )

    def adapt(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """Fit the head once more, if asked to."""
        if self.finetune_epochs == 0:
            return ()
        return (Phase(self.finetune_epochs, local.rate(moment), local.momentum, trains=Net.in_head),)
