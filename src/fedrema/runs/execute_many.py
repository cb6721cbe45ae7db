"""Executes several runs in one process; those that differ only in their training seed jointly where possible."""

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch import nn

from fedrema.config.settings import Settings
from fedrema.data import Federation, build_federation
from fedrema.engine import JointEngine, JointTraining
from fedrema.errors import Diverged
from fedrema.runs.directory import FEDERATION_FILE, RUN_LIST_FILE, RunDirectory
from fedrema.runs.execute import Interrupted, ObserverFactory, PreparedRun, RoundCallback, prepare_new, prepare_resumed
from fedrema.runs.run import Run
from fedrema.runs.saved_settings import Changes
from fedrema.runs.signals import StopRequest, graceful_stop
from fedrema.simulation.simulator import Simulator

T = TypeVar("T")
Outcome = Run | Diverged
CallbackFor = Callable[[Settings], RoundCallback]
"""Returns the callback that receives the rounds of a run."""
JOINT_DEVICES = ("cuda",)
"""Where seeds are trained jointly. On a CPU the last bits of a run would depend on the other runs: torch computes an
exponential differently at the end of an array than inside it."""


def execute_all(
    wanted: Sequence[Settings],
    watching: CallbackFor | None = None,
    *,
    resume: bool = False,
    changes: Changes | None = None,
    federation: Federation | None = None,
    module: nn.Module | None = None,
    observers: Sequence[ObserverFactory] = (),
    on_prepared: Callable[[Settings, Simulator], None] | None = None,
) -> Iterator[tuple[Settings, Outcome]]:
    """Execute runs one after the other, those that differ only in their training seed jointly where possible.

    Parameters
    ----------
    wanted
        Settings of the runs, each with its folder.
    watching
        Returns the callback that receives the rounds of a run.
    resume
        Continue runs whose folders hold one already; otherwise all are started.
    changes
        Settings that replace saved ones in runs that are continued.
    federation
        Clients given in Python, instead of those that the settings describe; saved in the folder of every new run.
    module
        A network given in Python, instead of the one that the settings name.
    observers
        Receive the records of every run.
    on_prepared
        Called with the simulator of each run before it is trained.

    Yields
    ------
    The settings of each run with the run, or with the error if it diverged.

    Raises
    ------
    Interrupted
        When a stop was requested; every run that was in progress has been saved.
    """

    def prepare(settings: Settings, data: Federation) -> PreparedRun:
        folder, own = settings.output.folder, copy.deepcopy(module)
        if resume and RunDirectory(folder).is_run():
            run = prepare_resumed(folder, changes, own, data)
        else:
            # A federation that was given in Python is deleted together with the list of runs, so each run saves a copy.
            file = Path(settings.data.federation or "")
            listed = resume and file.name == FEDERATION_FILE and (file.parent / RUN_LIST_FILE).exists()
            run = prepare_new(settings, data, own, save_federation=federation is not None or listed)
        if on_prepared is not None:
            on_prepared(settings, run.simulator)
        return run

    for group in group_seeds(wanted):
        data = federation or build_federation(group[0].data)
        waiting = list(group)
        while waiting:
            first = prepare(waiting[0], data)
            number = _at_once(first, len(waiting))
            now, waiting = waiting[:number], waiting[number:]
            runs = [first, *(prepare(settings, data) for settings in now[1:])]
            watches = [watching(settings) if watching is not None else None for settings in now]
            yield from zip(now, _train(runs, watches, observers), strict=True)


def group_seeds(wanted: Sequence[Settings]) -> list[list[Settings]]:
    """Group neighbouring settings that differ only in their training seed and folder."""
    return [list(group) for _, group in itertools.groupby(wanted, key=lambda each: each.seeded(0).placed(Path()))]


def split_groups(groups: Sequence[Sequence[T]], wanted: int) -> list[list[T]]:
    """Halve the largest groups until there are `wanted` groups, or none can be halved."""
    parts = [list(group) for group in groups]
    while parts and len(parts) < wanted and max(map(len, parts)) > 1:
        largest = parts.index(max(parts, key=len))
        half = (len(parts[largest]) + 1) // 2
        parts[largest : largest + 1] = [parts[largest][:half], parts[largest][half:]]
    return parts


def _at_once(first: PreparedRun, wanted: int) -> int:
    """Return how many seeds to train jointly: as many as fit into memory, one where joint training is no faster."""
    if wanted == 1:  # measuring how many fit takes seconds on a GPU
        return 1
    simulator = first.simulator
    if simulator.device.type not in JOINT_DEVICES or simulator.engine.name != "stacked" or simulator.storage.on_disk:
        return 1
    clients = max(1, round(simulator.settings.participation * len(simulator.federation)))
    return max(1, min(wanted, simulator.clients_in_memory() // clients))


def _train(
    runs: Sequence[PreparedRun], watches: Sequence[RoundCallback | None], observers: Sequence[ObserverFactory]
) -> list[Outcome]:
    with graceful_stop() as request:
        if len(runs) == 1:
            return [_train_one(runs[0], request, watches[0], observers)]

        def train(engine: JointEngine, run: PreparedRun, watch: RoundCallback | None) -> Outcome:
            run.simulator.engine = engine
            run.simulator.joint_runs = len(runs)
            return _train_one(run, request, watch, observers)

        jobs = [partial(train, run=run, watch=watch) for run, watch in zip(runs, watches, strict=True)]
        outcomes = JointTraining(runs[0].simulator.engine).run(jobs)
    errors = [each for each in outcomes if isinstance(each, BaseException) and not isinstance(each, Diverged)]
    if errors:
        raise next((error for error in errors if not isinstance(error, Interrupted)), errors[0])
    return outcomes


def _train_one(
    run: PreparedRun, request: StopRequest, watch: RoundCallback | None, observers: Sequence[ObserverFactory]
) -> Outcome:
    try:
        return run.train_until(request, watch, observers)
    except Diverged as error:  # the other runs continue
        return error
