"""A world on disk: one safetensors file, whole or not there, that knows which run it belongs to."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedrema.core import State
from fedrema.data.atomic import written_whole
from fedrema.engine import Stacked
from fedrema.errors import BadInput
from fedrema.runs.tensors import digest_of, write_tensors
from fedrema.world import World

FORMAT = 1


def save_world(world: World, file: Path, belongs_to: str, more: dict[str, Any] | None = None) -> None:
    """Write everything a run needs to go on; `belongs_to` names the configuration, `more` is kept with it as JSON."""
    groups = {
        "common": world.params.common,
        "own": world.params.own,
        "memory": world.memory,
        "inbox common": world.inbox.common,
        "inbox own": world.inbox.own,
        "velocity": world.velocity,
        "server": {name: value for name, value in world.server.items() if isinstance(value, Tensor)},
    }
    tensors = {f"{group}/{name}": value for group, members in groups.items() for name, value in members.items()}
    numbers = {name: value for name, value in world.server.items() if not isinstance(value, Tensor)}
    facts = {
        "format": FORMAT,
        "clients": world.clients,
        "round": world.round,
        "belongs_to": belongs_to,
        "server": numbers,
        "order": list(tensors),  # the file sorts its names, and sums over tensors are rounded by their order
        **({} if more is None else {"more": more}),
    }
    with written_whole(file) as temporary:
        write_tensors(temporary, tensors, {"fedrema": json.dumps(facts)})


def load_world(file: Path, belongs_to: str | None, device: torch.device | None = None) -> World:
    """Read a world back; refuses one that is incomplete, altered, or of another configuration."""
    facts, tensors = read_checkpoint(file)
    if belongs_to is not None and facts["belongs_to"] != belongs_to:
        raise BadInput(
            f"The checkpoint {file} belongs to another configuration than its config.json: it cannot be resumed."
        )
    groups: dict[str, dict[str, Tensor]] = {}
    places = {path: place for place, path in enumerate(facts.get("order", ()))}
    for path in sorted(tensors, key=lambda path: places.get(path, len(places))):
        value = tensors[path]
        group, _, name = path.partition("/")
        groups.setdefault(group, {})[name] = value if device is None else value.to(device)
    server: State = {**facts["server"], **groups.get("server", {})}
    return World(
        facts["clients"],
        facts["round"],
        Stacked(groups.get("own", {}), groups.get("common", {})),
        groups.get("memory", {}),
        Stacked(groups.get("inbox own", {}), groups.get("inbox common", {})),
        groups.get("velocity", {}),
        server,
    )


def read_checkpoint(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a checkpoint's facts and tensors, verified."""
    if not file.is_file():
        raise BadInput(f"There is no checkpoint {file} yet.")
    try:
        with safe_open(file, framework="pt") as content:
            metadata = content.metadata() or {}
            tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 - not a dict
        facts = json.loads(metadata["fedrema"])
    except (SafetensorError, OSError, KeyError, ValueError, RecursionError) as error:
        raise BadInput(f"The checkpoint {file} is incomplete or not one of fedrema's: {error}.") from error
    if facts.get("format") != FORMAT:
        raise BadInput(f"The checkpoint {file} has format {facts.get('format')}; this version reads {FORMAT}.")
    if metadata.get("digest") != digest_of(tensors):
        raise BadInput(f"The checkpoint {file} was altered: its content does not match its digest.")
    return facts, tensors
