"""What travels between the server and a client, whatever carries it."""

from dataclasses import dataclass, field

from fedrema.models.body_and_head import Tensors


@dataclass(frozen=True)
class Letter:
    """From the server to one client, at the start of a round."""

    round: int
    accepted: int
    """The last round in which this client's reply counted; 0: none yet. What it kept for itself since is undone."""
    common: Tensors
    """Parameters that everybody uses."""
    own: Tensors
    """Its personal parameters; none before its first reply."""
    mail: Tensors
    """What the server sends to everybody beside parameters."""
    own_mail: Tensors
    """What it sends to this client alone."""
    train: bool = True
    """Whether to train, or only to score what came: after the last round."""
    late: bool = False
    """Whether it joined after the first round and no reply of it has counted yet: its copies are made of this model."""


@dataclass(frozen=True)
class Score:
    """Right answers, and questions, in the two halves of a client's test samples."""

    correct: tuple[int, int]
    asked: tuple[int, int]


@dataclass(frozen=True)
class Reply:
    """From a client to the server, at the end of a round."""

    round: int
    count: int
    """How many samples it trained on."""
    params: Tensors = field(default_factory=dict)
    """Trained parameters: all but the private ones."""
    extras: Tensors = field(default_factory=dict)
    """What the method sends beside them."""
    loss: float | None = None
    """Mean loss of its training. None where that is kept to itself."""
    received: Score | None = None
    """How well it was served by what came: the end of the round before. None where it has no test samples."""
    trained: Score | None = None
    """The same right after its training."""
    epsilon: float | None = None
    """What of its privacy budget it has spent; None where there is none."""
