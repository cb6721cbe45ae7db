"""FedPrior: one model says what the samples show, everyone's own class frequencies what is usual there."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from fedrema.core import Batch, Client, Method, Moment
from fedrema.errors import above_zero
from fedrema.last_layer import last_layer
from fedrema.net import Net, Tensors


@dataclass(frozen=True)
class FedPrior(Method):
    """FedAvg of a model in which every client has its own, known class frequencies: p_k(y | x) ∝ π_ky e^{z_y(x)}.

    log π_k is added to the bias of client k's last layer, in training as in use, where π_kc = (n_kc + a) / (n_k + a C)
    and n_kc are its numbers of samples by class. So z need not learn how frequent classes are at whom, and what is
    averaged has one meaning everywhere: how much a sample speaks for a class (balanced softmax, or logit adjustment,
    with each client's own frequencies). Where all clients have all classes alike, this is FedAvg; where they differ,
    a client's answers lean to what is usual there. z is averaged and travels; π_k never leaves its client.

    It knows of no difference between clients but their class frequencies.
    """

    name: ClassVar[str] = "fedprior"
    title: ClassVar[str] = "FedPrior"
    paper: ClassVar[str] = (
        "ours (docs/beyond.md), after Menon et al., Long-tail Learning via Logit Adjustment, ICLR 2021"
    )

    smooth: float = 1.0
    """a: added to the number of samples of every class, so that what a client has not met is rare, not impossible."""

    def __post_init__(self) -> None:
        """Refuse what would make an unseen class impossible."""
        above_zero(self, "smooth")

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Begin with no preference, for those who are scored before they first train."""
        _, bias = last_layer(net)
        return client.having(memory={**client.memory, "log_prior": client.params[bias] * 0})

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Compute log π_k."""
        member = functional.one_hot(data.y, net.classes).to(client.memory["log_prior"])
        counts = (member * data.mask[:, None]).sum(dim=0) + self.smooth
        return client.having(memory={**client.memory, "log_prior": (counts / counts.sum()).log()})

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """−log[π_ky e^{z_y} / Σ_c π_kc e^{z_c}]."""
        return super().loss(net, client.having(params=self.model(net, client)), batch)

    def model(self, net: Net, client: Client) -> Tensors:
        """Answer with z + log π_k."""
        _, bias = last_layer(net)
        return {**client.params, bias: client.params[bias] + client.memory["log_prior"]}
