"""Per-FedAvg: an initialisation from which one gradient step gives a personal model."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from fedrema.core import Alternative, Batch, Client, Gradient, LocalTraining, Method, Moment, Phase, Reports
from fedrema.errors import above_zero, at_least
from fedrema.models.body_and_head import Tensors


@dataclass(frozen=True)
class PerFedAvg(Method):
    """Clients minimise F_k(w) = f_k(w − α ∇f_k(w)): the loss after one gradient step from the shared w.

    A local step is w ← w − β [I − α ∇²f(w; D″)] ∇f(w − α ∇f(w; D); D′) with three fresh batches. `first-order` omits
    the Hessian (FO); `hessian-vector` approximates its product with the gradient g by the difference [∇f(w + δg; D″) −
    ∇f(w − δg; D″)] / 2δ (HF). β is `--lr` (authors: 0.001). There are as many outer steps as other methods take steps
    in their epochs, so samples are used two or three times as often; a client with a single batch uses it for all
    purposes. Layers with random draws (dropout) corrupt the difference, because its two gradients see different draws:
    use `first-order` with them.

    As in the authors' code, clients are evaluated after one step of size α from the global model on a batch of their
    training samples; the accuracy of the global model itself is recorded too.
    """

    name: ClassVar[str] = "per-fedavg"
    title: ClassVar[str] = "Per-FedAvg"
    paper: ClassVar[str] = "Fallah et al., Personalized Federated Learning with Theoretical Guarantees, NeurIPS 2020"
    reports: ClassVar[Reports] = Reports(
        colour="#0072B2", stroke="--", alternatives=(Alternative("unadapted", "before adaptation"),)
    )

    adapt_lr: float = 0.01
    """α: step size of the personalisation step."""
    variant: Literal["first-order", "hessian-vector"] = "first-order"
    """Omit the Hessian, or approximate its product with the gradient by a difference (twice as many gradients)."""
    difference: float = 0.001
    """δ of that difference."""
    adapt_steps: int = 1
    """Steps on the client's own batches before it is evaluated; 0 evaluates the global model."""

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(0, self, "adapt_lr", "adapt_steps")
        above_zero(self, "difference")

    def phases(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """Plan as many outer steps as there are batches in E epochs, with two or three batches per step."""
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
        """Return [I − α ∇²f(w; D″)] ∇f(w − α ∇f(w; D); D′), with or without the Hessian."""
        inner = gradient(client, batches[0])
        outer = gradient(_moved(client, inner, -self.adapt_lr), batches[1])
        if self.variant == "first-order":
            return outer
        ahead = gradient(_moved(client, outer, self.difference), batches[2])
        behind = gradient(_moved(client, outer, -self.difference), batches[2])
        scale = self.adapt_lr / (2 * self.difference)
        return {name: value - scale * (ahead[name] - behind[name]) for name, value in outer.items()}

    def adapt(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """Plan `adapt_steps` plain steps of size α."""
        if self.adapt_steps == 0:
            return ()
        return (Phase(self.adapt_steps, self.adapt_lr, momentum=0.0, steps=self.adapt_steps),)

    def beside(self) -> Mapping[str, Method]:
        """Also record the accuracy before these steps."""
        return {"unadapted": replace(self, adapt_steps=0)} if self.adapt_steps else {}


def _moved(client: Client, direction: Tensors, by: float) -> Client:
    moved = {name: client.params[name] + by * value for name, value in direction.items()}
    return client.having(params={**client.params, **moved})
