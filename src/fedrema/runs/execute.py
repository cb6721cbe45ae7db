"""Drives a run: prepares everything before the first file is written, then plays, records and saves."""

import hashlib
import json
import platform
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import fedrema
from fedrema.data import Federation, build_federation
from fedrema.errors import BadInput, Diverged
from fedrema.net import Net
from fedrema.nets import build_net
from fedrema.runs.checkpoint import load_world, save_world
from fedrema.runs.directory import RunDirectory
from fedrema.runs.run import Run
from fedrema.runs.stopping import stopping_gently
from fedrema.score import summarise
from fedrema.settings import Settings, as_arguments, parse_settings
from fedrema.simulate import Simulator
from fedrema.world import Round, World

SECONDS_BETWEEN_CHECKPOINTS = 60.0
# Where things lie and how fast they are computed is no part of what a run is.
PLACE = {
    "out",
    "overwrite",
    "checkpoint-every",
    "seeds",
    "config",
    "paper",
    "quiet",
    "data-dir",
    "federation",
    "device",
}
PLACE |= {"rounds", "backend"}
GIVEN = "(given in Python)"
"""Stands in config.json for a network that has no name to import it by."""

Watcher = Callable[[Round], None]


class Interrupted(Exception):
    """The run was asked to stop; its state is saved and `resume` goes on."""


def execute(
    settings: Settings,
    federation: Federation | None = None,
    module: nn.Module | None = None,
    watch: Watcher | None = None,
) -> Run:
    """Run from the start. Nothing is written before everything that can be refused has been checked."""
    directory = RunDirectory(settings.output.out or default_folder(settings))
    directory.check_free(settings.output.overwrite)
    given = federation
    federation = given or build_federation(settings.data)
    simulator = prepare(settings, federation, module)
    world = simulator.start()
    directory.create(describe(settings, simulator, given is not None, module is not None))
    if given is not None:
        given.save(directory.path / "federation.npz")
    return _play(directory, simulator, world, settings, watch)


def resume(
    path: Path,
    arguments: tuple[str, ...] = (),
    module: nn.Module | None = None,
    watch: Watcher | None = None,
) -> Run:
    """Go on from the last checkpoint; the end is bit-identical to a run that was never stopped."""
    directory = RunDirectory.open(path)
    settings, simulator = reload(directory, arguments, module)
    identity = directory.config()["identity"]
    if directory.checkpoint_file.is_file():
        world = load_world(directory.checkpoint_file, identity, simulator.device)
    else:
        world = simulator.start()
    return _play(directory, simulator, world, settings, watch)


def reload(
    directory: RunDirectory, arguments: tuple[str, ...] = (), module: nn.Module | None = None
) -> tuple[Settings, Simulator]:
    """Prepare the simulator of an existing run; refuses if its data or settings have changed."""
    config = directory.config()
    try:
        saved, method, identity = dict(config["settings"]), config["method"], config["identity"]
    except KeyError as error:
        raise BadInput(f"{directory.config_file} is not complete: {error} is missing.") from error
    if saved.get("net") == GIVEN:
        if module is None:
            raise BadInput(
                f"{directory.path} was run with a network given in Python: use fedrema.load(…, net=…) there."
            )
        saved["net"] = "auto"
    saved["out"] = str(directory.path)
    for unneeded in ("config", "paper"):
        saved.pop(unneeded, None)
    if (directory.path / "federation.npz").is_file():
        saved["federation"] = str(directory.path / "federation.npz")
    settings = parse_settings(method, [*as_arguments(saved), *arguments], "fedrema resume")
    simulator = prepare(settings, build_federation(settings.data), module)
    if identity_of(settings, simulator.federation, module is not None) != identity:
        raise BadInput(f"The settings or the data of {directory.path} have changed since it began: it cannot go on.")
    return settings, simulator


def prepare(settings: Settings, federation: Federation, module: nn.Module | None = None) -> Simulator:
    """Build network and simulator."""
    seed = settings.simulation.seed
    if module is not None:
        net = Net(module, torch.zeros(2, *federation.sample_shape), settings.network.head)
    else:
        net = build_net(settings.network, federation.sample_shape, federation.classes, seed)
    return Simulator(settings.method, net, federation, settings.local, settings.simulation)


def _play(
    directory: RunDirectory, simulator: Simulator, world: World, settings: Settings, watch: Watcher | None
) -> Run:
    identity = directory.config()["identity"]
    records = directory.keep_rounds(world.round)
    relations = directory.relations(world.round)
    directory.summary_file.unlink(missing_ok=True)
    saved = time.monotonic()

    def save() -> None:
        nonlocal saved
        directory.write_relations(relations)
        save_world(world, directory.checkpoint_file, identity)
        saved = time.monotonic()

    with stopping_gently() as request:
        try:
            for played in simulator.play(world):
                directory.append(played.record)
                records.append(played.record)
                if played.relations:
                    relations[world.round] = played.relations
                if watch:
                    watch(played)
                if request.asked:
                    break
                if _due(settings.output.checkpoint_every, world.round, time.monotonic() - saved):
                    save()
        except Diverged as error:
            save()  # the round that failed left the world as it was
            raise Diverged(f"{str(error).rstrip('.')}; round {world.round} is kept in {directory.path}.") from error
        save()
    if world.round < simulator.settings.rounds:
        raise Interrupted(f"Stopped after round {world.round}; go on with: fedrema resume {directory.path}")
    directory.write_json(directory.summary_file, summarise(records))
    return Run(directory.path)


def _due(every: int, number: int, seconds: float) -> bool:
    return number % every == 0 if every else seconds >= SECONDS_BETWEEN_CHECKPOINTS


def describe(settings: Settings, simulator: Simulator, own_data: bool, own_module: bool) -> dict[str, Any]:
    """Return config.json: everything needed to run it again, and what it ran on."""
    federation = simulator.federation
    flat = settings.flat()
    if own_module:
        flat["net"] = GIVEN
    elif own_data:
        flat["federation"] = "federation.npz"
    return {
        "method": _foreign(settings) or settings.method.name,
        "settings": flat,
        "identity": identity_of(settings, federation, own_module),
        "federation": {
            "fingerprint": federation.fingerprint,
            "names": list(federation.names),
            "classes": federation.classes,
            "sample_shape": list(federation.sample_shape),
            "train_counts": simulator.train.counts.tolist(),
            "test_counts": simulator.test.counts.tolist(),
            "info": federation.info,
        },
        "ran_on": {
            "device": str(simulator.device),
            "backend": simulator.engine.name,
            "dtype": str(simulator.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "python": platform.python_version(),
            "versions": {"fedrema": fedrema.__version__, "torch": torch.__version__, "numpy": np.__version__},
            "commit": _commit(),
        },
    }


def identity_of(settings: Settings, federation: Federation, own_module: bool) -> str:
    """Return a digest of what determines the result, as opposed to where and how fast it is computed."""
    what = {name: value for name, value in settings.flat().items() if name not in PLACE}
    if own_module:
        what["net"] = GIVEN
    content = [settings.method.name, sorted(what.items()), federation.fingerprint]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def default_folder(settings: Settings, what: str | None = None) -> Path:
    """Return a new folder under runs/, named after the method (or `what`), the data and the time."""
    own = settings.data.federation
    data = Path(own.replace(":", "-")).stem if own else settings.data.dataset
    name = f"{what or settings.method.name}-{data}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"
    folder, number = Path("runs") / name, 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    return folder


def _foreign(settings: Settings) -> str | None:
    """Return `module:Class` for a method that is not one of fedrema's."""
    kind = type(settings.method)
    inside = kind.__module__.startswith("fedrema.methods.")
    return None if inside else f"{kind.__module__}:{kind.__qualname__}"


def _commit() -> str | None:
    here = Path(fedrema.__file__).parent
    if not any((folder / ".git").exists() for folder in here.parents):
        return None
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None
