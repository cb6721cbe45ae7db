"""What hooks receive and return: one client's view of a round, and the server's view of all uploads.

These types do not depend on how many clients train at once, on the device, or on whether clients are simulated.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from fedrema.base.random import torch_generator
from fedrema.models.body_and_head import Net, Tensors

Number = int | float | bool

State = dict[str, Tensor | Number]
"""State of the server between rounds: tensors and numbers only, so that it can be saved."""


class Role(StrEnum):
    """How a parameter is exchanged after local training."""

    SHARED = "shared"
    """Clients send it; `aggregate` gets only the mean, weighted by sample counts, and returns one copy for all."""
    COLLECTED = "collected"
    """Clients send it; `aggregate` gets each client's (for a median, for example) and returns one copy for all."""
    PERSONAL = "personal"
    """Clients send it; `aggregate` gets each client's and returns a separate copy for each."""
    PRIVATE = "private"
    """Never leaves its client."""


@dataclass(frozen=True)
class Batch:
    """Samples of one client; `mask` is 1 for real samples and 0 for padding."""

    x: Tensor
    """[n, ...] the inputs."""
    y: Tensor
    """[n] classes, levels, quantities or counts; or [n, L] labels."""
    mask: Tensor
    """[n] 1 for real samples, 0 for padding."""
    index: Tensor
    """Index of each sample in the client's training set, for methods that store something per sample. `begin` and `end`
    receive all samples in this order."""
    key: Tensor | None = None
    """In training, one integer that keys the random numbers of layers such as dropout."""

    def rows(self, which: slice) -> "Batch":
        """Return some of the samples."""
        return Batch(self.x[which], self.y[which], self.mask[which], self.index[which], self.key)


@dataclass(frozen=True)
class Client:
    """The tensors of one client during training."""

    params: Tensors
    """Everything that can be trained: the network's parameters and what `Method.start` added."""
    received: Tensors
    """`params` at the start of this round's training."""
    memory: Tensors
    """Private tensors, kept between rounds."""
    inbox: Tensors
    """What the server sent in addition to parameters, and what `Method.begin` computed for this round."""
    count: Tensor
    """Number of its training samples."""

    def having(self, **changes: Any) -> "Client":
        """Return a copy with some fields replaced."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Moment:
    """A point in training, and its random numbers."""

    round: int
    """1 for the first round; 0 before it."""
    rounds: int
    """Number of rounds of the run."""
    seed: int
    """The training seed."""

    def generator(self, purpose: str) -> torch.Generator:
        """Return the random generator of this round for one purpose."""
        return torch_generator(self.seed, self.round, "server", purpose)


Loss = Callable[[Net, Client, Batch], Tensor]


def everything(name: str) -> bool:
    """Select every parameter."""
    return True


@dataclass(frozen=True)
class Move:
    """A step that assigns values, in addition to or instead of descending."""

    along: Tensors = field(default_factory=dict)
    """Directions to descend along, with the phase's learning rate and momentum."""
    put: Tensors = field(default_factory=dict)
    """Values to assign."""


Gradient = Callable[[Client, Batch], Tensors]
"""Returns the gradient of the phase's loss, clipped and including weight decay."""

Step = Callable[[Gradient, Client, tuple[Batch, ...]], Tensors | Move]
"""Returns the direction to descend along, or a `Move`; must work with and without a leading client axis."""


def gradient_step(gradient: Gradient, client: Client, batches: tuple[Batch, ...]) -> Tensors:
    """Descend along the gradient on a single batch."""
    return gradient(client, batches[0])


@dataclass(frozen=True)
class Phase:
    """A part of local training; gradients are computed only for what it trains."""

    epochs: int
    """Number of passes over the client's training samples."""
    lr: float
    """Learning rate."""
    momentum: float
    """Momentum of SGD."""
    trains: Callable[[str], bool] = everything
    """Returns whether the parameter of a name is trained."""
    loss: Loss | None = None
    """The objective, if it is not the method's `loss`."""
    step: Step = gradient_step
    """Returns the direction to descend along, or a `Move`."""
    batches_per_step: int = 1
    """Number of batches that `step` receives."""
    steps: int | None = None
    """Stop after this many steps, even within an epoch."""
    epochs_of: Callable[[Client], Tensor] | None = None
    """Returns a client's number of epochs, if it is not `epochs` for all clients."""
    reset_momentum: bool = False
    """Start with zero momentum, even where momentum is kept between rounds."""


@dataclass(frozen=True)
class Uploads:
    """What the server received: one row per client, in ascending order of their rows."""

    clients: Tensor
    """[k] the clients' rows in the federation."""
    params: Tensors
    """[k, ...] the personal and the collected parameters of each client."""
    extras: Tensors
    """[k, ...] what `Method.end` sent in addition."""
    counts: Tensor
    """[k] numbers of training samples."""
    names: tuple[str, ...] = ()
    """Names of the clients; random draws for a client must depend on its name, never on its row."""
    mean: Tensors = field(default_factory=dict)
    """The shared parameters, averaged over these clients by sample counts."""
    before: Tensors = field(default_factory=dict)
    """The shared and the collected parameters at the start of the round."""
    everyone: int = 0
    """Number of clients that have joined, whether or not they participate in this round."""


@dataclass(frozen=True)
class Answer:
    """The server's answer. Tensors named like a parameter replace it; all others go to the clients' inboxes."""

    shared: Tensors
    """One copy for all clients."""
    personal: Tensors = field(default_factory=dict)
    """[k, ...] a row for each client that uploaded."""
    state: State = field(default_factory=dict)
    """The server's state: tensors and numbers only."""
    trace: Mapping[str, Any] = field(default_factory=dict)
    """Values to record: numbers and lists in the round's record, [k, k] matrices in the relations."""
