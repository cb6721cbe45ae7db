"""Per-FedAvg: a common start from which one step leads to a personal model."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from fedrema.core import Batch, Client, Gradient, LocalTraining, Method, Moment, Phase, Reports
from fedrema.errors import above_zero, at_least
from fedrema.models.body_and_head import Tensors


@dataclass(frozen=True)
class PerFedAvg(Method):
    """Clients minimise F_k(w) = f_k(w − α ∇f_k(w)): how well w serves them *after* one gradient step.

    A local step is w ← w − β [I − α ∇²f(w; D″)] ∇f(w − α ∇f(w; D); D′) with three fresh batches; `first-order` leaves
    the Hessian out (FO), `hessian-vector` takes its product with the gradient g as the difference
    [∇f(w + δg; D″) − ∇f(w − δg; D″)] / 2δ (HF). β is `--lr` (authors: 0.001).
    As many outer steps are taken as other methods take in their epochs, so samples are seen two or three times as
    often; a client with a single batch sees it in all roles. Layers that draw at random (dropout) would spoil the
    difference, whose two gradients see other draws: use `first-order` with them.

    Scored, as the authors do, after one step of size α from the global model on a batch of the client's training
    samples; the global model's own accuracy is recorded beside it.
    """

    name: ClassVar[str] = "per-fedavg"
    title: ClassVar[str] = "Per-FedAvg"
    paper: ClassVar[str] = "Fallah et al., Personalized Federated Learning with Theoretical Guarantees, NeurIPS 2020"
    reports: ClassVar[Reports] = Reports(colour="#0072B2", stroke="--")

    adapt_lr: float = 0.01
    """α: size of the step that makes a model personal."""
    variant: Literal["first-order", "hessian-vector"] = "first-order"
    """Leave the Hessian out, or take its product with the gradient by a difference (twice the gradients)."""
    difference: float = 0.001
    """δ of that difference."""
    adapt_steps: int = 1
    """Steps on a client's own batches before it is scored; 0 scores the global model."""

    def __post_init__(self) -> None:
        """Refuse settings without meaning."""
        at_least(0, self, "adapt_lr", "adapt_steps")
        above_zero(self, "difference")

    def phases(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """Take as many outer steps as there are batches in E epochs, each with two or three batches."""
        batches = 2 if self.variant == "first-order" else 3
        return (
            Phase(
                local.epochs * batches,
                local.rate(moment),
                local.momentum,
                step=self.outer_step,
                batches_per_step=batches,
            ),
        )

    def outer_step(self, gradient: Gradient, client: Client, batches: tuple[Batch, ...]) -> Tensors:
        """[I − α ∇²f(w; D″)] ∇f(w − α ∇f(w; D); D′), with or without the Hessian."""
        inner = gradient(client, batches[0])
        outer = gradient(_moved(client, inner, -self.adapt_lr), batches[1])
        if self.variant == "first-order":
            return outer
        ahead = gradient(_moved(client, outer, self.difference), batches[2])
        behind = gradient(_moved(client, outer, -self.difference), batches[2])
        scale = self.adapt_lr / (2 * self.difference)
        return {name: value - scale * (ahead[name] - behind[name]) for name, value in outer.items()}

    def adapt(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """One plain step of size α."""
        if self.adapt_steps == 0:
            return ()
        return (Phase(self.adapt_steps, self.adapt_lr, momentum=0.0, steps=self.adapt_steps),)

    def beside(self) -> Mapping[str, Method]:
        """Record the accuracy before that step too."""
        return {"unadapted": replace(self, adapt_steps=0)} if self.adapt_steps else {}


def _moved(client: Client, direction: Tensors, by: float) -> Client:
    moved = {name: client.params[name] + by * value for name, value in direction.items()}
    return client.having(params={**client.params, **moved})
