"""Drives a run: prepares everything before the first file is written, then plays, records and saves."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedrema.config.settings import Settings
from fedrema.data import Federation, build_federation
from fedrema.errors import BadInput, Diverged
from fedrema.models.body_and_head import Net
from fedrema.models.networks import build_net
from fedrema.reporting.trackers import Tracking, check_trackers, tracking
from fedrema.runs.checkpoint import RECORDED_RELATIONS, counted_on, load_state, read_checkpoint, save_state
from fedrema.runs.directory import FEDERATION_FILE, RunDirectory, is_deployed
from fedrema.runs.lock import RunLock
from fedrema.runs.manifest import (
    CANNOT_GO_ON,
    changed_files,
    check_unchanged,
    computed_as_before,
    default_folder,
    describe,
    identity_of,
    inputs_of,
    saved_settings,
)
from fedrema.runs.run import Run
from fedrema.runs.signals import StopRequest, stopping_gently
from fedrema.simulation.simulator import Simulator
from fedrema.simulation.state import Round, SimulationState

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
    """Prepare a new run; a federation that came from Python is saved in its folder."""
    given = federation is not None
    return begin_on(settings, federation or build_federation(settings.data), module, save_federation=given)


def begin_on(
    settings: Settings, federation: Federation, module: nn.Module | None = None, save_federation: bool = False
) -> "Prepared":
    """Prepare a new run and lock its folder.

    Nothing is written before everything that can be refused has been checked. A run that --overwrite replaces stays
    in the folder until the new one has finished its first round.
    """
    if save_federation:
        data = dataclasses.replace(settings.data, federation=FEDERATION_FILE).without_unused()
        settings = dataclasses.replace(settings, data=data)
    directory = RunDirectory(settings.output.out or default_folder(settings))
    overwrite = settings.output.overwrite
    directory.check_free(overwrite)
    directory.lock().check()
    check_trackers(settings.output.trackers)
    net = make_net(settings, federation.sample_shape, federation.classes, module)
    settings = settings.fitted(federation, net.integers)
    simulator = Simulator(settings.method, net, federation, settings.local, settings.simulation)
    state = simulator.start()
    config = describe(settings, simulator, module is not None, save_federation)
    own = None if save_federation else settings.data.federation
    inputs = [Path(file) for file in (own, settings.data.partition_file) if file is not None]

    def create() -> None:
        directory.create(config, inputs)
        directory.write_label_counts(federation.label_counts("train"), federation.label_counts("test"))
        if save_federation:
            federation.save(directory.path / FEDERATION_FILE)

    lock = directory.lock().acquire()
    try:
        directory.check_free(overwrite)  # another process may have been faster
        replaces = directory.is_run()
        if not replaces:
            create()
    except BaseException:
        lock.release()
        raise
    output = settings.output
    return Prepared(
        directory, simulator, state, output.checkpoint_every, output.trackers, lock, create if replaces else None
    )


def take_up(
    path: Path,
    arguments: tuple[str, ...] = (),
    module: nn.Module | None = None,
    federation: Federation | None = None,
) -> "Prepared":
    """Prepare to go on; on a CPU the end is bit-identical to that of a run that was never stopped."""
    directory = RunDirectory.open(path)
    lock = directory.lock().acquire()
    try:
        return _take_up(directory, lock, arguments, module, federation)
    except BaseException:
        lock.release()
        raise


def _take_up(
    directory: RunDirectory,
    lock: RunLock,
    arguments: tuple[str, ...],
    module: nn.Module | None,
    federation: Federation | None,
) -> "Prepared":
    directory.check_version()
    if is_deployed(directory.config()):
        raise BadInput(f"{directory.path} is trained over a network: fedrema deploy server continues it.")
    settings = saved_settings(directory, arguments, module is not None)
    check_trackers(settings.output.trackers)
    config = directory.config()
    settings = computed_as_before(settings, config)
    check_unchanged(directory.path, config, settings, module is not None)
    federation = federation or build_federation(settings.data)
    _check_same_data(directory.path, config, settings, federation)
    simulator = prepare(settings, federation, module)
    if identity_of(settings, simulator.federation, module is not None) != config.get("identity"):
        raise BadInput(f"The settings or the data of {directory.path} have changed since it began: it cannot go on.")
    state = simulator.start()
    recorded = 0
    if directory.checkpoint_file.parent.exists() or directory.finished():
        facts, _ = read_checkpoint(directory.checkpoint_file, wanted=())
        recorded = counted_on(facts).relations
        state = simulator.adopt(load_state(directory.checkpoint_file, config["identity"]))
    if settings.simulation.rounds < state.round:
        rounds = settings.simulation.rounds
        raise BadInput(f"--rounds {rounds} lies before round {state.round}, which {directory.path} has reached.")
    # Everything that is read back is verified before the first file is changed.
    directory.check_rounds(state.round)
    directory.relations(state.round, recorded)
    config["settings"]["rounds"] = settings.simulation.rounds
    directory.write_json(directory.config_file, config)
    return Prepared(directory, simulator, state, settings.output.checkpoint_every, settings.output.trackers, lock)


def _check_same_data(path: Path, config: dict[str, Any], settings: Settings, federation: Federation) -> None:
    if config.get("federation", {}).get("fingerprint") == federation.fingerprint:
        return
    present, recorded = inputs_of(settings), config.get("inputs", {})
    differing = [
        text
        for name in ("federation", "partition-file")
        if recorded.get(name) and (text := changed_files(recorded[name], present.get(name, {})))
    ]
    what = differing[0] if differing else "its data has changed"
    raise BadInput(CANNOT_GO_ON.format(path, what))


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
    state: SimulationState
    checkpoint_every: int
    trackers: tuple[str, ...]
    lock: RunLock
    """Held since the run was prepared; released when it has been run."""
    replace: Callable[[], None] | None = None
    """Deletes the run that lies in the folder and writes this one's first files; called after the first round."""

    def play(self, watch: Watcher | None = None) -> Run:
        """Play to the last round, recording and saving; `watch` is called with every round as it ends."""
        with stopping_gently() as request:
            return self.play_until(request, watch)

    def play_until(self, request: StopRequest, watch: Watcher | None = None) -> Run:
        """Run to the last round, or until someone asks to stop; then release the lock."""
        with self.lock:
            first = self.state.round
            self.lock.training_from(first)
            rounds = self.simulator.run(self.state)
            if self.replace is not None:
                begun = list(itertools.islice(rounds, 1))
                self.replace()
                rounds = itertools.chain(begun, rounds)
            with tracking(self.trackers, self.directory, first) as tracked:
                return self._play(rounds, first, request, watch, tracked)

    def _play(
        self, rounds: Iterable[Round], first: int, request: StopRequest, watch: Watcher | None, tracked: Tracking
    ) -> Run:
        directory, state = self.directory, self.state
        directory.remove_unfinished_files()
        directory.ensure_label_counts(self.simulator.federation)
        directory.remove_summary()
        records = directory.keep_rounds(first)
        relations = directory.relations(first)
        saved = time.monotonic()
        try:
            for played in rounds:
                directory.append(played.record)
                records.append(played.record)
                if played.relations:
                    relations[state.round] = played.relations
                tracked.round(played.record)
                if watch:
                    watch(played)
                if request.asked:
                    break
                if self._due(time.monotonic() - saved):
                    self._save(relations)
                    saved = time.monotonic()
        except Diverged as error:
            self._save(relations)  # the round that failed left the state as it was
            kept = f"round {state.round} is kept in {directory.path}"
            raise Diverged(f"{str(error).rstrip('.')}; {kept}.") from error
        self._save(relations)
        if state.round < self.simulator.settings.rounds:
            raise Interrupted(f"Stopped after round {state.round}; go on with: fedrema resume {directory.path}")
        directory.write_summary(records, len(relations))
        tracked.finish()
        return Run(directory.path)

    def _due(self, seconds: float) -> bool:
        if self.checkpoint_every:
            return self.state.round % self.checkpoint_every == 0
        return seconds >= SECONDS_BETWEEN_CHECKPOINTS

    def _save(self, relations: dict[int, dict[str, np.ndarray]]) -> None:
        # The checkpoint counts on what came before: it is written when that is on the disk.
        self.directory.sync_rounds()
        self.directory.write_relations(relations)
        identity = self.directory.config()["identity"]
        more = {RECORDED_RELATIONS: len(relations)}
        save_state(self.state, self.directory.checkpoint_file, identity, more)
