"""A federated method: the maths of *one* client plus one server step over stacked tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from fedrema.core.options import LocalTraining
from fedrema.core.reports import Reports
from fedrema.core.types import Answer, Batch, Client, Moment, Phase, Role, State, Uploads
from fedrema.models.body_and_head import Net, Tensors


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """Return the mean cross-entropy over a batch's real samples."""
    losses = functional.cross_entropy(logits, batch.y, reduction="none")
    return (losses * batch.mask).sum() / batch.mask.sum().clamp(min=1)


@dataclass(frozen=True)
class Method:
    """A federated method: its fields are its hyper-parameters, it holds no state, every hook defaults to FedAvg.

    `loss`, `predict`, `start`, `begin` and `end` see one client; the engine maps them over all. `aggregate` sees all
    uploads, stacked.
    """

    name: ClassVar[str]
    """On the command line."""
    title: ClassVar[str]
    """As its authors write it."""
    paper: ClassVar[str]
    """Where it comes from."""
    revision: ClassVar[int] = 1
    """Raised by one with every change that alters results: older results then count as outdated."""
    reports: ClassVar[Reports] = Reports()
    """What it reports beyond the metrics of every run: traces, a period, matrices between clients, its colour."""

    def called(self) -> str:
        """Return the title by which tables and pictures call it; a variant may have one of its own."""
        return self.title

    def role(self, net: Net, name: str) -> Role:
        """Say what becomes of a parameter."""
        return Role.SHARED

    def trains(self, net: Net, name: str) -> bool:
        """Say whether a parameter is ever descended along: other ones have no gradient and no momentum."""
        return net.trains(name)

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Add to a new client's `params` and `memory` what the method needs; names must not clash.

        `client.params` is the network as the client first receives it: the initial one, or for a client that joins
        later the one that is shared by then. A personal model that is to begin with the shared one is a copy of it.
        """
        return client

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Prepare a round: merge what came, compute statistics with the received parameters."""
        return client

    def phases(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """Plan a round's local training."""
        return (Phase(local.epochs, local.rate(moment), local.momentum),)

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return the local objective on one batch."""
        return cross_entropy(net(client.params, batch.x), batch)

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Close a round: return the client to keep and what to send beside its parameters."""
        return client, {}

    def adapt(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """Plan training on a copy of the client before it is scored."""
        return ()

    def model(self, net: Net, client: Client) -> Tensors:
        """Return the network's parameters with which the client answers."""
        return client.params

    def predict(self, net: Net, client: Client, x: Tensor) -> Tensor:
        """Return class scores [n, C] as the client would use them: the answers of its model."""
        return net(self.model(net, client), x)

    def beside(self) -> Mapping[str, "Method"]:
        """Name other conventions of scoring the same clients; their accuracies are recorded beside this one's."""
        return {}

    def server(self, net: Net, clients: int) -> State:
        """Return the server's state before the first round."""
        return {}

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Turn uploads into what the clients get; must not change its inputs."""
        return Answer(shared=uploads.mean, state=state)


def overrides(method: Method, hook: str) -> bool:
    """Tell whether a method brings its own version of a hook, so that defaults cost nothing."""
    return getattr(type(method), hook) is not getattr(Method, hook)
