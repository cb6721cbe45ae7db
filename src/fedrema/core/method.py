"""A federated method: the maths of one client, and one server step over stacked tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from torch.nn import functional

from fedrema.base.html import html_table, title_line
from fedrema.base.options import field_documentation
from fedrema.core.options import LocalTraining
from fedrema.core.reports import Reports
from fedrema.core.types import Answer, Batch, Client, Moment, Phase, Role, State, Uploads
from fedrema.models.body_and_head import Net, Tensors
from fedrema.tasks.task import Task


def cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """Return the mean cross-entropy over the real samples of a batch."""
    losses = functional.cross_entropy(logits, batch.y, reduction="none")
    return (losses * batch.mask).sum() / batch.mask.sum().clamp(min=1)


def task_loss(net: Net, outputs: Tensor, batch: Batch) -> Tensor:
    """Return the mean loss of the task over the real samples of a batch: for classes, the cross-entropy."""
    return net.task.loss(outputs, batch.y, batch.mask, net.class_weights)


@dataclass(frozen=True)
class Method:
    """A federated method: its fields are its hyper-parameters, it has no state, every hook defaults to FedAvg.

    `loss`, `predict`, `start`, `begin`, `end` and `ready` receive one client; the engine maps them over all clients.
    `aggregate` receives all uploads, stacked.
    """

    name: ClassVar[str]
    """Name on the command line."""
    title: ClassVar[str]
    """Name as its authors write it."""
    paper: ClassVar[str]
    """Reference."""
    revision: ClassVar[int] = 1
    """Increased by one with every change that alters results; results of older revisions count as outdated."""
    absence_revision: ClassVar[int] = 1
    """Replaces `revision`, if larger, for runs in which clients miss rounds or join late; increased with every change
    that alters only those."""
    reports: ClassVar[Reports] = Reports()
    """What it reports beyond the metrics of every run: traces, a period, matrices between clients, its colour."""

    def _repr_html_(self) -> str:
        documented = field_documentation(type(self))
        rows = [
            (name, str(getattr(self, name.replace("-", "_"))), str(default), meaning)
            for name, (default, meaning) in documented.items()
        ]
        table = html_table(("setting", "value", "default", "meaning"), rows, texts=4) if rows else ""
        return title_line(self.called(), f"({self.name}): {self.paper}") + table

    def supports(self, task: Task) -> bool:
        """Return whether the method works for a task; one that needs classes returns `task.has_softmax`."""
        return True

    def needs_head(self) -> bool:
        """Return whether the method treats the network's classifier differently from its body."""
        return False

    def called(self) -> str:
        """Return the title in tables and figures; a variant may have its own."""
        return self.title

    def role(self, net: Net, name: str) -> Role:
        """Return how a parameter is exchanged."""
        return Role.SHARED

    def trains(self, net: Net, name: str) -> bool:
        """Return whether a parameter is ever trained; the others have no gradient and no momentum."""
        return net.trains(name)

    def clip_group(self, net: Net, name: str) -> str:
        """Return the name of the model that a trained parameter belongs to: each is clipped by its own norm.

        By default, a prefix before a parameter's name denotes another model.
        """
        return net.prefix_of(name)

    def start(self, net: Net, client: Client, moment: Moment) -> Client:
        """Add the tensors that the method needs to a new client's `params` and `memory`, under unused names.

        `client.params` is the network as the client first receives it: the initial one or, for a client that joins
        later, the current shared one. To start a personal model from the shared one, copy it here.
        """
        return client

    def begin(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Prepare a round, for example compute statistics with the received parameters."""
        return client

    def phases(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """Return the phases of a round's local training."""
        return (Phase(local.epochs, local.rate(moment), local.momentum),)

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return the local objective on one batch."""
        return task_loss(net, net(client.params, batch.x), batch)

    def end(self, net: Net, client: Client, data: Batch, moment: Moment) -> tuple[Client, Tensors]:
        """Finish a round: return the client to keep, and the tensors to send in addition to its parameters."""
        return client, {}

    def adapt(self, local: LocalTraining, moment: Moment) -> tuple[Phase, ...]:
        """Return phases to train on a copy of the client before it is evaluated."""
        return ()

    def ready(self, net: Net, client: Client, data: Batch, moment: Moment) -> Client:
        """Return the client as it predicts, with what it computes from all its training samples.

        Called on a copy of the client before it is evaluated, after `adapt`. What it adds is not kept, and does not
        leave the client; `model` and `predict` must also work without it.
        """
        return client

    def model(self, net: Net, client: Client) -> Tensors:
        """Return the network parameters that the client predicts with."""
        return client.params

    def predict(self, net: Net, client: Client, x: Tensor) -> Tensor:
        """Return the outputs [n, C] of the client, such as logits of classes; by default, those of its model."""
        return net(self.model(net, client), x)

    def beside(self) -> Mapping[str, "Method"]:
        """Return other ways to evaluate the same clients, by name; their accuracies are recorded too."""
        return {}

    def server(self, net: Net, clients: int) -> State:
        """Return the server's state before the first round."""
        return {}

    def aggregate(self, net: Net, state: State, uploads: Uploads, moment: Moment) -> Answer:
        """Compute from the uploads what clients receive; must not modify its inputs."""
        return Answer(shared=uploads.mean, state=state)


def overrides(method: Method, hook: str) -> bool:
    """Return whether a method overrides a hook; default hooks need not be called."""
    return getattr(type(method), hook) is not getattr(Method, hook)
