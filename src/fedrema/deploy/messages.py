"""Requests of the server and replies of the nodes, and the checks on what a reply contains.

Nothing that arrives is unpickled, and nothing is used before it has been checked.
"""

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedrema.errors import BadInput
from fedrema.models.body_and_head import Tensors

LARGEST_COUNT = 10**12
"""No count in a reply may be above this."""
LARGEST_NUMBER = 1e12
"""No other number in a reply, apart from tensors, may be above this."""
LARGEST_HEADER = 4096
"""Bytes of the header of an array; NumPy writes 128, or a few more."""
LONGEST_QUOTE = 100
"""How much of a text from another machine is quoted in a message."""


@dataclass(frozen=True)
class Request:
    """From the server to one client, at the start of a round."""

    round: int
    accepted: int
    """The last round in which this client's reply was used; 0: none yet. It resumes from its state after that round."""
    common: Tensors
    """Parameters that all clients share."""
    own: Tensors
    """Its personal parameters; empty before its first reply."""
    inbox_common: Tensors
    """Tensors that the method sends to all clients in addition to parameters."""
    inbox_own: Tensors
    """What the method sends to this client only."""
    train: bool = True
    """Whether to train, or only to score the received model: after the last round."""
    late: bool = False
    """Whether it joined after the first round and has no used reply yet: its state starts from this model."""


@dataclass(frozen=True)
class Score:
    """Correct predictions and test samples, in the two halves of a client's test samples."""

    correct: tuple[int, int]
    asked: tuple[int, int]


@dataclass(frozen=True)
class Reply:
    """From a client to the server, at the end of a round."""

    round: int
    count: int
    """Number of samples that it trained on."""
    params: Tensors = field(default_factory=dict)
    """Trained parameters, without the private ones."""
    extras: Tensors = field(default_factory=dict)
    """Tensors that the method sends in addition to parameters."""
    loss: float | None = None
    """Mean training loss; None where the node does not report it."""
    received: Score | None = None
    """Score of the received model, which is the result of the previous round; None without test samples."""
    trained: Score | None = None
    """Score right after training."""
    epsilon: float | None = None
    """The privacy budget that it has spent; None where it has none."""


SCORES_ONLY = Reply(0, 0)
"""The names and shapes of a reply to a request without training."""
FACTS = ("round", "count", "loss", "epsilon", "received-correct", "received-asked", "trained-correct", "trained-asked")
"""The fields of a reply other than tensors."""


def facts_of(reply: Reply) -> dict[str, int | float | list[int]]:
    """Return everything in a reply except its tensors, by name."""
    facts: dict[str, int | float | list[int]] = {"round": reply.round, "count": reply.count}
    numbers = {"loss": reply.loss, "epsilon": reply.epsilon}
    facts |= {name: value for name, value in numbers.items() if value is not None}
    for name, score in (("received", reply.received), ("trained", reply.trained)):
        if score is not None:
            facts[f"{name}-correct"], facts[f"{name}-asked"] = list(score.correct), list(score.asked)
    return facts


def checked_reply(facts: Mapping[str, Any], params: Tensors, extras: Tensors) -> Reply:
    """Return a reply with checked tensors and these facts; refuses facts that are unknown or out of range."""
    if unknown := sorted(set(facts) - set(FACTS)):
        raise BadInput(f"{quoted(unknown[0])!r} is not expected in its reply")
    return Reply(
        _count(facts.get("round"), "round"),
        _count(facts.get("count"), "count"),
        params,
        extras,
        _number(facts, "loss"),
        _score(facts, "received"),
        _score(facts, "trained"),
        _number(facts, "epsilon"),
    )


def check_names(found: set[str], expected: Tensors) -> None:
    """Refuse other names of tensors than the expected ones."""
    if different := sorted(found ^ set(expected)):
        name = different[0]
        raise BadInput(f"{quoted(name)!r} is {'missing' if name in expected else 'not expected'}")


def checked_tensor(name: str, dtype: str, shape: tuple[int, ...], data: bytes, expected: Tensor) -> Tensor:
    """Decode an array in NumPy's .npy format; refuses other types, shapes and sizes before the header is parsed.

    `dtype` and `shape` are what the message declares, which the header must confirm.
    """
    like = expected.numpy()
    if shape != like.shape:
        raise BadInput(f"{name!r} has shape {quoted(str(shape))} instead of {like.shape}")
    if dtype != str(like.dtype):
        raise BadInput(f"{name!r} holds torch.{quoted(dtype)} instead of {expected.dtype}")
    if not like.nbytes < len(data) <= like.nbytes + LARGEST_HEADER:
        raise BadInput(f"{name!r} takes {len(data)} bytes instead of {like.nbytes} and a header")
    header = io.BytesIO(data[:LARGEST_HEADER])
    if (version := np.lib.format.read_magic(header)) != (1, 0):
        raise BadInput(f"{name!r} is in version {version} of NumPy's format instead of (1, 0)")
    found, by_column, kind = np.lib.format.read_array_header_1_0(header, max_header_size=LARGEST_HEADER)
    if (found, by_column, kind) != (like.shape, False, like.dtype) or len(data) != header.tell() + like.nbytes:
        raise BadInput(f"the header of {name!r} does not describe {like.dtype} of shape {like.shape}")
    return torch.from_numpy(np.frombuffer(data, kind, offset=header.tell()).reshape(found).copy())


def quoted(text: str) -> str:
    """Shorten a text from another machine, to quote it."""
    return text if len(text) <= LONGEST_QUOTE else f"{text[:LONGEST_QUOTE]}…"


def _count(value: object, name: str) -> int:
    if type(value) is not int or not 0 <= value <= LARGEST_COUNT:
        raise BadInput(f"its {name} must be a whole number from 0 to {LARGEST_COUNT}, got {quoted(repr(value))}")
    return value


def _number(facts: Mapping[str, Any], name: str) -> float | None:
    value = facts.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not abs(value) <= LARGEST_NUMBER:
        raise BadInput(f"its {name} must be a number up to {LARGEST_NUMBER:g}, got {quoted(repr(value))}")
    return float(value)


def _score(facts: Mapping[str, Any], name: str) -> Score | None:
    pairs: list[Any] = [facts.get(f"{name}-{part}") for part in ("correct", "asked")]
    if pairs == [None, None]:
        return None
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise BadInput(f"its {name} score must be two pairs of numbers, got {quoted(repr(pairs))}")
    (first, second), (first_asked, second_asked) = ([_count(n, f"{name} score") for n in pair] for pair in pairs)
    if first > first_asked or second > second_asked:
        raise BadInput(
            f"its {name} score has {first} and {second} correct predictions of {first_asked} and {second_asked} samples"
        )
    return Score((first, second), (first_asked, second_asked))
