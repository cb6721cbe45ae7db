"""Requests and replies as Flower's records."""

from collections.abc import Mapping
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MessageType, RecordDict
from flwr.common.constant import SType

from fedrema.core.fixed_point import WORDS
from fedrema.deploy.agreement import Agreement
from fedrema.deploy.limits import quoted
from fedrema.deploy.messages import (
    Expected,
    Reply,
    Request,
    check_names,
    checked_reply,
    checked_tensor,
    facts_of,
)
from fedrema.errors import BadInput, FedremaError
from fedrema.models.body_and_head import Tensors

T = TypeVar("T")
FACTS = "facts"
"""The record that holds everything except tensors."""
AGREEMENT = "agreement"
"""The record that holds what the nodes agreed on before round 1."""
STATISTICS = "statistics"
"""The fact, and the kind of query, with the statistics that a node sends before round 1."""
SECURE = "secure"
"""The record with what secure aggregation exchanges, except masked contributions."""
MASKED, VECTOR = "masked", "vector"
"""The record with a masked contribution, and its only array."""
SHARE, MASK, UNMASK = (f"{MessageType.QUERY}.{stage}" for stage in ("share", "mask", "unmask"))
"""Types of the messages of secure aggregation."""


def array_record(tensors: Tensors) -> ArrayRecord:
    """Return tensors as a record; several messages can contain the same record, which is then stored once."""
    return ArrayRecord({name: Array(value.detach().cpu().contiguous().numpy()) for name, value in tensors.items()})


def request_record(
    request: Request, name: str, common: ArrayRecord, inbox_common: ArrayRecord, agreement: bytes = b""
) -> RecordDict:
    """Return a request to a client; the last three are what all clients receive."""
    facts: dict[str, Any] = {"round": request.round, "last-used-round": request.last_used_round, "name": name}
    facts |= {"session": request.session} if request.session else {}
    return RecordDict(
        {
            "common": common,
            "own": array_record(request.own),
            "inbox_common": inbox_common,
            "inbox_own": array_record(request.inbox_own),
            FACTS: ConfigRecord({**facts, "train": request.train, "late": request.late}),
            **({AGREEMENT: ConfigRecord({AGREEMENT: agreement})} if agreement else {}),
        }
    )


def read_request(content: RecordDict) -> tuple[Request, str]:
    """Return a request, and the name of the client that it is for."""
    facts = _facts(content)
    tensors = {group: _tensors(content, group) for group in ("common", "own", "inbox_common", "inbox_own")}
    request = Request(
        int(facts["round"]),
        int(facts["last-used-round"]),
        train=bool(facts["train"]),
        late=bool(facts["late"]),
        session=bytes(facts.get("session", b"")),
        **tensors,
    )
    return request, str(facts["name"])


def read_agreement(content: RecordDict) -> Agreement | None:
    """Return what the nodes agreed on, from a request; None if there was nothing to agree on."""
    record = content.get(AGREEMENT)
    if not isinstance(record, ConfigRecord):
        return None
    return Agreement.decoded(cast(bytes, record[AGREEMENT]))


def reply_record(reply: Reply) -> RecordDict:
    """Return a reply as a record."""
    facts: dict[str, Any] = {**facts_of(reply)}
    tensors = {"params": array_record(reply.params), "extras": array_record(reply.extras)}
    return RecordDict({**tensors, FACTS: ConfigRecord(facts)})


def read_reply(content: RecordDict, expected: Expected) -> Reply:
    """Return a reply; one with other names, types or shapes than the expected one is refused before it is decoded."""
    try:
        params, extras = _checked(content, "params", expected.params), _checked(content, "extras", expected.extras)
        return checked_reply(_facts(content), params, extras, expected.scores)
    except FedremaError:
        raise
    except Exception as error:  # no message of a node may stop the server
        raise BadInput(f"its reply cannot be read: {quoted(str(error))}") from error


def stage_record(content: object) -> RecordDict:
    """Return a message of secure aggregation as a record."""
    return RecordDict({SECURE: ConfigRecord({SECURE: msgspec.msgpack.encode(content)})})


def read_stage(content: RecordDict, kind: type[T], most: int) -> T:
    """Return a message of secure aggregation of at most `most` bytes; refuses anything that is not of this type."""
    record = content.get(SECURE)
    blob = record.get(SECURE) if isinstance(record, ConfigRecord) else None
    if not isinstance(blob, bytes) or len(blob) > most:
        raise BadInput("its message of secure aggregation is missing or too long")
    try:
        return msgspec.msgpack.decode(blob, type=kind)
    except msgspec.DecodeError as error:
        raise BadInput(f"its message of secure aggregation cannot be read: {quoted(str(error))}") from error


def read_vector(content: RecordDict, length: int, bits: int) -> np.ndarray:
    """Return a masked contribution of this length."""
    try:
        expected = torch.from_numpy(np.zeros(length, WORDS[bits]))
        return _checked(content, MASKED, {VECTOR: expected})[VECTOR].numpy()
    except FedremaError:
        raise
    except Exception as error:  # no message of a node may stop the server
        raise BadInput(f"its masked contribution cannot be read: {quoted(str(error))}") from error


def _facts(content: RecordDict) -> Mapping[str, Any]:
    facts = content.get(FACTS)
    if not isinstance(facts, ConfigRecord):
        raise BadInput("its message has no facts")
    return facts


def _arrays(content: RecordDict, group: str) -> ArrayRecord:
    record = content.get(group)
    if not isinstance(record, ArrayRecord):
        raise BadInput(f"its message has no {group!r}")
    return record


def _tensors(content: RecordDict, group: str) -> Tensors:
    """Return the tensors of a message from the server, whose shapes are not known in advance."""
    try:
        arrays = {name: array.numpy() for name, array in _arrays(content, group).items()}
        return {name: torch.from_numpy(np.array(value)) for name, value in arrays.items()}
    except (TypeError, ValueError, EOFError, OSError) as error:
        raise BadInput(f"{group!r} in its message cannot be read: {error}") from error


def _checked(content: RecordDict, group: str, expected: Tensors) -> Tensors:
    record = _arrays(content, group)
    check_names(set(record), expected)
    for name in expected:
        if (kind := record[name].stype) != SType.NUMPY:
            raise BadInput(f"{name!r} is serialised as {quoted(str(kind))!r} instead of {SType.NUMPY!r}")
    return {
        name: checked_tensor(name, str(array.dtype), array.shape, array.data, expected[name])
        for name, array in ((name, record[name]) for name in expected)
    }
