"""FedProx: FedAvg with a proximal term that limits client drift."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedrema.base.options import option
from fedrema.core import Batch, Client, Method, Reports, task_loss
from fedrema.errors import at_least
from fedrema.methods.shared.second_models import squared_distance
from fedrema.models.body_and_head import Net


@dataclass(frozen=True)
class FedProx(Method):
    """Each client minimises F_k(w) + (µ/2) ‖w − w_g‖², where w_g is the received model.

    Aggregation and evaluation are those of FedAvg. The proximal gradient µ (w − w_g) is part of the gradient: it is
    clipped and enters the momentum like the rest. The paper tries µ ∈ {0.001, 0.01, 0.1, 1}; the FedReMa paper compares
    with µ = 1, which the presets of its experiments (`--paper`) and the leaderboard use. With momentum and many local
    steps, µ = 1 can keep a model from learning.
    """

    name: ClassVar[str] = "fedprox"
    title: ClassVar[str] = "FedProx"
    paper: ClassVar[str] = "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020"
    reports: ClassVar[Reports] = Reports(colour="#56B4E9")

    mu: float = option(0.01, joint=True)
    """µ: weight of the proximal term; 0 is FedAvg."""

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(0, self, "mu")

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return F_k(w) + (µ/2) ‖w − w_g‖²."""
        distance = squared_distance(net, client.params, client.received)
        return task_loss(net, net(client.params, batch.x), batch) + self.mu / 2 * distance
