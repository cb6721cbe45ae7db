"""APFL: each client predicts with a mixture of a global and a local model."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from fedrema.core import Alternative, Batch, Client, LocalTraining, Method, Moment, Phase, Reports, Role, task_loss
from fedrema.errors import BadInput
from fedrema.methods.shared.second_models import copied, copy_of, network_tensors
from fedrema.models.body_and_head import Net, Tensors


@dataclass(frozen=True)
class APFL(Method):
    """Adaptive personalisation: client k predicts with v̄ = α_k v_k + (1 − α_k) w, a mixture of two models.

    On every batch, the shared global model w descends along ∇F_k(w), as in FedAvg, and the local model v_k along ∇_v
    F_k(v̄_k) = α_k ∇F_k(v̄_k). At the start of every round, α_k takes one step on one batch: α ← clip[α − η ⟨v − w,
    ∇F_k(v̄)⟩, 0, 1]. Only w is sent, and averaged by sample counts; v_k and α_k are private. v_k is initialised as a
    copy of w. Clients are evaluated with the mixture of v_k and the w that they trained; the accuracy of the global
    model is recorded too. A client trains two networks: more than twice the local work of FedAvg.

    The paper mixes parameters. The authors' code mixes outputs, α z_v + (1 − α) z_w (`--mixing outputs`), and keeps α
    constant by default (`--no-adapt-alpha`).
    """

    name: ClassVar[str] = "apfl"
    title: ClassVar[str] = "APFL"
    paper: ClassVar[str] = "Deng et al., Adaptive Personalized Federated Learning, 2020, arXiv:2003.13461"
    revision: ClassVar[int] = 2
    reports: ClassVar[Reports] = Reports(
        colour="#999999", stroke="--", alternatives=(Alternative("global", "global model"),)
    )

    local_share: float = 0.5
    """α: initial weight of the local model in the mixture (authors: 0.5)."""
    adapt_alpha: bool = True
    """Learn α for each client, as in the paper; the authors' code does not by default."""
    mixing: Literal["parameters", "outputs"] = "parameters"
    """Mix the parameters (paper) or the logits (authors' code) of the two models."""
    predict_by: Literal["mixture", "global"] = "mixture"
    """Which model predicts."""

    def __post_init__(self) -> None:
        """Validate the settings."""
        if not 0 <= self.local_share <= 1:
            raise BadInput(f"--local-share must be in [0, 1], got {self.local_share}.")

    def role(self, net: Net, name: str) -> Role:
        """Share w only."""
        return Role.PRIVATE if name == "share" or name.startswith("local.") else Role.SHARED

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Initialise v_k with w, and α_k."""
        own = copied(client.params, "local")
        share = client.count.new_full((), self.local_share)
        return client.having(params={**client.params, **own, "share": share}, memory=copied(client.params, "trained"))

    def phases(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """Plan one step of α, then E epochs of w and v."""
        rate = local.rate(moment)
        training = Phase(local.epochs, rate, local.momentum, trains=_is_model)
        if not self.adapt_alpha:
            return (training,)
        return Phase(1, rate, momentum=0.0, trains=_is_share, loss=self.mixed_loss, steps=1), training

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return F_k(w) + F_k(v̄); the second term is differentiated with respect to v only."""
        return task_loss(net, net(client.params, batch.x), batch) + self.mixed_loss(net, client, batch)

    def mixed_loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return F_k(v̄) with w held fixed."""
        shared = {name: client.params[name].detach() for name in net.initial}
        return task_loss(net, self.mixture(net, client.params, shared, batch.x), batch)

    def mixture(self, net: Net, params: Tensors, shared: Tensors, x: Tensor) -> Tensor:
        """Return the logits of the mixture."""
        if self.mixing == "parameters":
            return net(mixed_parameters(net, params, shared), x)
        share = params["share"].clamp(0, 1)
        return share * net(copy_of(params, "local"), x) + (1 - share) * net(shared, x)

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Clip α to [0, 1] and store the locally trained w."""
        params = {**client.params, "share": client.params["share"].clamp(0, 1)}
        return client.having(params=params, memory=copied(network_tensors(net, client.params), "trained")), {}

    def model(self, net: Net, client: Client) -> Tensors:
        """Return v̄, or w with `predict_by="global"`."""
        if self.predict_by == "global":
            return network_tensors(net, client.params)
        return mixed_parameters(net, client.params, copy_of(client.memory, "trained"))

    def predict(self, net: Net, client: Client, x: Tensor) -> Tensor:
        """Return the logits of the mixture; `mixing` selects what is mixed."""
        if self.mixing == "parameters" or self.predict_by == "global":
            return net(self.model(net, client), x)
        return self.mixture(net, client.params, copy_of(client.memory, "trained"), x)

    def beside(self) -> Mapping[str, Method]:
        """Also record the accuracy of the global model."""
        return {} if self.predict_by == "global" else {"global": replace(self, predict_by="global")}


def mixed_parameters(net: Net, params: Tensors, shared: Tensors) -> Tensors:
    """Return v̄ = α v + (1 − α) w. Batch-norm statistics are those of v, which follow the mixture's activations."""
    own, share = copy_of(params, "local"), params["share"].clamp(0, 1)
    # In the order of the tensors: that of a set would change the rounding of α's gradient from process to process.
    return {
        name: share * value + (1 - share) * shared[name] if name in net.trainable else value
        for name, value in own.items()
    }


def _is_share(name: str) -> bool:
    return name == "share"


def _is_model(name: str) -> bool:
    return name != "share"
