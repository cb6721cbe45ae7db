"""Executes a run: checks everything before the first file is written, then trains, records and saves checkpoints."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from fedrema.base.terminal import safe_logger
from fedrema.config.settings import Settings
from fedrema.core.options import kind_of_device, needs_gpu
from fedrema.data import Federation, build_federation
from fedrema.errors import BadInput, Diverged
from fedrema.models.body_and_head import Net
from fedrema.models.networks import build_net
from fedrema.runs.arrays import Relations
from fedrema.runs.callbacks import CallbackFor, RoundCallback, wants_stop
from fedrema.runs.checkpoint import RECORDED_RELATIONS, required_rounds
from fedrema.runs.directory import FEDERATION_FILE, MOST_PREDICTIONS, RunDirectory
from fedrema.runs.lock import RunLock
from fedrema.runs.manifest import Manifest
from fedrema.runs.provenance import check_same_data, check_unchanged, describe, identity_of
from fedrema.runs.run import Run
from fedrema.runs.saved_settings import Changes, computed_as_before, default_folder, saved_settings
from fedrema.runs.signals import StopRequest, graceful_stop
from fedrema.runs.simple_models import write_simple_models
from fedrema.runs.trust import Trust, marks_of, named_code
from fedrema.simulation.records import RoundRecord
from fedrema.simulation.simulator import Simulator
from fedrema.simulation.state import Round, SimulationState

SECONDS_BETWEEN_CHECKPOINTS = 60.0

log = safe_logger("fedrema")


class RunObserver(Protocol):
    """Receives the records of a run while it is trained, such as a tracker."""

    def round(self, record: RoundRecord) -> None:
        """Receive the record of a round, which has been written."""

    def finish(self) -> None:
        """Note that the run has finished; its summary has been written."""

    def close(self) -> None:
        """Release resources; called at the end in any case, also after an error."""


ObserverFactory = Callable[[Settings, RunDirectory, int], RunObserver]
"""Creates an observer, given a run's settings, its folder, and the number of rounds it has already finished."""


class Interrupted(Exception):
    """The run was stopped on request; its state is saved, and `resume` continues it."""


def execute(
    settings: Settings,
    federation: Federation | None = None,
    module: nn.Module | None = None,
    watch: RoundCallback | None = None,
    observers: Sequence[ObserverFactory] = (),
) -> Run:
    """Execute a new run to its last round; a federation that is given in Python is saved in its folder."""
    given = federation is not None
    prepared = prepare_new(settings, federation or build_federation(settings.data), module, save_federation=given)
    return _with_module(prepared.train(watch, observers), module)


def resume(
    path: Path,
    changes: Changes | None = None,
    module: nn.Module | None = None,
    watching: CallbackFor | None = None,
    observers: Sequence[ObserverFactory] = (),
    trust: Trust = False,
) -> Run:
    """Continue a run from its last checkpoint to its last round; `changes` replace saved settings."""
    prepared = prepare_resumed(path, changes, module, trust=trust)
    watch = watching(prepared.settings) if watching is not None else None
    return _with_module(prepared.train(watch, observers), module)


def _with_module(run: Run, module: nn.Module | None) -> Run:
    """Attach a network that was given in Python to the run, because its files do not contain it."""
    run.module = module
    return run


def build_simulator(settings: Settings, federation: Federation, module: nn.Module | None = None) -> Simulator:
    """Build the network and the simulator of a run."""
    net = make_net(settings, federation.sample_shape, federation.task.outputs, module)
    return Simulator(settings.method, net, federation, settings.local, settings.simulation)


def make_net(settings: Settings, shape: tuple[int, ...], classes: int, module: nn.Module | None = None) -> Net:
    """Build the network of a run: a given module, or the one that the settings name, from the training seed."""
    if module is not None:
        return Net(module, torch.zeros(2, *shape), settings.network.head)
    return build_net(settings.network, shape, classes, settings.simulation.seed)


def check_new(
    settings: Settings, federation: Federation, module: nn.Module | None = None, save_federation: bool = False
) -> None:
    """Raise the error with which `prepare_new` would refuse a run; writes nothing."""
    _checked(settings, federation, module, save_federation)


def _checked(
    settings: Settings, federation: Federation, module: nn.Module | None, save_federation: bool
) -> tuple[Settings, RunDirectory, Simulator, SimulationState, Manifest]:
    """Return everything that a new run needs, after all checks; writes nothing."""
    if save_federation:
        data = dataclasses.replace(settings.data, federation=FEDERATION_FILE).without_unused()
        settings = dataclasses.replace(settings, data=data)
    directory = RunDirectory(settings.output.out or default_folder(settings))
    directory.check_free(settings.output.overwrite)
    directory.lock().check()
    settings = settings.for_columns(federation) if module is None else settings
    net = make_net(settings, federation.sample_shape, federation.task.outputs, module)
    settings = settings.fitted(federation, net.integers)
    simulator = Simulator(settings.method, net, federation, settings.local, settings.simulation)
    state = simulator.start()
    return settings, directory, simulator, state, describe(settings, simulator, module is not None, save_federation)


def prepare_new(
    settings: Settings, federation: Federation, module: nn.Module | None = None, save_federation: bool = False
) -> "PreparedRun":
    """Prepare a new run and lock its folder.

    Nothing is written before all checks have passed. A run that --overwrite replaces stays in the folder until the new
    one has finished its first round.
    """
    settings, directory, simulator, state, manifest = _checked(settings, federation, module, save_federation)
    overwrite = settings.output.overwrite
    federation_file = None if save_federation else settings.data.federation
    inputs = [Path(file) for file in (federation_file, settings.data.partition_file) if file is not None]

    def create() -> None:
        directory.create(manifest, inputs)
        directory.write_label_counts(federation.label_counts("train"), federation.label_counts("test"))
        if save_federation:
            federation.save(directory.path / FEDERATION_FILE)

    with _released_on_error(directory) as lock:
        directory.check_free(overwrite)  # another process may have created the run meanwhile
        replaces = directory.is_run()
        if not replaces:
            create()
        return PreparedRun(settings, directory, simulator, state, lock, create if replaces else None)


def prepare_resumed(
    path: Path,
    changes: Changes | None = None,
    module: nn.Module | None = None,
    federation: Federation | None = None,
    trust: Trust = False,
) -> "PreparedRun":
    """Prepare to continue a run; on a CPU its result is bit-identical to that of a run that was never stopped."""
    directory = RunDirectory.open(path)
    with _released_on_error(directory) as lock:
        manifest = directory.manifest()
        if manifest.federation.is_deployed:
            raise BadInput(f"{path} belongs to a deployment: resume it with fedrema deploy server.")
        settings = computed_as_before(
            saved_settings(directory, changes, module is not None, trust, resuming=True), manifest
        )
        _check_precision(path, settings, manifest)
        check_unchanged(path, manifest.revisions, manifest.inputs, settings, module is not None)
        federation = federation or build_federation(settings.data)
        check_same_data(path, manifest, settings, federation)
        simulator = build_simulator(settings, federation, module)
        if identity_of(settings, federation, module is not None) != manifest.identity:
            raise BadInput(f"The settings or the data of {path} have changed since it was started: start a new run.")
        state, recorded = _saved_state(directory, simulator)
        rounds = settings.simulation.rounds
        if rounds < state.round:
            raise BadInput(f"--rounds {rounds} is below {state.round}, the number of rounds that {path} has finished.")
        # Everything that is read back is verified before the first file is changed.
        directory.check_rounds(state.round)
        directory.relations(state.round, recorded)
        marks = marks_of(manifest.identity, named_code(manifest.method, manifest.settings))
        changed = {**manifest.settings, "rounds": rounds}
        directory.write_manifest(dataclasses.replace(manifest, settings=changed, marks=marks))
        return PreparedRun(settings, directory, simulator, state, lock)


def _check_precision(path: Path, settings: Settings, manifest: Manifest) -> None:
    """Refuse to continue a run in another precision."""
    before, now, device = manifest.ran_on.products, settings.simulation.precision, settings.simulation.device
    if needs_gpu(before) and (device == "cpu" or kind_of_device("auto") == "cpu"):
        raise BadInput(
            f"{path} is computed in {before}, which needs a CUDA device: resume it on a GPU, or start a new run with"
            " --precision float32."
        )
    if now != before:
        raise BadInput(f"{path} is computed in {before} and cannot continue in {now}: start a new run.")


def _saved_state(directory: RunDirectory, simulator: Simulator) -> tuple[SimulationState, int]:
    """Return the state to continue from, and how many rounds relations.npz must have."""
    if not directory.checkpoint_file.parent.exists() and not directory.finished():
        return simulator.start(), 0
    facts, _ = directory.checkpoint(resuming=True)
    return simulator.adopt(directory.state(resuming=True)), required_rounds(facts).relations


@contextmanager
def _released_on_error(directory: RunDirectory) -> Iterator[RunLock]:
    """Acquire the run's lock, which is kept on success and released if the code in the context fails."""
    lock = directory.lock().acquire()
    try:
        yield lock
    except BaseException:
        lock.release()
        raise


@dataclass(frozen=True)
class PreparedRun:
    """A run that is ready to train."""

    settings: Settings
    directory: RunDirectory
    simulator: Simulator
    state: SimulationState
    lock: RunLock
    """Held since the run was prepared; released when training ends."""
    replace_old_run: Callable[[], None] | None = None
    """Deletes the run that is in the folder and writes this one's first files; called after the first round."""
    with_simple_models: bool = True
    """Whether to fit simple models to own data as well; grids do not."""

    def train(self, watch: RoundCallback | None = None, observers: Sequence[ObserverFactory] = ()) -> Run:
        """Train to the last round, recording and saving; a first Ctrl-C or SIGTERM stops after the round.

        If `watch` stops the run, it ends there as a finished run; resumed, it continues to its last round.
        """
        with graceful_stop() as request:
            return self.train_until(request, watch, observers)

    def train_until(
        self, request: StopRequest, watch: RoundCallback | None = None, observers: Sequence[ObserverFactory] = ()
    ) -> Run:
        """Train to the last round, or until a stop is requested; then release the lock."""
        with self.lock:
            finished = self.state.round
            self.lock.training_from(finished)
            rounds = self.simulator.run(self.state)
            if self.replace_old_run is not None:
                first = list(itertools.islice(rounds, 1))
                self.replace_old_run()
                rounds = itertools.chain(first, rounds)
            with ExitStack() as stack:
                opened = [
                    stack.enter_context(closing(factory(self.settings, self.directory, finished)))
                    for factory in observers
                ]
                return self._record(rounds, finished, request, watch, opened)

    def _record(
        self,
        rounds: Iterable[Round],
        finished: int,
        request: StopRequest,
        watch: RoundCallback | None,
        observers: Sequence[RunObserver],
    ) -> Run:
        """Write the records of rounds while they are trained, after those of `finished` earlier rounds."""
        directory, state = self.directory, self.state
        directory.remove_unfinished_files()
        directory.ensure_label_counts(self.simulator.federation)
        directory.remove_summary()
        relations = directory.relations(finished)
        directory.write_relations(relations, finished)  # before the records that a longer file belongs to are dropped
        records = directory.truncate_rounds(finished)
        saved, ended = time.monotonic(), False
        try:
            for result in rounds:
                directory.append(result.record)
                records.append(result.record)
                if result.relations:
                    relations[state.round] = result.relations
                for observer in observers:
                    observer.round(result.record)
                ended = watch is not None and wants_stop(watch, result)
                if ended or request.made:
                    break
                if self._checkpoint_due(time.monotonic() - saved):
                    self._save(relations)
                    saved = time.monotonic()
        except Diverged as error:
            self._save(relations)  # the round that failed left the state unchanged
            kept = f"round {state.round} is kept in {directory.path}"
            raise Diverged(f"{str(error).rstrip('.')}; {kept}.") from error
        self._save(relations)
        if state.round < self.simulator.settings.rounds and not ended:
            raise Interrupted(f"Stopped after round {state.round}; resume it with: fedrema resume {directory.path}")
        self._write_predictions()
        if self.with_simple_models and directory.predictions_file.exists():
            write_simple_models(directory, self.simulator)
        directory.write_summary(records, len(relations))
        for observer in observers:
            observer.finish()
        return Run(directory.path)

    def _write_predictions(self) -> None:
        """Write what the final models predict for test samples, unless that is very large."""
        size = self.simulator.prediction_bytes()
        if size > MOST_PREDICTIONS:
            log.warning(
                "predictions.npz is not written: it would have %.0f MB, and the limit is %.0f MB. fedrema verdict "
                "needs it.",
                size / 1e6,
                MOST_PREDICTIONS / 1e6,
            )
            return
        self.directory.write_predictions(self.simulator.predict_tests(self.state), self.state.round)

    def _checkpoint_due(self, seconds: float) -> bool:
        every = self.settings.output.checkpoint_every
        return self.state.round % every == 0 if every else seconds >= SECONDS_BETWEEN_CHECKPOINTS

    def _save(self, relations: Relations) -> None:
        # A checkpoint requires the records of its rounds, so they are written to the disk first.
        self.directory.sync_rounds()
        self.directory.write_relations(relations, self.state.round)
        self.directory.save_state(self.state, {RECORDED_RELATIONS: len(relations)})
