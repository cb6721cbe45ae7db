"""fedrema deploy status: how a federation stands, from its folder and from the server if it is there."""

import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from fedrema.deploy.control import NotThere, controlling
from fedrema.deploy.keys import valid_until
from fedrema.deploy.places import ServerPlace
from fedrema.deploy.presence import reason, somebody_is_there
from fedrema.runs.directory import RunDirectory
from fedrema.simulation.records import RoundRecord

LATE_ROUNDS = 20
"""How many rounds back rejections and clipping are shown."""


@dataclass(frozen=True)
class Member:
    """One node as the server sees it."""

    name: str
    state: str
    """online, offline, registered (has never come), unknown (the server does not answer)."""
    last_round: int
    """The last round in which its reply counted; 0: none."""
    accuracy: float | None
    epsilon: float | None
    rejected: int
    """In how many of the last rounds it did not count."""
    clipped: int
    """In how many of them its reply was clipped."""
    trouble: str
    """Why it last did not count or was clipped, if that was lately, and how often."""


@dataclass(frozen=True)
class Standing:
    """A federation at this moment."""

    state: str
    method: str
    round: int
    rounds: int
    accuracy: float | None
    checkpoint_age: float | None
    certificate_days: int
    members: tuple[Member, ...]

    def plain(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


def standing(place: ServerPlace) -> Standing:
    """Look at a federation; changes nothing."""
    directory = RunDirectory(place.run)
    config = place.config()
    records = directory.rounds()
    names: list[str] = directory.config()["federation"]["names"] if directory.config_file.is_file() else []
    states = _states(place)
    known = list(dict.fromkeys([*names, *(file.stem for file in sorted(place.keys.glob("*.pub")))]))
    age = time.time() - directory.checkpoint_file.stat().st_mtime if directory.checkpoint_file.is_file() else None
    left = valid_until(place.path / "server.crt") - datetime.now(UTC)
    return Standing(
        _state(place, answering=states is not None),
        str(config["method"]),
        records[-1].round if records else 0,
        int(config["rounds"]),
        records[-1].quantity("accuracy") if records else None,
        age,
        left.days,
        tuple(_member(name, names, records, "unknown" if states is None else states.get(name, "")) for name in known),
    )


def _state(place: ServerPlace, answering: bool) -> str:
    if somebody_is_there(place.run):
        return "going on" if answering else "going on, but the SuperLink does not answer"
    if place.finished():
        return "finished"
    if why := reason(place.run):
        return f"given up: {why}"
    return "starting" if answering else "stopped"


def _states(place: ServerPlace) -> dict[str, str] | None:
    try:
        with controlling(place.control, place.path / "ca.crt") as control:
            return {node.name: node.status for node in control.nodes()}
    except NotThere:
        return None


def _member(name: str, names: list[str], records: list[RoundRecord], state: str) -> Member:
    row = names.index(name) if name in names else -1
    counted = [record.round for record in records if row in record.participants]
    every = [clients for record in records if (clients := record.client_accuracy) is not None]
    accuracies = [clients[row] for clients in every if 0 <= row < len(clients) and clients[row] is not None]
    spent = [record.nodes.epsilon[name] for record in records if record.nodes and name in record.nodes.epsilon]
    late = records[-LATE_ROUNDS:]
    rejections = {record.round: record.rejected[name] for record in late if name in record.rejected}
    clipped = {record.round: record.nodes.clipped for record in late if record.nodes is not None}
    clips = {number: why[name] for number, why in clipped.items() if name in why}
    troubles = [f"round {number}: {why}" for number, why in sorted({**rejections, **clips}.items())]
    times = f" (rejected {len(rejections)}, clipped {len(clips)} times lately)" if len(troubles) > 1 else ""
    return Member(
        name,
        state or "key not registered",
        counted[-1] if counted else 0,
        accuracies[-1] if accuracies else None,
        spent[-1] if spent else None,
        len(rejections),
        len(clips),
        f"{troubles[-1]}{times}" if troubles else "",
    )
