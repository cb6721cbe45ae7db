"""The vocabulary: what a method is made of.

A method is the maths of *one* client plus one server step over stacked tensors. Nothing here knows how many
clients are trained at once, on which device, in a simulation or over a network.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional

from fedrema.errors import BadInput, at_least
from fedrema.keys import torch_generator
from fedrema.net import Net, Tensors

Number = int | float | bool
State = dict[str, Tensor | Number]
"""What a server remembers between rounds: tensors and numbers only, so that it can be saved."""


class Role(StrEnum):
    """What becomes of a parameter after local training."""

    SHARED = "shared"
    """Travels up into one mean, weighted by sample counts; one copy comes back that everyone uses."""
    COLLECTED = "collected"
    """Travels up and reaches the server as each client sent it (for a median, say); one copy comes back."""
    PERSONAL = "personal"
    """Travels up; each client gets a copy of its own back."""
    PRIVATE = "private"
    """Never leaves its client."""


@dataclass(frozen=True)
class Batch:
    """Samples of one client, some of them padding: `mask` is 1 for real samples and 0 for padding."""

    x: Tensor
    y: Tensor
    mask: Tensor
    index: Tensor
    """Position of each sample among the client's own, for what a method keeps per sample. What `begin` and `end` are
    given is all of them, in this order."""

    def rows(self, which: slice) -> "Batch":
        """Return some of the samples."""
        return Batch(self.x[which], self.y[which], self.mask[which], self.index[which])


@dataclass(frozen=True)
class Client:
    """What one client holds while it trains."""

    params: Tensors
    """Everything it can train: the network's parameters and what `Method.start` added."""
    received: Tensors
    """`params` as they were when this round's training began."""
    memory: Tensors
    """Private tensors it keeps between rounds."""
    inbox: Tensors
    """What the server sent beside parameters, and what `Method.begin` computed for this round."""
    count: Tensor
    """Number of its training samples."""

    def having(self, **changes: Any) -> "Client":
        """Return a copy with some fields replaced."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Moment:
    """When something happens, and the randomness that belongs to it."""

    round: int
    """1 for the first round; 0 before it."""
    rounds: int
    seed: int

    def generator(self, purpose: str) -> torch.Generator:
        """Return the server's random numbers of this round for one purpose."""
        return torch_generator(self.seed, self.round, "server", purpose)


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains."""

    epochs: int = 5
    """Passes over a client's own samples in each round."""
    batch: int = 100
    """Samples per step; a client that has fewer uses all it has. 0: chosen from the data, the default for own data."""
    lr: float = 0.01
    """Learning rate. 0: chosen from the data, the default for own data."""
    momentum: float = 0.9
    """Momentum of SGD."""
    keep_momentum: bool = True
    """Keep each client's momentum from one round to the next, as the paper's released code does."""
    clip: float = 10.0
    """Largest norm of a gradient; larger ones are scaled down, each model by its own norm. 0 switches clipping off."""
    weight_decay: float = 0.0
    """L2 penalty, added to the gradient after clipping."""
    schedule: Literal["constant", "exponential", "cosine"] = "constant"
    """How the learning rate changes over rounds: not, by a factor --lr-decay every round, or to 0 along a cosine."""
    lr_decay: float = 0.99
    """Factor per round of the exponential schedule."""
    drop_incomplete: bool = True
    """Leave out an epoch's last batch when it is not full; the default for own data is to keep it."""

    def __post_init__(self) -> None:
        """Refuse what cannot train."""
        at_least(0, self, "batch", "epochs", "lr", "clip", "weight_decay")
        if not 0 <= self.momentum < 1:
            raise BadInput(f"--momentum must lie in [0, 1), got {self.momentum}.")
        if not 0 < self.lr_decay <= 1:
            raise BadInput(f"--lr-decay must lie in (0, 1], got {self.lr_decay}.")

    def rate(self, moment: Moment) -> float:
        """Return the learning rate of a round."""
        if self.schedule == "exponential":
            return self.lr * self.lr_decay ** (moment.round - 1)
        if self.schedule == "cosine":
            progress = (moment.round - 1) / max(moment.rounds, 1)
            return self.lr * 0.5 * (1 + math.cos(math.pi * progress))
        return self.lr


Loss = Callable[[Net, Client, Batch], Tensor]


def everything(name: str) -> bool:
    """Select every parameter."""
    return True


@dataclass(frozen=True)
class Move:
    """A step that does more than descend."""

    along: Tensors = field(default_factory=dict)
    """Directions to descend along, with the phase's learning rate and momentum."""
    put: Tensors = field(default_factory=dict)
    """New values, put in place as they are."""


Gradient = Callable[[Client, Batch], Tensors]
"""Returns the gradient of the phase's loss, clipped, and with the weight decay in it."""
Step = Callable[[Gradient, Client, tuple[Batch, ...]], Tensors | Move]
"""Returns what to descend along, or a `Move`; written so that a leading client axis does not matter."""


def gradient_step(gradient: Gradient, client: Client, batches: tuple[Batch, ...]) -> Tensors:
    """Descend along the gradient of a single batch."""
    return gradient(client, batches[0])


@dataclass(frozen=True)
class Phase:
    """A stretch of local training; what it does not train is not differentiated either."""

    epochs: int
    lr: float
    momentum: float
    trains: Callable[[str], bool] = everything
    loss: Loss | None = None
    """The objective, where it is not the method's `loss`."""
    step: Step = gradient_step
    batches_per_step: int = 1
    steps: int | None = None
    """Stop after this many steps, wherever in an epoch that is."""
    epochs_of: Callable[[Client], Tensor] | None = None
    """Returns a client's number of epochs, where it is not `epochs` for all."""


@dataclass(frozen=True)
class Uploads:
    """What arrived at the server: one row per client, in ascending order of clients."""

    clients: Tensor
    """[k] which clients these are, as rows of the whole federation."""
    params: Tensors
    """[k, ...] the parameters that the server sees one by one: the personal and the collected ones."""
    extras: Tensors
    """[k, ...] what `Method.end` sent beside them."""
    counts: Tensor
    """[k] how many training samples each has."""
    names: tuple[str, ...] = ()
    """What the clients are called: randomness of one's own belongs to a name, never to a row."""
    mean: Tensors = field(default_factory=dict)
    """The shared parameters, averaged over these clients by sample counts."""
    before: Tensors = field(default_factory=dict)
    """The shared and the collected parameters as everybody had them when the round began."""
    everyone: int = 0
    """How many clients have joined, present in this round or not."""


@dataclass(frozen=True)
class Answer:
    """What the server made of the uploads. Names of parameters replace them; other names go to the inbox."""

    shared: Tensors
    """One copy for everybody."""
    personal: Tensors = field(default_factory=dict)
    """[k, ...] a row for each client that uploaded."""
    state: State = field(default_factory=dict)
    trace: Mapping[str, Any] = field(default_factory=dict)
    """What a person would want to see: numbers and lists go to the record, [k, k] matrices to the relations."""


class Mean:
    """A mean over clients that arrive in groups: Σ w_k x_k, with weights that sum to 1 over all groups.

    It is summed in blocks of fixed size, so that groups of whole blocks give the same bits as all clients at once.
    """

    BLOCK: ClassVar[int] = 32

    def __init__(self) -> None:
        self.total: Tensors = {}

    def add(self, params: Tensors, weights: Tensor) -> None:
        """Count some more clients [k, ...]; all groups but the last hold whole blocks."""
        for name, value in params.items():
            for block, rows in zip(*(torch.split(each, self.BLOCK) for each in (weights, value)), strict=True):
                part = torch.tensordot(block.to(value.dtype), rows, dims=1)
                self.total[name] = self.total[name] + part if name in self.total else part


def average(params: Tensors, weights: Tensor) -> Tensors:
    """Return the weighted mean over the leading axis."""
    mean = Mean()
    mean.add(params, weights / weights.sum())
    return mean.total


def mix(params: Tensors, weights: Tensor) -> Tensors:
    """Return for each row of `weights` [k, k] the mean of all clients' tensors [k, ...] with those weights.

    Rows are scaled to sum to 1. All rows are computed from the same uploads: nothing is overwritten while it is
    still being read. Where there are many, clients with the same weights share one computation.
    """
    distinct, whose = _distinct_rows(weights)
    mixed: Tensors = {}
    for name, value in params.items():
        flat = value.reshape(len(value), -1)
        blocks = [
            (block.to(flat.dtype) / block.sum(dim=1, keepdim=True)) @ flat
            for block in torch.split(weights[distinct], MIXED_AT_ONCE)
        ]
        rows = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
        mixed[name] = (rows if len(distinct) == len(whose) else rows[whose]).view_as(value)
    return mixed


MIXED_AT_ONCE = 1024
"""Rows of weights that are turned into numbers of the models' precision at a time."""
WORTH_COMPARING = 100
"""With fewer clients, mixing takes no longer than copying what is the same."""


def _distinct_rows(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return which rows differ from all before them, and for each row its place among those."""
    if len(matrix) < WORTH_COMPARING:
        every = torch.arange(len(matrix), device=matrix.device)
        return every, every
    places: dict[bytes, int] = {}
    first: list[int] = []
    whose = []
    for number, row in enumerate(matrix.cpu().contiguous().view(torch.uint8).numpy()):
        digest = hashlib.blake2b(row, digest_size=16).digest()
        if digest not in places:
            places[digest] = len(first)
            first.append(number)
        whose.append(places[digest])
    return torch.tensor(first, device=matrix.device), torch.tensor(whose, device=matrix.device)


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
