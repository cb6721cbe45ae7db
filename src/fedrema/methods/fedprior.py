"""FedPrior: one model says what the samples show, everyone's own class frequencies what is usual there."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from fedrema.core import Batch, Client, Method, Moment
from fedrema.errors import at_least
from fedrema.last_layer import last_layer
from fedrema.net import Net, Tensors

SMOOTHINGS = 2.0 ** torch.arange(-4, 11, 0.5, dtype=torch.float64)
"""The values of a that are tried, from a sixteenth to over a thousand; the differences are too small for float32."""


@dataclass(frozen=True)
class FedPrior(Method):
    """FedAvg of a model in which every client has its own, known class frequencies: p_k(y | x) ∝ π_ky e^{z_y(x)}.

    log π_k is added to the bias of client k's last layer, in training as in use, where π_kc = (n_kc + a) / (n_k + a C)
    and n_kc are its numbers of samples by class. So z need not learn how frequent classes are at whom, and what is
    averaged has one meaning everywhere: how much a sample speaks for a class (balanced softmax, or logit adjustment,
    with each client's own frequencies). A client whose numbers are no more unequal than by chance has a large a, and
    so equal frequencies: where all clients are such, this is FedAvg. z is averaged and travels; π_k never leaves its
    client.

    It knows of no difference between clients but their class frequencies.
    """

    name: ClassVar[str] = "fedprior"
    title: ClassVar[str] = "FedPrior"
    paper: ClassVar[str] = (
        "ours (docs/beyond.md), after Menon et al., Long-tail Learning via Logit Adjustment, ICLR 2021"
    )

    smooth: float = 0.0
    """a: added to the number of samples of every class, so that what a client has not met is rare, not impossible;
    0: each client's own, under which its numbers are likeliest."""

    def __post_init__(self) -> None:
        """Refuse settings without meaning."""
        at_least(0, self, "smooth")

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Begin with no preference, for those who are scored before they first train."""
        _, bias = last_layer(net)
        return client.having(memory={**client.memory, "log_prior": client.params[bias] * 0})

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Compute log π_k."""
        member = functional.one_hot(data.y, net.classes).to(client.memory["log_prior"])
        counts = (member * data.mask[:, None]).sum(dim=0)
        counts = counts + (self.smooth or likeliest_smoothing(counts))
        return client.having(memory={**client.memory, "log_prior": (counts / counts.sum()).log()})

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """−log[π_ky e^{z_y} / Σ_c π_kc e^{z_c}]."""
        return super().loss(net, client.having(params=self.model(net, client)), batch)

    def model(self, net: Net, client: Client) -> Tensors:
        """Answer with z + log π_k."""
        _, bias = last_layer(net)
        return {**client.params, bias: client.params[bias] + client.memory["log_prior"]}


def likeliest_smoothing(counts: Tensor) -> Tensor:
    """Return the a under which numbers n_c [C] are likeliest, if class frequencies are drawn from Dirichlet(a, …, a).

    The likelihood is Γ(aC)/Γ(n + aC) · Π_c Γ(n_c + a)/Γ(a). Numbers that chance alone would make as unequal as they
    are have the largest a: then they say nothing, and all classes count alike.
    """
    tried = SMOOTHINGS.to(counts.device)
    classes, total = len(counts), counts.sum()
    of_classes = (torch.lgamma(counts.double() + tried[:, None]) - torch.lgamma(tried)[:, None]).sum(dim=1)
    likelihood = torch.lgamma(tried * classes) - torch.lgamma(total + tried * classes) + of_classes
    return tried[likelihood.argmax()].to(counts)
