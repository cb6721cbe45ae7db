"""Executes several runs in one process; on a GPU, those of one shape together, such as replicates of a cell."""

import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from torch import nn

from fedrema.config.settings import Settings
from fedrema.core import Method
from fedrema.data import DataSettings, Federation, build_federation
from fedrema.engine import JointEngine, JointTraining, run_in_turns
from fedrema.engine.joint_settings import common_part
from fedrema.errors import Diverged
from fedrema.runs.callbacks import CallbackFor, RoundCallback
from fedrema.runs.directory import FEDERATION_FILE, RUN_LIST_FILE, RunDirectory
from fedrema.runs.execute import Interrupted, ObserverFactory, PreparedRun, check_new, prepare_new, prepare_resumed
from fedrema.runs.provenance import method_name
from fedrema.runs.run import Run
from fedrema.runs.saved_settings import Changes
from fedrema.runs.signals import StopRequest, graceful_stop
from fedrema.runs.trust import given_code
from fedrema.simulation.simulator import Simulator

T = TypeVar("T")
Outcome = Run | Diverged
TOGETHER_ON = ("cuda",)
"""Where runs are executed together. On a CPU the last bits of a run would depend on the runs that are trained jointly
with it: torch computes an exponential differently at the end of an array than inside it."""
SMALL_STEP = 5e9
"""Operations of a step of all clients below which launching its kernels takes a GPU longer than computing them. Such
runs are trained jointly. Others take turns, which also hides the time that their servers and records take."""
MOST_IN_TURNS = 5
"""More runs that take turns are not faster: the GPU is busy."""


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
    with_simple_models: bool = True,
    built: Mapping[DataSettings, Federation] | None = None,
) -> Iterator[tuple[Settings, Outcome]]:
    """Execute runs one after the other; on a GPU, neighbours of one shape (`group_joint`) together.

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
    with_simple_models
        Whether to fit a constant and a linear model to each client of own data as well.
    built
        Federations that have been built already, as `check_all` returns them.

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
            run = prepare_resumed(folder, changes, own, data, given_code(method_name(settings.method), settings))
        else:
            # A federation that was given in Python is deleted together with the list of runs, so each run saves a copy.
            file = Path(settings.data.federation or "")
            listed = resume and file.name == FEDERATION_FILE and (file.parent / RUN_LIST_FILE).exists()
            run = prepare_new(settings, data, own, save_federation=federation is not None or listed)
        if on_prepared is not None:
            on_prepared(settings, run.simulator)
        return replace(run, with_simple_models=with_simple_models)

    for group in group_joint(wanted):
        federations = dict(built or {})

        def data_of(settings: Settings, built: dict[DataSettings, Federation] = federations) -> Federation:
            if federation is not None:
                return federation
            if settings.data not in built:
                built[settings.data] = build_federation(settings.data)
            return built[settings.data]

        waiting = list(group)
        while waiting:
            with ExitStack() as locks:  # released if a run cannot be prepared; otherwise when its training ends
                first = prepare(waiting[0], data_of(waiting[0]))
                runs = [first]
                locks.callback(first.lock.release)
                number, jointly = _at_once(first, len(waiting))
                now, waiting = waiting[:number], waiting[number:]
                for settings in now[1:]:
                    runs.append(prepare(settings, data_of(settings)))
                    locks.callback(runs[-1].lock.release)
                locks.pop_all()
            for used in federations.keys() - {settings.data for settings in waiting}:
                del federations[used]
            watches = [watching(settings) if watching is not None else None for settings in now]
            yield from zip(now, _train(runs, watches, observers, jointly), strict=True)


def check_all(
    wanted: Sequence[Settings], federation: Federation | None = None, module: nn.Module | None = None
) -> Mapping[DataSettings, Federation]:
    """Refuse new runs before the first one starts; return the federations that were built."""
    federations: dict[DataSettings, Federation] = {}
    if len(wanted) == 1:  # its preparation checks the same before anything is written
        return federations
    checked = set()
    for settings in wanted:
        data = settings.data
        if federation is None and data not in federations:
            federations[data] = build_federation(data)
        # Replicates differ in nothing that is checked, except for the clients that are drawn as attackers.
        like = settings.placed(Path()) if settings.simulation.attack != "none" else settings.placed(Path()).seeded(0)
        if like not in checked:
            checked.add(like)
            check_new(settings, federation or federations[data], copy.deepcopy(module), federation is not None)
    return federations


def group_joint(wanted: Sequence[Settings]) -> list[list[Settings]]:
    """Group neighbouring settings whose runs can be trained jointly.

    They may differ in their training seed and folder; in how a dataset is partitioned, but not in the numbers of
    clients and samples; and in settings of the method that are declared as `joint`.
    """
    return [list(group) for _, group in itertools.groupby(wanted, key=_shape)]


def _shape(settings: Settings) -> tuple[object, ...]:
    """Return what runs that are trained jointly have in common."""
    common = settings.seeded(0).placed(Path())
    data = common.data
    # Balanced class weights follow from the partition, and the network holds those of one run.
    if data.is_partitioned and data.partition_file is None and not common.local.class_weights:
        default = DataSettings()
        data = replace(data, data_seed=0, s=default.s, alpha=default.alpha, groups=default.groups)
    return common_part(common.method), replace(common, method=Method(), data=data)


def split_groups(groups: Sequence[Sequence[T]], wanted: int) -> list[list[T]]:
    """Halve the largest groups until there are `wanted` groups, or none can be halved."""
    parts = [list(group) for group in groups]
    while parts and len(parts) < wanted and max(map(len, parts)) > 1:
        largest = parts.index(max(parts, key=len))
        half = (len(parts[largest]) + 1) // 2
        parts[largest : largest + 1] = [parts[largest][:half], parts[largest][half:]]
    return parts


def _at_once(first: PreparedRun, wanted: int) -> tuple[int, bool]:
    """Return how many runs to execute together, as many as fit into memory, and whether to train them jointly."""
    if wanted == 1:  # measuring how many fit takes seconds on a GPU
        return 1, False
    simulator = first.simulator
    if simulator.device.type not in TOGETHER_ON or simulator.engine.name != "stacked" or simulator.storage.on_disk:
        return 1, False
    clients = max(1, round(simulator.settings.participation * len(simulator.federation)))
    if simulator.operations_of_a_client() * clients < SMALL_STEP:
        return max(1, min(wanted, simulator.clients_in_memory() // clients)), True
    fitting = max(1, min(MOST_IN_TURNS, int(simulator.free_memory() / (clients * simulator.bytes_of_a_client()))))
    return math.ceil(wanted / math.ceil(wanted / fitting)), False  # groups of about the same size


def _train(
    runs: Sequence[PreparedRun],
    watches: Sequence[RoundCallback | None],
    observers: Sequence[ObserverFactory],
    jointly: bool,
) -> list[Outcome]:
    with graceful_stop() as request:

        def train(run: PreparedRun, watch: RoundCallback | None) -> Outcome:
            run.simulator.runs_together = len(runs)
            return _train_one(run, request, watch, observers)

        def train_jointly(engine: JointEngine, run: PreparedRun, watch: RoundCallback | None) -> Outcome:
            run.simulator.engine = engine
            return train(run, watch)

        pairs = list(zip(runs, watches, strict=True))
        if len(runs) == 1:
            return [train(*pairs[0])]
        if jointly:
            jobs = [partial(train_jointly, run=run, watch=watch) for run, watch in pairs]
            outcomes = JointTraining(runs[0].simulator.engine).run(jobs)
        else:
            outcomes = run_in_turns([partial(train, *pair) for pair in pairs], runs[0].simulator.device)
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
