"""Ditto: FedAvg's global model, and a personal model per client regularised towards it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from fedrema.core import Alternative, Batch, Client, LocalTraining, Method, Moment, Phase, Reports, Role, task_loss
from fedrema.errors import at_least
from fedrema.methods.shared.second_models import copied, copy_of, network_tensors, squared_distance
from fedrema.models.body_and_head import Net, Tensors


@dataclass(frozen=True)
class Ditto(Method):
    """Each client trains a second network v_k to minimise F_k(v) + (λ/2) ‖v − w_g‖², w_g being the received model.

    The global model is FedAvg's: w ← Σ (n_k/n) ŵ_k. In every round a client trains v_k for E epochs, then w for E
    epochs: twice the local work of FedAvg. Neither uses the other's result, so their order does not matter (the authors
    alternate on the same batch). Only w is sent. Clients are evaluated with v_k; the accuracy of the global model is
    recorded too. With λ = 0 the personal models are those of Local; a large λ keeps them close to FedAvg's model.
    """

    name: ClassVar[str] = "ditto"
    title: ClassVar[str] = "Ditto"
    paper: ClassVar[str] = "Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021"
    reports: ClassVar[Reports] = Reports(
        colour="#56B4E9", stroke="-.", alternatives=(Alternative("global", "global model"),)
    )

    tie: float = 1.0
    """λ: strength of the regularisation towards the global model (authors: 1, or chosen from 0.1, 1, 2)."""
    predict_by: Literal["personal", "global"] = "personal"
    """Which of the two models predicts."""

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(0, self, "tie")

    def role(self, net: Net, name: str) -> Role:
        """Share the global model only."""
        return Role.PRIVATE if name.startswith("personal.") else Role.SHARED

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Initialise v_k as a copy of the global model."""
        return client.having(params={**client.params, **copied(client.params, "personal")})

    def phases(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """Plan E epochs of v_k, then E epochs of w."""
        plan = (local.epochs, local.rate(moment), local.momentum)
        return Phase(*plan, trains=_is_personal, loss=self.personal_loss), Phase(*plan, trains=_is_global)

    def personal_loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return F_k(v) + (λ/2) ‖v − w_g‖²."""
        own = copy_of(client.params, "personal")
        distance = squared_distance(net, own, client.received)
        return task_loss(net, net(own, batch.x), batch) + self.tie / 2 * distance

    def model(self, net: Net, client: Client) -> Tensors:
        """Return v_k, or the global model with `predict_by="global"`."""
        return (
            copy_of(client.params, "personal") if self.predict_by == "personal" else network_tensors(net, client.params)
        )

    def beside(self) -> Mapping[str, Method]:
        """Also record the accuracy of the global model."""
        return {} if self.predict_by == "global" else {"global": replace(self, predict_by="global")}


def _is_personal(name: str) -> bool:
    return name.startswith("personal.")


def _is_global(name: str) -> bool:
    return not name.startswith("personal.")
