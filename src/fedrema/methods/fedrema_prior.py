"""FedReMa+P: FedReMa, in which nobody's head has to learn how frequent classes are at its client."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedrema.core import Batch, Client
from fedrema.methods.fedprior import FedPrior
from fedrema.methods.fedrema import FedReMa
from fedrema.net import Net


@dataclass(frozen=True)
class FedReMaPrior(FedPrior, FedReMa):
    """FedReMa with known class frequencies: client k's classifier answers φ_k(h) + log π_k, in training as in use.

    π_k is FedPrior's. In FedReMa a head learns two things at once: what samples look like, which others can teach, and
    how frequent classes are at its client, which they cannot. The second drives heads apart, is what probes see of
    them, and is lost in every average with a peer that has other frequencies. Here it is known and left out of the
    head, so that averaging with too many peers costs little, and averaging with the right ones still gains.

    Everything else is FedReMa's (Algorithms 1 and 2), its settings and extensions too.
    """

    name: ClassVar[str] = "fedrema-prior"
    title: ClassVar[str] = "FedReMa+P"
    paper: ClassVar[str] = "ours (docs/beyond.md), after Liang et al., FedReMa, ECAI 2024"

    def __post_init__(self) -> None:
        """Refuse settings without meaning."""
        FedReMa.__post_init__(self)
        FedPrior.__post_init__(self)

    def head_loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Train the head alone under the known frequencies too."""
        return super().head_loss(net, self._knowing(net, client), self._trained(batch))
