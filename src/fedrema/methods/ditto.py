"""Ditto: a global model as ever, and beside it a personal one that is tied to it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from fedrema.core import Batch, Client, LocalTraining, Method, Moment, Phase, Reports, Role, cross_entropy
from fedrema.errors import at_least
from fedrema.methods.shared.second_models import copied, copy_of, model_of, squared_distance
from fedrema.models.body_and_head import Net, Tensors


@dataclass(frozen=True)
class Ditto(Method):
    """Each client keeps a second network v_k and minimises F_k(v) + (λ/2) ‖v − w_g‖², w_g being the model it received.

    The global model is FedAvg's: w ← Σ (n_k/n) ŵ_k. In every round a client trains v_k for E epochs, then w for E
    epochs: twice FedAvg's work. Neither step looks at the other's result, so that their order does not matter (the
    authors take them in turn on the same batch). Only w travels. Clients are scored with v_k; the global model's
    accuracy is recorded beside it. With λ = 0 the personal models are Local's, and a large λ ties them to FedAvg's.
    """

    name: ClassVar[str] = "ditto"
    title: ClassVar[str] = "Ditto"
    paper: ClassVar[str] = "Li et al., Ditto: Fair and Robust Federated Learning Through Personalization, ICML 2021"
    reports: ClassVar[Reports] = Reports(colour="#56B4E9", stroke="-.")

    tie: float = 1.0
    """λ: how strongly a personal model is held to the global one (authors: 1, or chosen from 0.1, 1, 2)."""
    predict_by: Literal["personal", "global"] = "personal"
    """Which of the two models answers."""

    def __post_init__(self) -> None:
        """Refuse settings without meaning."""
        at_least(0, self, "tie")

    def role(self, net: Net, name: str) -> Role:
        """Share the global model only."""
        return Role.PRIVATE if name.startswith("personal.") else Role.SHARED

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Add v_k, at first a copy of the global model."""
        return client.having(params={**client.params, **copied(client.params, "personal")})

    def phases(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """Train v_k, then w."""
        plan = (local.epochs, local.rate(moment), local.momentum)
        return Phase(*plan, trains=_personal, loss=self.personal_loss), Phase(*plan, trains=_global)

    def personal_loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """F_k(v) + (λ/2) ‖v − w_g‖²."""
        own = copy_of(client.params, "personal")
        distance = squared_distance(net, own, client.received)
        return cross_entropy(net(own, batch.x), batch) + self.tie / 2 * distance

    def model(self, net: Net, client: Client) -> Tensors:
        """Answer with v_k."""
        return copy_of(client.params, "personal") if self.predict_by == "personal" else model_of(net, client.params)

    def beside(self) -> Mapping[str, Method]:
        """Record the global model's accuracy too."""
        return {} if self.predict_by == "global" else {"global": replace(self, predict_by="global")}


def _personal(name: str) -> bool:
    return name.startswith("personal.")


def _global(name: str) -> bool:
    return not name.startswith("personal.")
