"""The status of a federation, from its folder and from the SuperLink if it responds: `fedrema deploy status`."""

import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import NamedTuple

from fedrema.deploy.flower_control import NotResponding, connected_control, last_heartbeat
from fedrema.deploy.folder import FORGOTTEN, ServerFolder
from fedrema.deploy.messages import without_class
from fedrema.deploy.rejected_keys import RejectedKey, current_rejections
from fedrema.deploy.run_state import FailedAttempts, stop_reason
from fedrema.deploy.tls import valid_until
from fedrema.runs.directory import RunDirectory
from fedrema.runs.lock import RunLock
from fedrema.simulation.records import RoundRecord

RECENT_ROUNDS = 20
"""Rejected and clipped replies are counted over this many rounds."""


@dataclass(frozen=True)
class NodeStatus:
    """The status of one node."""

    name: str
    state: str
    """online, offline, registered (has never connected), or unknown (the SuperLink does not respond)."""
    last_round: int
    """The last round in which its reply was used; 0: none."""
    value: float | None
    """The latest value of the primary metric."""
    accuracy: float | None
    epsilon: float | None
    rejected: int
    """Number of recent rounds in which its reply was rejected or missing."""
    clipped: int
    """Number of recent rounds in which its reply was clipped."""
    problem: str
    """Why its last reply was not usable, or was clipped, and how often; empty once a reply was used as it was sent."""
    rounds_used: int = 0
    """Number of rounds in which its reply was used."""
    last_seen: float | None = None
    """When the SuperLink last heard from it, in seconds since 1970; None if it does not respond or never did."""


@dataclass(frozen=True)
class FederationStatus:
    """The status of a federation; as JSON, the output of `fedrema deploy status --json`."""

    state: str
    method: str
    round: int
    rounds: int
    metric: str
    """Name of the primary metric; empty before the first round."""
    value: float | None
    """Its value in the last round, over the test samples of all nodes."""
    accuracy: float | None
    checkpoint_age: float | None
    """Seconds since the last checkpoint."""
    certificate_days: int
    """Days until the server's certificate expires."""
    members: tuple[NodeStatus, ...]
    rejected_keys: tuple[RejectedKey, ...] = ()
    """Keys that could not connect recently."""
    last_round_time: float | None = None
    """When the last round was completed, in seconds since 1970."""
    certificate_expires: float = 0.0
    """When the server's certificate expires, in seconds since 1970."""


def read_status(folder: ServerFolder) -> FederationStatus:
    """Return the status of a federation; changes nothing."""
    directory = RunDirectory(folder.run)
    config = folder.run_config()
    records = directory.rounds()
    joined: list[str] = directory.config()["federation"]["names"] if directory.config_file.is_file() else []
    states, repeated = _node_states(folder), FailedAttempts.read(folder.run)
    registered = [file.stem for file in sorted(folder.keys.glob("*.pub"))]
    saved = directory.checkpoint_file.stat().st_mtime if directory.checkpoint_file.is_file() else None
    expires = valid_until(folder.path / "server.crt")
    return FederationStatus(
        _state(folder, responding=states is not None),
        str(config["method"]),
        records[-1].round if records else 0,
        folder.rounds(),
        _primary(records),
        records[-1].primary.value if records and records[-1].primary is not None else None,
        records[-1].accuracy if records else None,
        None if saved is None else time.time() - saved,
        (expires - datetime.now(UTC)).days,
        tuple(
            replace(
                _node(name, joined, records, "unknown" if states is None else states.get(name, NEVER).state, repeated),
                last_seen=(states or {}).get(name, NEVER).last_seen,
            )
            for name in dict.fromkeys([*joined, *registered])
            if not FORGOTTEN.fullmatch(name)
        ),
        current_rejections(folder),
        saved,
        expires.timestamp(),
    )


def _state(folder: ServerFolder, responding: bool) -> str:
    if RunLock(folder.run).is_held():
        return "running" if responding else "running, but the SuperLink does not respond"
    if folder.is_finished():
        return "finished"
    if why := stop_reason(folder.run):
        return f"failed: {why}"
    return "starting" if responding else "stopped"


class Connection(NamedTuple):
    """What the SuperLink knows about a node."""

    state: str
    last_seen: float | None


NEVER = Connection("", None)
NO_ATTEMPTS = FailedAttempts()


def _node_states(folder: ServerFolder) -> dict[str, Connection] | None:
    """Return the connections of the nodes by name; None if the SuperLink does not respond."""
    try:
        with connected_control(folder.control_address, folder.path / "ca.crt") as control:
            return {node.name: Connection(node.status, last_heartbeat(node)) for node in control.nodes()}
    except NotResponding:
        return None


def _node(
    name: str, joined: list[str], records: list[RoundRecord], state: str, repeated: FailedAttempts = NO_ATTEMPTS
) -> NodeStatus:
    """Return the status of a node; `joined` are the names of all clients in the records, by row."""
    row = joined.index(name) if name in joined else -1
    used_rounds = [record.round for record in records if row in record.participants]
    reports = [(record.round, record.nodes) for record in records if record.nodes is not None]
    spent = [nodes.epsilon[name] for _, nodes in reports if name in nodes.epsilon]
    last_used = used_rounds[-1] if used_rounds else 0
    unresolved = [
        f"round {number}: {without_class(why)}"
        for number, nodes in reports
        for why in (nodes.rejected.get(name), nodes.clipped.get(name))
        if why is not None and number >= last_used
    ]
    recent = [nodes for number, nodes in reports if number > records[-1].round - RECENT_ROUNDS]
    rejected = sum(name in nodes.rejected for nodes in recent)
    clipped = sum(name in nodes.clipped for nodes in recent)
    problem = unresolved[-1] if unresolved else ""
    counts = f" (rejected {rejected}, clipped {clipped} times in the last {RECENT_ROUNDS} rounds)"
    if why := repeated.missing.get(name):  # newer than all records
        problem, counts = f"round {repeated.round}, attempt {repeated.attempts}: {without_class(why)}", ""
    return NodeStatus(
        name,
        state or "key not registered",
        last_used,
        _latest(records, _primary(records), row),
        _latest(records, "accuracy", row),
        spent[-1] if spent else None,
        rejected,
        clipped,
        problem + counts if problem and rejected + clipped > 1 else problem,
        len(used_rounds),
    )


def _primary(records: list[RoundRecord]) -> str:
    """Return the name of the primary metric; empty if no round has been scored."""
    return next((name for record in reversed(records) for name in record.metrics), "")


def _latest(records: list[RoundRecord], metric: str, row: int) -> float | None:
    """Return the latest value of a metric that the client in a row has."""
    by_round = [record.metrics[metric].clients or [] for record in records if metric in record.metrics]
    values = [clients[row] for clients in by_round if 0 <= row < len(clients) and clients[row] is not None]
    return values[-1] if values else None
