"""Letters and replies as Flower's records. Nothing that arrives is unpickled, and nothing is believed unchecked."""

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from flwr.common.constant import SType
from torch import Tensor

from fedrema.deploy.letters import Letter, Reply, Score
from fedrema.errors import BadInput, FedremaError
from fedrema.models.body_and_head import Tensors

FACTS = "facts"
KNOWN_FACTS = {"round", "count", "loss", "epsilon"} | {
    f"{score}-{part}" for score in ("received", "trained") for part in ("correct", "asked")
}
"""What a reply may say beside its tensors."""
NO_TRAINING = Reply(0, 0)
"""Like a reply that only scores what came."""
MOST_HEADER_BYTES = 4096
"""NumPy's own headers have 128 bytes, or few more."""
MOST_SAMPLES = 10**12
"""No count in a reply may be above this."""
LARGEST_NUMBER = 1e12
"""Nor any other number beside the tensors."""


def packed(tensors: Tensors) -> ArrayRecord:
    """Return tensors as a record; the same record in many messages travels to the server's store once."""
    return ArrayRecord({name: Array(value.detach().cpu().contiguous().numpy()) for name, value in tensors.items()})


def letter_record(letter: Letter, name: str, common: ArrayRecord, mail: ArrayRecord) -> RecordDict:
    """Return a letter to a client; what everybody gets has been packed once."""
    facts: dict[str, Any] = {"round": letter.round, "accepted": letter.accepted, "name": name}
    return RecordDict(
        {
            "common": common,
            "mail": mail,
            "own": packed(letter.own),
            "own_mail": packed(letter.own_mail),
            FACTS: ConfigRecord({**facts, "train": letter.train, "late": letter.late}),
        }
    )


def read_letter(content: RecordDict) -> tuple[Letter, str]:
    """Return a letter, and the name of the client that it is for."""
    facts = _facts(content)
    tensors = {group: _tensors(content, group) for group in ("common", "own", "mail", "own_mail")}
    letter = Letter(
        int(facts["round"]), int(facts["accepted"]), train=bool(facts["train"]), late=bool(facts["late"]), **tensors
    )
    return letter, str(facts["name"])


def reply_record(reply: Reply) -> RecordDict:
    """Return a reply as it travels."""
    facts: dict[str, Any] = {"round": reply.round, "count": reply.count}
    facts |= {name: value for name in ("loss", "epsilon") if (value := getattr(reply, name)) is not None}
    for name in ("received", "trained"):
        if (score := getattr(reply, name)) is not None:
            facts[f"{name}-correct"], facts[f"{name}-asked"] = list(score.correct), list(score.asked)
    return RecordDict({"params": packed(reply.params), "extras": packed(reply.extras), FACTS: ConfigRecord(facts)})


def read_reply(content: RecordDict, expected: Reply) -> Reply:
    """Return a reply; refuses what is not like the expected one, in a sentence, before anything is decoded."""
    try:
        return _read_reply(content, expected)
    except FedremaError:
        raise
    except Exception as error:  # whatever a node sends, it must not stop the server
        raise BadInput(f"its reply cannot be read: {_short(repr(error))}") from error


def _read_reply(content: RecordDict, expected: Reply) -> Reply:
    facts = _facts(content)
    if odd := sorted(set(facts) - KNOWN_FACTS):
        raise BadInput(f"{_short(odd[0])!r} is not expected in its reply")
    return Reply(
        _whole(facts.get("round"), "round"),
        _whole(facts.get("count"), "count"),
        _checked(content, "params", expected.params),
        _checked(content, "extras", expected.extras),
        _number(facts, "loss"),
        _score(facts, "received"),
        _score(facts, "trained"),
        _number(facts, "epsilon"),
    )


def _facts(content: RecordDict) -> Mapping[str, Any]:
    facts = content.get(FACTS)
    if not isinstance(facts, ConfigRecord):
        raise BadInput("its message has no facts")
    return facts


def _tensors(content: RecordDict, group: str) -> Tensors:
    record = content.get(group)
    if not isinstance(record, ArrayRecord):
        raise BadInput(f"its message has no {group!r}")
    try:
        arrays = {name: array.numpy() for name, array in record.items()}
        return {name: torch.from_numpy(np.array(value)) for name, value in arrays.items()}
    except (TypeError, ValueError, EOFError, OSError) as error:
        raise BadInput(f"{group!r} in its message cannot be read: {error}") from error


def _checked(content: RecordDict, group: str, expected: Tensors) -> Tensors:
    """Return the tensors of a record whose names, types, shapes and sizes are the expected ones."""
    record = content.get(group)
    if not isinstance(record, ArrayRecord):
        raise BadInput(f"its message has no {group!r}")
    if odd := sorted(set(record) ^ set(expected)):
        raise BadInput(f"{_short(odd[0])!r} is {'missing' if odd[0] in expected else 'not expected'}")
    return {name: _tensor(name, record[name], expected[name]) for name in expected}


def _tensor(name: str, array: Array, expected: Tensor) -> Tensor:
    """Decode an array of NumPy's .npy format; its header is parsed only once its size is known to be right."""
    like = expected.numpy()
    if array.stype != SType.NUMPY:
        raise BadInput(f"{name!r} is serialised as {_short(str(array.stype))!r} instead of {SType.NUMPY!r}")
    if array.shape != like.shape:
        raise BadInput(f"{name!r} has shape {_short(str(array.shape))} instead of {like.shape}")
    if array.dtype != str(like.dtype):
        raise BadInput(f"{name!r} holds torch.{_short(str(array.dtype))} instead of {expected.dtype}")
    if not like.nbytes < len(array.data) <= like.nbytes + MOST_HEADER_BYTES:
        raise BadInput(f"{name!r} takes {len(array.data)} bytes instead of {like.nbytes} and a header")
    header = io.BytesIO(array.data[:MOST_HEADER_BYTES])
    if (version := np.lib.format.read_magic(header)) != (1, 0):
        raise BadInput(f"{name!r} is in version {version} of NumPy's format instead of (1, 0)")
    shape, by_column, dtype = np.lib.format.read_array_header_1_0(header, max_header_size=MOST_HEADER_BYTES)
    if (shape, by_column, dtype) != (like.shape, False, like.dtype) or len(array.data) != header.tell() + like.nbytes:
        raise BadInput(f"the header of {name!r} does not describe {like.dtype} of shape {like.shape}")
    return torch.from_numpy(np.frombuffer(array.data, dtype, offset=header.tell()).reshape(shape).copy())


def _short(text: str) -> str:
    """Shorten what another machine wrote."""
    return text if len(text) <= 100 else f"{text[:100]}…"


def _whole(value: object, name: str) -> int:
    if type(value) is not int or not 0 <= value <= MOST_SAMPLES:
        raise BadInput(f"its {name} must be a whole number from 0 to {MOST_SAMPLES}, got {_short(repr(value))}")
    return value


def _number(facts: Mapping[str, Any], name: str) -> float | None:
    value = facts.get(name)
    if value is None:
        return None
    if type(value) not in (int, float) or not abs(value) <= LARGEST_NUMBER:
        raise BadInput(f"its {name} must be a number up to {LARGEST_NUMBER:g}, got {_short(repr(value))}")
    return float(value)


def _score(facts: Mapping[str, Any], name: str) -> Score | None:
    halves: list[Any] = [facts.get(f"{name}-{part}") for part in ("correct", "asked")]
    if halves == [None, None]:
        return None
    if not all(isinstance(numbers, list) and len(numbers) == 2 for numbers in halves):
        raise BadInput(f"its {name} score must be two pairs of numbers, got {_short(repr(halves))}")
    (first, second), (first_asked, second_asked) = ([_whole(n, f"{name} score") for n in pair] for pair in halves)
    if first > first_asked or second > second_asked:
        raise BadInput(f"its {name} score is {first} and {second} right of {first_asked} and {second_asked}")
    return Score((first, second), (first_asked, second_asked))
