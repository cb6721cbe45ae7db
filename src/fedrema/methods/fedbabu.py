"""FedBABU: only the body is trained and averaged; the head is fine-tuned before evaluation."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from fedrema.core import Alternative, LocalTraining, Method, Moment, Phase, Reports, Role, everything
from fedrema.errors import at_least
from fedrema.models.body_and_head import Net


@dataclass(frozen=True)
class FedBABU(Method):
    """Body aggregation and body update: θ ← Σ (n_k/n) θ̂_k with a common random head that is never trained.

    The head does not change during training and is therefore not sent. Before a client is evaluated, a copy of its
    model is fine-tuned on its own samples and then discarded: by default the whole network, optionally only the head or
    the body. Public code that reports an accuracy for each round does so without fine-tuning (`--finetune-epochs 0`);
    that accuracy is always recorded too.
    """

    name: ClassVar[str] = "fedbabu"
    title: ClassVar[str] = "FedBABU"
    paper: ClassVar[str] = (
        "Oh et al., FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022"
    )
    reports: ClassVar[Reports] = Reports(
        colour="#009E73", stroke="--", alternatives=(Alternative("unadapted", "without fine-tuning"),)
    )

    finetune_epochs: int = 5
    """Epochs of fine-tuning before a client is evaluated; 0 evaluates the body with the random head."""
    finetune: Literal["all", "head", "body"] = "all"
    """Which part of the network is fine-tuned."""

    def needs_head(self) -> bool:
        return True

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(0, self, "finetune_epochs")

    def role(self, net: Net, name: str) -> Role:
        """Share the body only."""
        return Role.PRIVATE if net.in_head(name) else Role.SHARED

    def phases(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """Train the body only; no gradient of the head is computed."""
        return (Phase(local.epochs, local.rate(moment), local.momentum, trains=Net.in_body),)

    def adapt(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """Fine-tune a copy before evaluation."""
        if self.finetune_epochs == 0:
            return ()
        trains = {"all": everything, "head": Net.in_head, "body": Net.in_body}[self.finetune]
        return (Phase(self.finetune_epochs, local.rate(moment), local.momentum, trains=trains),)

    def beside(self) -> Mapping[str, Method]:
        """Also record the accuracy without fine-tuning."""
        return {"unadapted": replace(self, finetune_epochs=0)} if self.finetune_epochs else {}
