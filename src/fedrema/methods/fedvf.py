"""FedVF: all layers are averaged at first, later the classifier less frequently. A reconstruction."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from fedrema.core import Alternative, Batch, Client, Method, Moment, Reports
from fedrema.errors import BadInput, at_least
from fedrema.methods.shared.second_models import copied, copy_of
from fedrema.models.body_and_head import Net, Tensors


@dataclass(frozen=True)
class FedVF(Method):
    """A RECONSTRUCTION from the paper's abstract; schedule and settings are ours, and its numbers are not the authors'.

    According to the abstract, layers are updated at different frequencies in an early and a late stage, which yields a
    global model and personal models in one run. Here the first stage is FedAvg. In the second stage the body is
    averaged in every round, but the averaged classifier replaces the clients' own only every `head_every` rounds. Body
    and classifier are averaged by sample counts, θ, φ ← Σ (n_k/n) θ̂_k, φ̂_k, and are sent in every round, even if
    clients do not use the averaged classifier. Clients are evaluated with the averaged body and the classifier that
    they trained, before an average replaces it; the accuracy of the global model is recorded too.
    """

    name: ClassVar[str] = "fedvf"
    title: ClassVar[str] = "FedVF (reconstruction)"
    paper: ClassVar[str] = (
        "FedVF: Personalized Federated Learning Based on Layer-wise Parameter Updates with Variable Frequency, 2021;"
        " known from its abstract only"
    )
    reports: ClassVar[Reports] = Reports(
        colour="#999999", stroke=":", alternatives=(Alternative("global", "global model"),)
    )

    first_stage: float = 0.5
    """Share of the rounds in which everything is averaged (ours; the authors' value is unknown)."""
    head_every: int = 10
    """In the second stage, replace the classifier by the average every this many rounds (ours)."""
    predict_by: Literal["personal", "global"] = "personal"
    """Predict with the client's own classifier or with the averaged one."""

    def needs_head(self) -> bool:
        return True

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(1, self, "head_every")
        if not 0 <= self.first_stage <= 1:
            raise BadInput(f"--first-stage must be in [0, 1], got {self.first_stage}.")

    def uses_average(self, moment: Moment) -> bool:
        """Return whether clients start a round with the averaged classifier."""
        return moment.round <= self.first_stage * moment.rounds + 1 or (moment.round - 1) % self.head_every == 0

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Store the client's classifier."""
        return client.having(memory=_stored_head(net, client))

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Use the client's own classifier unless the average is due."""
        if self.uses_average(moment):
            return client
        return client.having(params={**client.params, **copy_of(client.memory, "own")})

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Store the trained classifier."""
        return client.having(memory=_stored_head(net, client)), {}

    def model(self, net: Net, client: Client) -> Tensors:
        """Return the averaged body with the client's own classifier, or the global model."""
        own = copy_of(client.memory, "own") if self.predict_by == "personal" else {}
        return {**client.params, **own}

    def beside(self) -> Mapping[str, Method]:
        """Also record the accuracy of the global model."""
        return {} if self.predict_by == "global" else {"global": replace(self, predict_by="global")}


def _stored_head(net: Net, client: Client) -> Tensors:
    return copied({name: value for name, value in client.params.items() if net.in_head(name)}, "own")
