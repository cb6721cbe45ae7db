"""A node's results by round, for its owner: `results.jsonl` in the node's folder, which never leaves it."""

import json
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from fedrema.deploy.messages import Reply

FILE = "results.jsonl"


@dataclass(frozen=True)
class NodeResult:
    """What a node has computed in one round."""

    round: int
    time: str
    samples: int
    metric: str = ""
    """Name of the primary metric; empty without test samples."""
    received: float | None = None
    """Its value for the model that the node received."""
    trained: float | None = None
    """Its value after training."""
    loss: float | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    """All metrics of the received model."""


def append_result(folder: Path, reply: Reply) -> None:
    """Add the scores in a reply, before noise is added to it, to the results in a node's folder."""
    score = reply.received or reply.trained
    metric = next(iter(score.sums), "") if score is not None else ""
    result = NodeResult(
        reply.round,
        datetime.now(UTC).isoformat(timespec="seconds"),
        reply.count,
        metric,
        None if reply.received is None else reply.received.value(metric),
        None if reply.trained is None else reply.trained.value(metric),
        reply.loss,
        {} if reply.received is None else {name: reply.received.value(name) for name in reply.received.sums},
    )
    with (folder / FILE).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(asdict(result)) + "\n")


def read_results(folder: Path) -> list[NodeResult]:
    """Return the results in a node's folder by round, without incomplete lines; of a repeated round, the last one."""
    try:
        lines = (folder / FILE).read_bytes().splitlines()
    except OSError:
        return []
    found: dict[int, NodeResult] = {}
    for line in lines:
        try:
            result = msgspec.json.decode(line, type=NodeResult)
        except (msgspec.DecodeError, ValueError, RecursionError):
            continue
        found[result.round] = result
    return [found[number] for number in sorted(found)]
