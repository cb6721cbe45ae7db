"""FedVF: first everything is averaged, later the classifier only now and then. A reconstruction."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from fedrema.core import Batch, Client, Method, Moment, Reports
from fedrema.errors import BadInput, at_least
from fedrema.methods.shared.second_models import copied, copy_of
from fedrema.models.body_and_head import Net, Tensors


@dataclass(frozen=True)
class FedVF(Method):
    """A RECONSTRUCTION from the paper's abstract; schedule and settings are ours, and its numbers are not the authors'.

    The abstract says that layers are updated at different frequencies, in an earlier and a later stage, which yields a
    global model and personal ones in one run. Here the first stage is FedAvg; in the second the body is averaged in
    every round, and the averaged classifier replaces clients' own every `head_every` rounds only. Body and classifier
    are averaged by sample counts, θ, φ ← Σ (n_k/n) θ̂_k, φ̂_k, and travel in every round, also when a client does not
    take the classifier over. Clients are scored with the averaged body and the classifier that they trained
    themselves, before any average replaces it; the global model's accuracy is recorded beside it.
    """

    name: ClassVar[str] = "fedvf"
    title: ClassVar[str] = "FedVF (reconstruction)"
    paper: ClassVar[str] = (
        "FedVF: Personalized Federated Learning Based on Layer-wise Parameter Updates with Variable Frequency, 2021;"
        " known from its abstract only"
    )
    reports: ClassVar[Reports] = Reports(colour="#999999", stroke=":")

    first_stage: float = 0.5
    """Share of the rounds in which everything is averaged (ours; the authors' is not known)."""
    head_every: int = 10
    """In the second stage, take over the averaged classifier every this many rounds (ours)."""
    predict_by: Literal["personal", "global"] = "personal"
    """Answer with one's own classifier or with the averaged one."""

    def __post_init__(self) -> None:
        """Refuse settings without meaning."""
        at_least(1, self, "head_every")
        if not 0 <= self.first_stage <= 1:
            raise BadInput(f"--first-stage must lie in [0, 1], got {self.first_stage}.")

    def takes_over(self, moment: Moment) -> bool:
        """Tell whether a round begins with the averaged classifier."""
        return moment.round <= self.first_stage * moment.rounds + 1 or (moment.round - 1) % self.head_every == 0

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Make room for one's own classifier."""
        return client.having(memory=_own(net, client))

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Go on with one's own classifier, unless the average is due."""
        if self.takes_over(moment):
            return client
        return client.having(params={**client.params, **copy_of(client.memory, "own")})

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Keep one's own classifier."""
        return client.having(memory=_own(net, client)), {}

    def model(self, net: Net, client: Client) -> Tensors:
        """Answer with the averaged body and one's own classifier."""
        own = copy_of(client.memory, "own") if self.predict_by == "personal" else {}
        return {**client.params, **own}

    def beside(self) -> Mapping[str, Method]:
        """Record the global model's accuracy too."""
        return {} if self.predict_by == "global" else {"global": replace(self, predict_by="global")}


def _own(net: Net, client: Client) -> Tensors:
    return copied({name: value for name, value in client.params.items() if net.in_head(name)}, "own")
