"""Variants of FedPrior."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from fedrema.core import Batch, Client
from fedrema.methods.fedprior import FedPrior
from fedrema.methods.fedrema import FedReMa
from fedrema.models.body_and_head import Net

from .base import OURS


@dataclass(frozen=True)
class PriorMatched(FedPrior, FedReMa):
    """FedReMa+P: FedReMa whose classifiers need not learn the frequencies; without T, b and the best round."""

    name: ClassVar[str] = "prior-matched"
    title: ClassVar[str] = "FedReMa+P"
    paper: ClassVar[str] = OURS
    align: float = 0.0
    held_out: float = 0.0


@dataclass(frozen=True)
class Doubtful(FedPrior):
    """FedPrior without a temperature, whose labels are doubted instead: (1 − ε) of each is its class, ε is π_k."""

    name: ClassVar[str] = "doubtful"
    title: ClassVar[str] = "doubted labels"
    paper: ClassVar[str] = OURS
    align: float = 0.0
    held_out: float = 0.0
    doubt: float = 0.3
    """ε."""

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Cross-entropy with (1 − ε) e_y + ε π."""
        chances = functional.log_softmax(net(self.model(net, client), batch.x), dim=1)
        usual = client.memory["log_prior"].exp()
        truth = (1 - self.doubt) * functional.one_hot(batch.y, net.classes).to(usual) + self.doubt * usual
        return -((chances * truth).sum(dim=1) * batch.mask).sum() / batch.mask.sum().clamp(min=1)
