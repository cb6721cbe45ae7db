"""A checkpoint: one safetensors file with the state of a simulation and the identity of its run."""

import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedrema.base.files import atomic_file, make_folder, sync
from fedrema.core import State
from fedrema.engine import ClientTensors
from fedrema.errors import BadInput
from fedrema.runs.checksums import CHANGED, REMEDY
from fedrema.runs.tensors import Altered, Incomplete, read_metadata, read_tensors, write_tensors
from fedrema.simulation.state import SimulationState

FORMAT = 3
RECORDED_RELATIONS = "recorded_relations"
FACTS = {"clients": int, "round": int, "belongs_to": str, "records": list, "server": dict, "order": list}


def save_state(
    state: SimulationState,
    file: Path,
    belongs_to: str,
    more: dict[str, Any] | None = None,
    records: Sequence[str] = (),
) -> None:
    """Write the state of a run; `more` is stored with it as JSON.

    `belongs_to` is the run's identity. `records` are marks (`RunDirectory.mark`), one of which the run's records must
    have for the checkpoint to be accepted.
    """
    groups = {
        "common": state.params.common,
        "own": state.params.own,
        "memory": state.memory,
        "inbox common": state.inbox.common,
        "inbox own": state.inbox.own,
        "velocity": state.velocity,
        "server": {name: value for name, value in state.server.items() if isinstance(value, Tensor)},
        "privacy": state.privacy,
    }
    tensors = {f"{group}/{name}": value for group, members in groups.items() for name, value in members.items()}
    numbers = {name: value for name, value in state.server.items() if not isinstance(value, Tensor)}
    facts = {
        "format": FORMAT,
        "clients": state.clients,
        "round": state.round,
        "belongs_to": belongs_to,
        "records": list(records),
        "server": numbers,
        "order": list(tensors),  # the file sorts names, and how sums over tensors are rounded depends on their order
        **({} if more is None else {"more": more}),
    }
    header = {"fedrema": json.dumps(facts)}
    if file.parent.exists():
        with atomic_file(file) as temporary:
            write_tensors(temporary, tensors, header)
        return
    # The folder is created together with its first checkpoint: a folder without one has lost it.
    folder = file.parent.with_name(f".{file.parent.name}.{secrets.token_hex(4)}.part")
    with atomic_file(folder / file.name) as temporary:
        write_tensors(temporary, tensors, header)
    try:
        make_folder(file.parent.parent)
        folder.replace(file.parent)
        sync(file.parent.parent)
    except OSError as error:
        raise BadInput(
            f"cannot write {file}: {error.strerror}; choose a writable place with enough free space."
        ) from error


def load_state(file: Path, belongs_to: str | None, device: torch.device | None = None) -> SimulationState:
    """Read a state; refuses a file that is incomplete, altered, or of another configuration."""
    facts, tensors = read_checkpoint(file)
    if belongs_to is not None and facts["belongs_to"] != belongs_to:
        raise BadInput(f"The checkpoint {file} belongs to another configuration: it cannot be resumed.")
    groups: dict[str, dict[str, Tensor]] = {}
    places = {path: place for place, path in enumerate(facts.get("order", ()))}
    for path in sorted(tensors, key=lambda path: places.get(path, len(places))):
        value = tensors[path]
        group, _, name = path.partition("/")
        groups.setdefault(group, {})[name] = value if device is None else value.to(device)
    server: State = {**facts["server"], **groups.get("server", {})}
    return SimulationState(
        facts["clients"],
        facts["round"],
        ClientTensors(groups.get("own", {}), groups.get("common", {})),
        groups.get("memory", {}),
        ClientTensors(groups.get("inbox own", {}), groups.get("inbox common", {})),
        groups.get("velocity", {}),
        server,
        {name: value.cpu() for name, value in groups.get("privacy", {}).items()},
    )


class RequiredRounds(NamedTuple):
    """How many rounds the other files of a run must have for a checkpoint to be usable."""

    rounds: int
    """Records in rounds.jsonl."""
    relations: int
    """Rounds in relations.npz."""


def required_rounds(facts: dict[str, Any]) -> RequiredRounds:
    """Return how many rounds a checkpoint requires in the run's other files."""
    more = facts.get("more", {})
    # The server of a deployment keeps the last record in the checkpoint until its accuracies are known.
    return RequiredRounds(facts["round"] - bool(more.get("pending")), more.get(RECORDED_RELATIONS, 0))


def read_checkpoint(file: Path, wanted: Sequence[str] | None = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a checkpoint's facts and its tensors (or those wanted that it has), verified."""
    if not file.exists():
        if file.parent.exists() or (file.parent.parent / "summary.json").exists():
            raise BadInput(f"The checkpoint {file} is missing: {REMEDY}.")
        raise BadInput(f"There is no checkpoint {file} yet.")
    try:
        facts = json.loads(read_metadata(file)["fedrema"])
        if not isinstance(facts, dict):
            raise Incomplete("its header is not an object")
        if facts.get("format") != FORMAT:
            found = facts.get("format")
            raise BadInput(f"The checkpoint {file} has format {found}; this version reads {FORMAT}: {REMEDY}.")
        tensors = read_tensors(file, wanted)
    except (Incomplete, KeyError, ValueError, RecursionError) as error:
        raise BadInput(f"The checkpoint {file} is incomplete or not one of fedrema's ({error}): {REMEDY}.") from error
    except Altered as error:
        raise BadInput(f"The checkpoint {file} {CHANGED}: {REMEDY}.") from error
    if not all(isinstance(facts.get(name), kind) for name, kind in FACTS.items()):
        raise BadInput(f"The checkpoint {file} {CHANGED}: {REMEDY}.")
    return facts, tensors
