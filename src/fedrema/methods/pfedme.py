"""pFedMe: personal models as Moreau envelopes around a global one."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from fedrema.core import (
    Answer,
    Batch,
    Client,
    Gradient,
    LocalTraining,
    Method,
    Moment,
    Move,
    Phase,
    Reports,
    Role,
    State,
    Uploads,
)
from fedrema.errors import BadInput, above_zero, at_least
from fedrema.methods.shared.second_models import copied, copy_of
from fedrema.models.body_and_head import Net, Tensors


@dataclass(frozen=True)
class PFedMe(Method):
    """Clients minimise the envelope F_k(w) = min_θ f_k(θ) + (λ/2) ‖θ − w‖²; the θ that attains it is their own model.

    For every batch, θ takes `inner_steps` steps θ ← θ − η_p [∇f_k(θ) + λ (θ − w)], and then w ← w − η λ (w − θ), with
    η = `--lr` and no momentum, as in the paper. θ begins at the received w in every round. The server goes β of the way
    to the clients' mean, w ← (1 − β) w + β Σ (n_k/n) w_k. Only w travels. Clients are scored with their θ after
    training; the global model's accuracy is recorded beside it. (Public codes score what θ has become by then: the
    local w, or the global one.) The authors take 20 batches of 20 samples per round, η = 0.005, weight decay 0.001.
    """

    name: ClassVar[str] = "pfedme"
    title: ClassVar[str] = "pFedMe"
    paper: ClassVar[str] = "Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020"
    reports: ClassVar[Reports] = Reports(colour="#56B4E9", stroke="--")

    tie: float = 15.0
    """λ: how strongly a personal model is held to the global one (authors: 15)."""
    personal_lr: float = 0.09
    """η_p: step of the personal model (authors: 0.09); its product with λ must lie below 2."""
    inner_steps: int = 5
    """Steps of the personal model on each batch (authors: 5)."""
    beta: float = 1.0
    """β: how far the server goes to the clients' mean (authors: 1)."""
    predict_by: Literal["personal", "global"] = "personal"
    """Which of the two models answers."""

    def __post_init__(self) -> None:
        """Refuse settings without meaning, and those that cannot converge."""
        at_least(1, self, "inner_steps")
        above_zero(self, "tie", "personal_lr", "beta")
        if self.tie * self.personal_lr >= 2:
            raise BadInput(
                f"--personal-lr {self.personal_lr} times --tie {self.tie} must lie below 2: steps would overshoot."
            )

    def role(self, net: Net, name: str) -> Role:
        """Share the global model only."""
        return Role.PRIVATE if name.startswith("personal.") else Role.SHARED

    def trains(self, net: Net, name: str) -> bool:
        """Leave θ out: it is put in place."""
        return name in net.trainable

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Add θ."""
        return client.having(params={**client.params, **_personal(net, client)})

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Begin with θ = w."""
        return client.having(params={**client.params, **_personal(net, client)})

    def phases(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """E epochs, without momentum."""
        return (Phase(local.epochs, local.rate(moment), momentum=0.0, step=self.envelope_step),)

    def envelope_step(self, gradient: Gradient, client: Client, batches: tuple[Batch, ...]) -> Move:
        """Move θ close to its optimum, then let w descend along λ (w − θ)."""
        personal = copy_of(client.params, "personal")
        for _ in range(self.inner_steps):
            slopes = gradient(client.having(params={**client.params, **personal}), batches[0])
            personal = {
                name: value - self.personal_lr * (slopes[name] + self.tie * (value - client.params[name]))
                for name, value in personal.items()
            }
        along = {name: self.tie * (client.params[name] - value) for name, value in personal.items()}
        return Move(along, copied(personal, "personal"))

    def model(self, net: Net, client: Client) -> Tensors:
        """Answer with θ."""
        personal = copy_of(client.params, "personal") if self.predict_by == "personal" else {}
        return {**client.params, **personal}

    def beside(self) -> Mapping[str, Method]:
        """Record the global model's accuracy too."""
        return {} if self.predict_by == "global" else {"global": replace(self, predict_by="global")}

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """W ← (1 − β) w + β Σ (n_k/n) w_k."""
        before = uploads.before
        return Answer({name: before[name] + self.beta * (mean - before[name]) for name, mean in uploads.mean.items()})


def _personal(net: Net, client: Client) -> Tensors:
    return copied({name: client.params[name] for name in net.initial if name in net.trainable}, "personal")
