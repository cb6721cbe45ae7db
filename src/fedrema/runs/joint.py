"""Runs that differ only in their training seed, played as one program."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from fedrema.config.settings import Settings
from fedrema.data import Federation, build_federation
from fedrema.engine import JointEngine, JointTraining
from fedrema.errors import Diverged
from fedrema.runs.execute import Interrupted, Prepared, Watcher, begin_on
from fedrema.runs.run import Run
from fedrema.runs.signals import StopRequest, stopping_gently

T = TypeVar("T")
Outcome = Run | Diverged
Watching = Callable[[Settings], Watcher]
Preparing = Callable[[Settings, Federation], Prepared]
DEVICES = ("cuda",)
"""Where seeds train together. On a CPU a run's bits would depend on its company: torch computes an exponential
otherwise at the end of an array than inside it."""


def seeds_apart(wanted: Sequence[Settings]) -> list[list[Settings]]:
    """Put settings that differ only in their training seed (and folder) side by side, in the order given."""
    return [list(group) for _, group in itertools.groupby(wanted, key=_without_seed)]


def _without_seed(settings: Settings) -> Settings:
    return settings.seeded(0).placed(Path())


def shares(groups: Sequence[Sequence[T]], wanted: int) -> list[list[T]]:
    """Halve the largest groups until there are as many as wanted, as far as they can be halved."""
    parts = [list(group) for group in groups]
    while parts and len(parts) < wanted and max(map(len, parts)) > 1:
        largest = parts.index(max(parts, key=len))
        half = (len(parts[largest]) + 1) // 2
        parts[largest : largest + 1] = [parts[largest][:half], parts[largest][half:]]
    return parts


def play_seeds(
    group: Sequence[Settings],
    watching: Watching,
    prepare: Preparing = begin_on,
    federation: Federation | None = None,
) -> Iterator[tuple[Settings, Outcome]]:
    """Play runs that differ in their seed: as many at once as memory allows, if they can be stacked at all.

    `prepare` begins a run, or takes up one that was stopped; `federation` is the one that the settings describe, or
    another one given in Python.

    Raises
    ------
    Interrupted
        When someone asked to stop; every run that was going on has been saved.
    """
    federation = federation or build_federation(group[0].data)
    waiting = list(group)
    while waiting:
        first = prepare(waiting[0], federation)
        number = _at_once(first, len(waiting))
        now, waiting = waiting[:number], waiting[number:]
        prepared = [first, *(prepare(settings, federation) for settings in now[1:])]
        yield from zip(now, _play(prepared, [watching(settings) for settings in now]), strict=True)


def _at_once(first: Prepared, wanted: int) -> int:
    """Return how many seeds to train together; clients that are looped over gain nothing by company."""
    if wanted == 1:  # to find out how many fit takes seconds on a GPU
        return 1
    simulator = first.simulator
    if simulator.device.type not in DEVICES or simulator.engine.name != "stacked" or simulator.storage.on_disk:
        return 1
    clients = max(1, round(simulator.settings.participation * len(simulator.federation)))
    return max(1, min(wanted, simulator.clients_in_memory() // clients))


def _play(prepared: Sequence[Prepared], watches: Sequence[Watcher]) -> list[Outcome]:
    with stopping_gently() as request:
        if len(prepared) == 1:
            return [_outcome(prepared[0], request, watches[0])]

        def play(party: JointEngine, each: Prepared, watch: Watcher) -> Outcome:
            each.simulator.engine = party
            each.simulator.joint_runs = len(prepared)
            return _outcome(each, request, watch)

        works = [partial(play, each=each, watch=watch) for each, watch in zip(prepared, watches, strict=True)]
        found = JointTraining(prepared[0].simulator.engine).run(works)
    errors = [each for each in found if isinstance(each, BaseException) and not isinstance(each, Diverged)]
    if errors:
        raise next((error for error in errors if not isinstance(error, Interrupted)), errors[0])
    return found


def _outcome(prepared: Prepared, request: StopRequest, watch: Watcher) -> Outcome:
    try:
        return prepared.play_until(request, watch)
    except Diverged as error:  # one run's bad luck is no reason to stop the others
        return error
