"""Requests of the server and replies of the nodes, and the checks on what a reply contains.

Nothing that arrives is unpickled, and nothing is used before it has been checked.
"""

import hashlib
import io
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedrema.deploy.limits import LARGEST_NUMBER, count, quoted
from fedrema.deploy.scores import Score, ScoreChecks
from fedrema.errors import BadInput
from fedrema.models.body_and_head import Tensors

CLASS_NAME = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:: |$)")
"""How the last line of a traceback begins."""
LARGEST_HEADER = 4096
"""Bytes of the header of an array; NumPy writes 128, or a few more."""


@dataclass(frozen=True)
class Request:
    """From the server to one client, at the start of a round."""

    round: int
    last_used_round: int
    """The last round in which this client's reply was used; 0: none yet. It resumes from its state after that round."""
    common: Tensors
    """Parameters that all clients share."""
    own: Tensors
    """The client's personal parameters: the mean of the others' until a reply of it was used, and empty in round 1."""
    inbox_common: Tensors
    """Tensors that the method sends to all clients in addition to parameters."""
    inbox_own: Tensors
    """Tensors that the method sends to this client only."""
    train: bool = True
    """Whether to train; False after the last round, when the client only scores the received model."""
    late: bool = False
    """Whether its state starts from this model, because none of its replies was used yet."""
    session: bytes = b""
    """With secure aggregation: a random number for this attempt at the round, the same for all clients."""


@dataclass(frozen=True)
class Reply:
    """From a client to the server, at the end of a round."""

    round: int
    count: int
    """Number of training samples."""
    params: Tensors = field(default_factory=dict)
    """Trained parameters, without the private ones."""
    extras: Tensors = field(default_factory=dict)
    """Tensors that the method sends in addition to parameters."""
    loss: float | None = None
    """Mean training loss; None if the node does not report it."""
    received: Score | None = None
    """Score of the received model, which is the result of the previous round; None without test samples."""
    trained: Score | None = None
    """Score right after training; None without test samples."""
    epsilon: float | None = None
    """The ε that the node has spent so far; None if it is unbounded, because the node sent replies without noise."""


@dataclass(frozen=True)
class Expected:
    """What a reply must contain."""

    scores: ScoreChecks
    params: Tensors = field(default_factory=dict)
    """Parameters with the names, types and shapes of those in a reply."""
    extras: Tensors = field(default_factory=dict)
    """The same for the tensors that the method sends in addition."""

    def without_training(self) -> "Expected":
        """Return what a reply to a request without training must contain: scores only."""
        return Expected(self.scores)


def sha256_of(start: bytes, groups: Mapping[str, Tensors]) -> "hashlib._Hash":
    """Return the SHA-256 of some bytes and of groups of received tensors, with their names, types and shapes.

    The digests in checkpoints (`runs.tensors`) are shorter: they find damage, and would not stop a hostile server.
    """
    digest = hashlib.sha256(start)
    for group, tensors in groups.items():
        for name, value in sorted(tensors.items()):
            digest.update(json.dumps([group, name, str(value.dtype), list(value.shape)]).encode())
            digest.update(value.contiguous().numpy().tobytes())
    return digest


FACTS = ("round", "count", "loss", "epsilon")
"""The names of everything in a reply except its tensors and scores."""


def facts_of(reply: Reply) -> dict[str, int | float | list[int] | list[float]]:
    """Return everything in a reply except its tensors, by name."""
    facts: dict[str, int | float | list[int] | list[float]] = {"round": reply.round, "count": reply.count}
    numbers = {"loss": reply.loss, "epsilon": reply.epsilon}
    facts |= {name: value for name, value in numbers.items() if value is not None}
    for name, score in (("received", reply.received), ("trained", reply.trained)):
        if score is not None:
            facts |= score.facts(name)
    return facts


def checked_reply(facts: Mapping[str, Any], params: Tensors, extras: Tensors, scores: ScoreChecks) -> Reply:
    """Return a reply with tensors that were checked before; refuses facts that are unknown or out of range."""
    if unknown := sorted(set(facts) - set(FACTS) - scores.facts):
        raise BadInput(f"{quoted(unknown[0])!r} is not expected in its reply")
    return Reply(
        count(facts.get("round"), "round"),
        count(facts.get("count"), "count"),
        params,
        extras,
        _number(facts, "loss"),
        scores.read(facts, "received"),
        scores.read(facts, "trained"),
        _number(facts, "epsilon"),
    )


def without_class(error: str) -> str:
    """Return the last line of a traceback without the name of the exception's class."""
    if error.startswith("MemoryError"):
        return "it has not enough memory"
    found = CLASS_NAME.match(error)
    return (error[found.end() :] or "it failed; its node.log may say why") if found else error


def check_names(names: set[str], expected: Tensors) -> None:
    """Raise `BadInput` unless the names of tensors are exactly the expected ones."""
    if different := sorted(names ^ set(expected)):
        name = different[0]
        raise BadInput(f"{quoted(name)!r} is {'missing' if name in expected else 'not expected'}")


def checked_tensor(name: str, dtype: str, shape: tuple[int, ...], data: bytes, expected: Tensor) -> Tensor:
    """Decode an array in NumPy's .npy format; refuses other types, shapes and sizes before the header is parsed.

    `dtype` and `shape` are those that the message declares; the header must be the same.
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
    read = np.lib.format.read_array_header_1_0(header, max_header_size=LARGEST_HEADER)  # shape, order and type
    if read != (like.shape, False, like.dtype) or len(data) != header.tell() + like.nbytes:
        raise BadInput(f"the header of {name!r} does not describe {like.dtype} of shape {like.shape}")
    return torch.from_numpy(np.frombuffer(data, like.dtype, offset=header.tell()).reshape(like.shape).copy())


def _number(facts: Mapping[str, Any], name: str) -> float | None:
    value = facts.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not abs(value) <= LARGEST_NUMBER:
        raise BadInput(f"its {name} must be a number up to {LARGEST_NUMBER:g}, got {quoted(repr(value))}")
    return float(value)
