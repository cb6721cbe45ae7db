"""Drives a run: prepares everything before the first file is written, then plays, records and saves."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedrema.data import Federation, build_federation
from fedrema.errors import BadInput, Diverged
from fedrema.net import Net
from fedrema.nets import build_net
from fedrema.runs.checkpoint import load_world, save_world
from fedrema.runs.directory import RunDirectory
from fedrema.runs.manifest import FEDERATION_FILE, default_folder, describe, identity_of, saved_settings
from fedrema.runs.player import playing
from fedrema.runs.run import Run
from fedrema.runs.stopping import StopRequest, stopping_gently
from fedrema.score import summarise
from fedrema.settings import Settings
from fedrema.simulate import Simulator
from fedrema.tracking import Tracking, check_trackers, tracking
from fedrema.world import Round, World

SECONDS_BETWEEN_CHECKPOINTS = 60.0

Watcher = Callable[[Round], None]


class Interrupted(Exception):
    """The run was asked to stop; its state is saved and `resume` goes on."""


def execute(
    settings: Settings,
    federation: Federation | None = None,
    module: nn.Module | None = None,
    watch: Watcher | None = None,
) -> Run:
    """Run from the start to the end."""
    return _remembering(module, begin(settings, federation, module).play(watch))


def resume(
    path: Path, arguments: tuple[str, ...] = (), module: nn.Module | None = None, watch: Watcher | None = None
) -> Run:
    """Go on from the last checkpoint to the end."""
    return _remembering(module, take_up(path, arguments, module).play(watch))


def _remembering(module: nn.Module | None, run: Run) -> Run:
    """Let a run build its clients' models from the network it was given in Python, which no file can name."""
    run.module = module
    return run


def begin(settings: Settings, federation: Federation | None = None, module: nn.Module | None = None) -> "Prepared":
    """Prepare a new run; a federation that came from Python is saved beside it."""
    prepared = begin_on(settings, federation or build_federation(settings.data), module)
    if federation is not None:
        federation.save(prepared.directory.path / FEDERATION_FILE)
    return prepared


def begin_on(settings: Settings, federation: Federation, module: nn.Module | None = None) -> "Prepared":
    """Prepare a new run. Nothing is written before everything that can be refused has been checked."""
    directory = RunDirectory(settings.output.out or default_folder(settings))
    directory.check_free(settings.output.overwrite)
    check_trackers(settings.output.trackers)
    simulator = prepare(settings, federation, module)
    world = simulator.start()
    directory.create(describe(settings, simulator, module is not None))
    directory.write_label_counts(federation.label_counts("train"), federation.label_counts("test"))
    return Prepared(directory, simulator, world, settings.output.checkpoint_every, settings.output.trackers)


def take_up(
    path: Path,
    arguments: tuple[str, ...] = (),
    module: nn.Module | None = None,
    federation: Federation | None = None,
) -> "Prepared":
    """Prepare to go on; on a CPU the end is bit-identical to that of a run that was never stopped."""
    directory = RunDirectory.open(path)
    settings = saved_settings(directory, arguments, module is not None)
    check_trackers(settings.output.trackers)
    simulator = prepare(settings, federation or build_federation(settings.data), module)
    config = directory.config()
    if identity_of(settings, simulator.federation, module is not None) != config.get("identity"):
        raise BadInput(f"The settings or the data of {path} have changed since it began: it cannot go on.")
    if directory.checkpoint_file.is_file():
        world = simulator.adopt(load_world(directory.checkpoint_file, config["identity"]))
    else:
        world = simulator.start()
    config["settings"]["rounds"] = settings.simulation.rounds
    directory.write_json(directory.config_file, config)
    return Prepared(directory, simulator, world, settings.output.checkpoint_every, settings.output.trackers)


def prepare(settings: Settings, federation: Federation, module: nn.Module | None = None) -> Simulator:
    """Build network and simulator."""
    net = make_net(settings, federation.sample_shape, federation.classes, module)
    return Simulator(settings.method, net, federation, settings.local, settings.simulation)


def make_net(settings: Settings, shape: tuple[int, ...], classes: int, module: nn.Module | None = None) -> Net:
    """Build the network of a run: one's own module, or what the settings name, from the training seed."""
    if module is not None:
        return Net(module, torch.zeros(2, *shape), settings.network.head)
    return build_net(settings.network, shape, classes, settings.simulation.seed)


@dataclass(frozen=True)
class Prepared:
    """A run that is ready to play."""

    directory: RunDirectory
    simulator: Simulator
    world: World
    checkpoint_every: int
    trackers: tuple[str, ...] = ()

    def play(self, watch: Watcher | None = None) -> Run:
        """Play to the last round, recording and saving; `watch` is called with every round as it ends."""
        with stopping_gently() as request:
            return self.play_until(request, watch)

    def play_until(self, request: StopRequest, watch: Watcher | None = None) -> Run:
        """Play to the last round, or until someone asks to stop, with a note in the folder as long as it goes on."""
        first = self.world.round
        with playing(self.directory.player_file, first), tracking(self.trackers, self.directory, first) as tracked:
            return self._play(request, watch, tracked)

    def _play(self, request: StopRequest, watch: Watcher | None, tracked: Tracking) -> Run:
        directory, world = self.directory, self.world
        records = directory.keep_rounds(world.round)
        relations = directory.relations(world.round)
        directory.summary_file.unlink(missing_ok=True)
        saved = time.monotonic()
        try:
            for played in self.simulator.play(world):
                directory.append(played.record)
                records.append(played.record)
                if played.relations:
                    relations[world.round] = played.relations
                tracked.round(played.record)
                if watch:
                    watch(played)
                if request.asked:
                    break
                if self._due(time.monotonic() - saved):
                    self._save(relations)
                    saved = time.monotonic()
        except Diverged as error:
            self._save(relations)  # the round that failed left the world as it was
            kept = f"round {world.round} is kept in {directory.path}"
            raise Diverged(f"{str(error).rstrip('.')}; {kept}.") from error
        self._save(relations)
        if world.round < self.simulator.settings.rounds:
            raise Interrupted(f"Stopped after round {world.round}; go on with: fedrema resume {directory.path}")
        directory.write_json(directory.summary_file, summarise(records))
        tracked.end()
        return Run(directory.path)

    def _due(self, seconds: float) -> bool:
        if self.checkpoint_every:
            return self.world.round % self.checkpoint_every == 0
        return seconds >= SECONDS_BETWEEN_CHECKPOINTS

    def _save(self, relations: dict[int, dict[str, np.ndarray]]) -> None:
        self.directory.write_relations(relations)
        save_world(self.world, self.directory.checkpoint_file, self.directory.config()["identity"])
