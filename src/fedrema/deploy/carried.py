"""Letters and replies as Flower's records. Nothing that arrives is unpickled, and nothing is believed unchecked."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedrema.deploy.letters import Letter, Reply, Score
from fedrema.errors import BadInput
from fedrema.net import Tensors

FACTS = "facts"


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


def read_reply(content: RecordDict) -> Reply:
    """Return a reply; refuses what cannot be one, in a sentence."""
    facts = _facts(content)
    try:
        return Reply(
            int(facts["round"]),
            int(facts["count"]),
            _tensors(content, "params"),
            _tensors(content, "extras"),
            _number(facts, "loss"),
            _score(facts, "received"),
            _score(facts, "trained"),
            _number(facts, "epsilon"),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise BadInput(f"its reply cannot be read: {error!r}") from error


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


def _number(facts: Mapping[str, Any], name: str) -> float | None:
    if name not in facts:
        return None
    number = float(facts[name])
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}")
    return number


def _score(facts: Mapping[str, Any], name: str) -> Score | None:
    if f"{name}-asked" not in facts:
        return None
    correct, asked = ([int(number) for number in facts[f"{name}-{part}"]] for part in ("correct", "asked"))
    if len(correct) != 2 or len(asked) != 2 or not all(0 <= c <= a for c, a in zip(correct, asked, strict=True)):
        raise ValueError(f"{correct} right of {asked}")
    return Score((correct[0], correct[1]), (asked[0], asked[1]))
