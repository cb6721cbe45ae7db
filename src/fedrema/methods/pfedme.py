"""pFedMe: personal models as Moreau envelopes around a global model."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from fedrema.core import (
    Alternative,
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
    """Clients minimise the envelope F_k(w) = min_θ f_k(θ) + (λ/2) ‖θ − w‖²; the minimiser θ is the personal model.

    For every batch, θ takes `inner_steps` steps θ ← θ − η_p [∇f_k(θ) + λ (θ − w)], and then w ← w − η λ (w − θ), with η
    = `--lr` and no momentum, as in the paper. θ starts from the received w in every round. The server moves by the
    factor β towards the clients' mean, w ← (1 − β) w + β Σ (n_k/n) w_k. Only w is sent. Clients are evaluated with
    their θ after training; the accuracy of the global model is recorded too. (Public code evaluates whatever θ has been
    overwritten with: the local or the global w.) The authors use 20 batches of 20 samples per round, η = 0.005 and
    weight decay 0.001.
    """

    name: ClassVar[str] = "pfedme"
    title: ClassVar[str] = "pFedMe"
    paper: ClassVar[str] = "Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020"
    reports: ClassVar[Reports] = Reports(
        colour="#56B4E9", stroke="--", alternatives=(Alternative("global", "global model"),)
    )

    tie: float = 15.0
    """λ: strength of the regularisation of the personal model towards the global one (authors: 15)."""
    personal_lr: float = 0.09
    """η_p: learning rate of the personal model (authors: 0.09); its product with λ must be below 2."""
    inner_steps: int = 5
    """Steps of the personal model on each batch (authors: 5)."""
    beta: float = 1.0
    """β: how far the server moves towards the clients' mean (authors: 1)."""
    predict_by: Literal["personal", "global"] = "personal"
    """Which of the two models predicts."""

    def __post_init__(self) -> None:
        """Validate the settings, and that the inner steps can converge."""
        at_least(1, self, "inner_steps")
        above_zero(self, "tie", "personal_lr", "beta")
        if self.tie * self.personal_lr >= 2:
            raise BadInput(
                f"--personal-lr {self.personal_lr} times --tie {self.tie} must be below 2: larger steps diverge."
            )

    def role(self, net: Net, name: str) -> Role:
        """Share the global model only."""
        return Role.PRIVATE if name.startswith("personal.") else Role.SHARED

    def trains(self, net: Net, name: str) -> bool:
        """Exclude θ: `envelope_step` assigns it."""
        return name in net.trainable

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Initialise θ with w."""
        return client.having(params={**client.params, **_initial_personal_model(net, client)})

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Set θ = w."""
        return client.having(params={**client.params, **_initial_personal_model(net, client)})

    def phases(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """Plan E epochs without momentum."""
        return (Phase(local.epochs, local.rate(moment), momentum=0.0, step=self.envelope_step),)

    def envelope_step(self, gradient: Gradient, client: Client, batches: tuple[Batch, ...]) -> Move:
        """Move θ towards its optimum, then descend with w along λ (w − θ)."""
        personal = copy_of(client.params, "personal")
        for _ in range(self.inner_steps):
            gradients = gradient(client.having(params={**client.params, **personal}), batches[0])
            personal = {
                name: value - self.personal_lr * (gradients[name] + self.tie * (value - client.params[name]))
                for name, value in personal.items()
            }
        along = {name: self.tie * (client.params[name] - value) for name, value in personal.items()}
        return Move(along, copied(personal, "personal"))

    def model(self, net: Net, client: Client) -> Tensors:
        """Return θ, or w with `predict_by="global"`."""
        personal = copy_of(client.params, "personal") if self.predict_by == "personal" else {}
        return {**client.params, **personal}

    def beside(self) -> Mapping[str, Method]:
        """Also record the accuracy of the global model."""
        return {} if self.predict_by == "global" else {"global": replace(self, predict_by="global")}

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Compute w ← (1 − β) w + β Σ (n_k/n) w_k."""
        before = uploads.before
        return Answer({name: before[name] + self.beta * (mean - before[name]) for name, mean in uploads.mean.items()})


def _initial_personal_model(net: Net, client: Client) -> Tensors:
    return copied({name: client.params[name] for name in net.initial if name in net.trainable}, "personal")
