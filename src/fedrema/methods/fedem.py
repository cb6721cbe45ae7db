"""FedEM: every client's distribution is a mixture of shared components."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedrema.core import Batch, Client, Method, Moment, Reports
from fedrema.errors import at_least
from fedrema.methods.shared.initial_models import initial_model
from fedrema.methods.shared.rounds import newer
from fedrema.methods.shared.second_models import copied, copy_of, network_tensors
from fedrema.models.body_and_head import Net, Tensors
from fedrema.tasks import Task


@dataclass(frozen=True)
class FedEM(Method):
    """Expectation-maximisation of a mixture of M shared models: client k predicts p_k(y|x) = Σ_m π_km p_m(y|x).

    In every round, a client computes for each of its samples i which component it comes from, q_im ∝ π_km p_m(y_i|x_i)
    (E step), and then its weights π_km, the mean of q_im. It trains every component for E epochs on the loss weighted
    by q_im (M step): (1/|B|) Σ_{i∈B} q_im ℓ(h_m(x_i), y_i). The server averages each component by sample counts. The
    weights π_k never leave the client, and start with 1/M. The components start from different random weights. Clients
    are evaluated with the averaged components and their own weights; those that did not participate in the round repeat
    the E step with these components. Training and communication cost M times as much as in FedAvg.

    With partial participation, the authors' code also averages the previous models of absent clients; here, the
    average is over the participants.
    """

    name: ClassVar[str] = "fedem"
    title: ClassVar[str] = "FedEM"
    paper: ClassVar[str] = "Marfoq et al., Federated Multi-Task Learning under a Mixture of Distributions, NeurIPS 2021"
    absence_revision: ClassVar[int] = 2
    reports: ClassVar[Reports] = Reports(colour="#44AA99")

    components: int = 3
    """M: the number of components (authors: 3); 1 is FedAvg."""

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(1, self, "components")

    def supports(self, task: Task) -> bool:
        """Support classes only: components are compared by the probabilities of classes."""
        return task.has_softmax

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Add the components from 1 on, and the weights; component 0 is the network itself."""
        params = dict(client.params)
        for number in range(1, self.components):
            params |= copied(initial_model(net, number, moment, client.params), f"component{number}")
        mixture = client.count.new_full((self.components,), 1 / self.components)
        return client.having(params=params, memory={"mixture": mixture, "round": client.count.new_zeros(())})

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Compute q [n, M] and π with the received components."""
        losses = self._losses(net, client, data).to(client.count.dtype)
        origins = (_log(client.memory["mixture"]) - losses).softmax(dim=1)
        mixture = (origins * data.mask[:, None]).sum(dim=0) / client.count
        memory = {"mixture": mixture, "round": torch.full_like(client.count, moment.round)}
        return client.having(memory=memory, inbox={**client.inbox, "origins": origins})

    def ready(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Compute π with the current components if the client did not participate in the round."""
        return client.having(memory=newer(client.memory, self.begin(net, client, data, moment).memory))

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return Σ_m (1/|B|) Σ_i q_im ℓ(h_m(x_i), y_i), with the weights of `--class-weights`."""
        weights = batch.mask if net.class_weights is None else batch.mask * net.class_weights[batch.y]
        weights = weights / torch.where(weights.sum() > 0, weights.sum(), 1)
        return (client.inbox["origins"][batch.index] * weights[:, None] * self._losses(net, client, batch)).sum()

    def predict(self, net: Net, client: Client, x: Tensor) -> Tensor:
        """Return log Σ_m π_km p_m(y|x)."""
        logs = torch.stack([net(model, x).log_softmax(dim=-1) for model in self._models(net, client)], dim=-1)
        return (logs + _log(client.memory["mixture"])).logsumexp(dim=-1)

    def _losses(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return the loss of each sample under each component [n, M]."""
        return torch.stack(
            [net.task.losses(net(model, batch.x), batch.y) for model in self._models(net, client)], dim=1
        )

    def _models(self, net: Net, client: Client) -> list[Tensors]:
        """Return the components."""
        others = [copy_of(client.params, f"component{number}") for number in range(1, self.components)]
        return [network_tensors(net, client.params), *others]


def _log(weights: Tensor) -> Tensor:
    """Return logarithms; that of 0 is a very small number."""
    return weights.clamp(min=1e-30).log()
