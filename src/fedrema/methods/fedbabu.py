"""FedBABU: only the body is trained together; heads come at the end."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from fedrema.core import LocalTraining, Method, Moment, Phase, Reports, Role, everything
from fedrema.errors import at_least
from fedrema.models.body_and_head import Net


@dataclass(frozen=True)
class FedBABU(Method):
    """Body aggregation and body update: θ ← Σ (n_k/n) θ̂_k under a random head, the same for all and never trained.

    Since nobody ever changes the head during training, it does not travel. Before a client is scored, a copy of its
    model is fine-tuned on its own samples and thrown away afterwards: the whole network by
    default, or only the head or the body. Public code that reports the accuracy of each round does so *without*
    fine-tuning: `--finetune-epochs 0`; that accuracy is recorded beside the fine-tuned one in any case.
    """

    name: ClassVar[str] = "fedbabu"
    title: ClassVar[str] = "FedBABU"
    paper: ClassVar[str] = (
        "Oh et al., FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022"
    )
    reports: ClassVar[Reports] = Reports(colour="#009E73", stroke="--")

    finetune_epochs: int = 5
    """Epochs of fine-tuning before a client is scored; 0 scores the body with the random head."""
    finetune: Literal["all", "head", "body"] = "all"
    """Which part fine-tuning trains."""

    def __post_init__(self) -> None:
        """Refuse settings without meaning."""
        at_least(0, self, "finetune_epochs")

    def role(self, net: Net, name: str) -> Role:
        """Share the body only."""
        return Role.PRIVATE if net.in_head(name) else Role.SHARED

    def phases(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """Train the body; the head is not even differentiated."""
        return (Phase(local.epochs, local.rate(moment), local.momentum, trains=Net.in_body),)

    def adapt(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """Fine-tune."""
        if self.finetune_epochs == 0:
            return ()
        trains = {"all": everything, "head": Net.in_head, "body": Net.in_body}[self.finetune]
        return (Phase(self.finetune_epochs, local.rate(moment), local.momentum, trains=trains),)

    def beside(self) -> Mapping[str, Method]:
        """Record the accuracy without fine-tuning too."""
        return {"unadapted": replace(self, finetune_epochs=0)} if self.finetune_epochs else {}
