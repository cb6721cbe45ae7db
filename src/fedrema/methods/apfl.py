"""APFL: a personal mixture of a global and a local model."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from fedrema.core import Batch, Client, LocalTraining, Method, Moment, Phase, Reports, Role, cross_entropy
from fedrema.errors import BadInput
from fedrema.methods.shared.second_models import copied, copy_of, model_of
from fedrema.models.body_and_head import Net, Tensors


@dataclass(frozen=True)
class APFL(Method):
    """Adaptive personalisation: client k uses v̄ = α_k v_k + (1 − α_k) w, a mixture of its own v_k and the shared w.

    On every batch w descends along ∇F_k(w), as in FedAvg, and v_k along ∇_v F_k(v̄) = α_k ∇F_k(v̄). At the start of
    every round α_k takes one step α ← clip[α − η ⟨v − w, ∇F_k(v̄)⟩, 0, 1] on one batch. Only w travels and is averaged,
    by sample counts; v_k and α_k stay at home. Clients are scored with the mixture of v_k and the w that they trained;
    the global model's accuracy is recorded beside it. Two networks are trained: twice FedAvg's work and more.

    The paper mixes parameters; the authors' code mixes outputs, αz_v + (1 − α)z_w (`--mixing outputs`), and leaves α
    as it is by default (`--no-adapt-alpha`). v begins as a copy of w.
    """

    name: ClassVar[str] = "apfl"
    title: ClassVar[str] = "APFL"
    paper: ClassVar[str] = "Deng et al., Adaptive Personalized Federated Learning, 2020, arXiv:2003.13461"
    revision: ClassVar[int] = 2
    reports: ClassVar[Reports] = Reports(colour="#999999", stroke="--")

    local_share: float = 0.5
    """α: share of the local model, at first (authors: 0.5)."""
    adapt_alpha: bool = True
    """Let every client learn its α, as in the paper; the authors' code has it off by default."""
    mixing: Literal["parameters", "outputs"] = "parameters"
    """What is mixed: parameters (the paper) or logits (the authors' code)."""
    predict_by: Literal["mixture", "global"] = "mixture"
    """Which model answers."""

    def __post_init__(self) -> None:
        """Refuse settings without meaning."""
        if not 0 <= self.local_share <= 1:
            raise BadInput(f"--local-share must lie in [0, 1], got {self.local_share}.")

    def role(self, net: Net, name: str) -> Role:
        """Share w only."""
        return Role.PRIVATE if name == "share" or name.startswith("local.") else Role.SHARED

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Add v_k and α_k."""
        own = copied(client.params, "local")
        share = client.count.new_full((), self.local_share)
        return client.having(params={**client.params, **own, "share": share}, memory=copied(client.params, "trained"))

    def phases(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """One step of α, then E epochs of w and v."""
        rate = local.rate(moment)
        training = Phase(local.epochs, rate, local.momentum, trains=_models)
        if not self.adapt_alpha:
            return (training,)
        return Phase(1, rate, momentum=0.0, trains=_share, loss=self.mixed_loss, steps=1), training

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """F_k(w) + F_k(v̄), the latter as a function of v only."""
        return cross_entropy(net(client.params, batch.x), batch) + self.mixed_loss(net, client, batch)

    def mixed_loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """F_k(v̄), with w held fixed."""
        shared = {name: client.params[name].detach() for name in net.initial}
        return cross_entropy(self.mixture(net, client.params, shared, batch.x), batch)

    def mixture(self, net: Net, params: Tensors, shared: Tensors, x: Tensor) -> Tensor:
        """Return the mixture's logits."""
        if self.mixing == "parameters":
            return net(mixed_parameters(net, params, shared), x)
        share = params["share"].clamp(0, 1)
        return share * net(copy_of(params, "local"), x) + (1 - share) * net(shared, x)

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Keep α in [0, 1], and the w that was trained here."""
        params = {**client.params, "share": client.params["share"].clamp(0, 1)}
        return client.having(params=params, memory=copied(model_of(net, client.params), "trained")), {}

    def model(self, net: Net, client: Client) -> Tensors:
        """Answer with v̄."""
        if self.predict_by == "global":
            return model_of(net, client.params)
        return mixed_parameters(net, client.params, copy_of(client.memory, "trained"))

    def predict(self, net: Net, client: Client, x: Tensor) -> Tensor:
        """Mix outputs instead of parameters, if asked to."""
        if self.mixing == "parameters" or self.predict_by == "global":
            return net(self.model(net, client), x)
        return self.mixture(net, client.params, copy_of(client.memory, "trained"), x)

    def beside(self) -> Mapping[str, Method]:
        """Record the global model's accuracy too."""
        return {} if self.predict_by == "global" else {"global": replace(self, predict_by="global")}


def mixed_parameters(net: Net, params: Tensors, shared: Tensors) -> Tensors:
    """Return v̄ = α v + (1 − α) w; batch norm's statistics are v's, taken where the mixture computes."""
    own, share = copy_of(params, "local"), params["share"].clamp(0, 1)
    return {**own, **{name: share * own[name] + (1 - share) * shared[name] for name in net.trainable}}


def _share(name: str) -> bool:
    return name == "share"


def _models(name: str) -> bool:
    return name != "share"
