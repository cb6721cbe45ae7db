"""What hooks receive and return: one client's view of a round, and the server's view of all uploads.

Nothing here knows how many clients train at once, on which device, in a simulation or over a network.
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
