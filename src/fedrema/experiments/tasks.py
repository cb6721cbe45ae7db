"""Tasks: which runs of an experiment are missing, and how one task is run in this process."""

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec

from fedrema.config.settings import Settings
from fedrema.data import Federation
from fedrema.errors import BadInput, Diverged
from fedrema.experiments.finished_run import FinishedRun
from fedrema.experiments.spec import Cell, Line, Value, Vary
from fedrema.experiments.store import Store, key_of
from fedrema.runs.directory import RunDirectory
from fedrema.runs.execute import Prepared, Watcher, begin_on, take_up
from fedrema.runs.joint import play_seeds, shares
from fedrema.runs.lock import RunLock
from fedrema.runs.manifest import Inputs, changed_files, inputs_of, is_outdated, recorded_revisions
from fedrema.runs.run import Run, is_finished


class Order(msgspec.Struct, frozen=True):
    """A task as it is sent to another process or machine."""

    title: str
    method: str
    values: dict[str, Value]
    vary: Vary
    seeds: tuple[int, ...]
    inputs: Inputs


@dataclass(frozen=True)
class Task:
    """A cell with the seeds that are missing."""

    cell: Cell
    seeds: tuple[int, ...]
    inputs: Inputs = field(default_factory=dict)
    """Digests of the user's files that it depends on, as they were when it was planned."""

    @property
    def runs(self) -> list[Settings]:
        """The settings of its runs."""
        return [self.cell.settings(seed) for seed in self.seeds]

    @property
    def keys(self) -> list[str]:
        """The keys of its runs."""
        return [key_of(settings, self.inputs) for settings in self.runs]

    @property
    def rounds(self) -> int:
        """The number of rounds over all its seeds."""
        return len(self.seeds) * self.cell.parsed.simulation.rounds

    def encoded(self) -> str:
        """Return the task as JSON, for another process or machine."""
        cell = self.cell
        order = Order(cell.title, cell.method, dict(cell.values), cell.vary, self.seeds, self.inputs)
        return msgspec.json.encode(order).decode()

    @classmethod
    def decoded(cls, text: str) -> "Task":
        """Return the task that `encoded` described."""
        order = msgspec.json.decode(text, type=Order)
        cell = Cell(Line("", order.title, {}), Line("", "", {}), order.method, order.values, vary=order.vary)
        return cls(cell, order.seeds, order.inputs)


def missing(cells: Iterable[Cell], seeds: int, store: Store, known: set[str] | None = None) -> list[Task]:
    """Return the runs that are neither in the store nor among the keys `known`, each once; `known` grows by them.

    Runs of an older revision in the store are missing too.
    """
    known = set() if known is None else known
    tasks = []
    for cell in cells:
        inputs = inputs_of(cell.parsed)
        keys = {seed: key_of(cell.settings(seed), inputs) for seed in range(seeds)}
        absent = [seed for seed, key in keys.items() if key not in known and not store.has(key)]
        known.update(keys.values())
        # Runs on different data cannot be trained jointly: each is a task of its own.
        groups = [[seed] for seed in absent] if cell.vary == "both" else [absent] if absent else []
        tasks += [Task(cell, tuple(group), inputs) for group in groups]
    return tasks


def divided(tasks: Sequence[Task], workers: int) -> list[Task]:
    """Halve the largest tasks until there is one for each worker, as far as they can be halved."""
    parts = shares([[(task, seed) for seed in task.seeds] for task in tasks], workers)
    return [replace(part[0][0], seeds=tuple(seed for _, seed in part)) for part in parts]


def outdated(cells: Iterable[Cell], seeds: int, store: Store) -> set[str]:
    """Return the keys of runs in the store that an older revision computed."""
    settings = [cell.settings(seed) for cell in cells for seed in range(seeds)]
    return {found.key for each in settings if (found := store.find(each)) is not None and found.outdated}


def finished(cell: Cell, seeds: int, store: Store) -> list[FinishedRun]:
    """Return a cell's finished runs by seed; its outdated runs where there are no others."""
    found = [store.find(cell.settings(seed)) for seed in range(seeds)]
    ended = [one for one in found if one is not None]
    return [one for one in ended if not one.outdated] or ended


class Runner:
    """Runs the seeds of a task, jointly where possible; a stopped run continues from its checkpoint.

    Parameters
    ----------
    store
        Where finished runs are kept.
    work
        Folder of the runs that have not finished.
    watching
        Makes the callback that receives a run's rounds.
    beside
        How many other tasks use the same device at the same time; recorded with the run.
    """

    def __init__(self, store: Store, work: Path, watching: Callable[[Settings], Watcher], beside: int = 0) -> None:
        self.store, self.work, self.watching, self.beside = store, work, watching, beside

    def run(self, task: Task) -> list[str]:
        """Run a task, keep its runs, and return a sentence for each that diverged.

        Raises
        ------
        Interrupted
            When a stop was requested; running the same task again continues from its checkpoints.
        """
        placed = [settings.placed(self.work / key) for settings, key in zip(task.runs, task.keys, strict=True)]
        folders = [settings.output.folder for settings in placed]
        for folder in folders:
            if not _can_continue(folder):
                _remove(folder)
        for settings in [each for each in placed if is_finished(each.output.folder)]:  # stopped before it was kept
            self.store.put(settings, Run(settings.output.folder), self.beside, task.inputs)
            placed.remove(settings)
        failed = []
        prepare = partial(_prepare, task.inputs)
        for settings, outcome in play_seeds(placed, self.watching, prepare) if placed else ():
            if isinstance(outcome, Diverged):
                self.store.put_diverged(settings, str(outcome), task.inputs)
                failed.append(f"{task.cell.title}, seed {settings.simulation.seed}: {outcome}")
            else:
                self.store.put(settings, outcome, self.beside, task.inputs)
        for folder in folders:
            _remove(folder)
        return failed


def _can_continue(folder: Path) -> bool:
    """Whether a folder holds a run that the present revisions began."""
    if not (folder / "config.json").is_file():  # killed before it had begun
        return False
    config = RunDirectory(folder).config()
    return not is_outdated(str(config.get("method")), recorded_revisions(config))


def _prepare(planned: Inputs, settings: Settings, federation: Federation) -> Prepared:
    """Begin or resume a run; refuse it if the user's files have changed since it was planned."""
    folder = settings.output.folder
    present = inputs_of(settings)
    for name in planned.keys() & present.keys():
        if changed := changed_files(planned[name], present[name]):
            raise BadInput(f"{changed} since the command started, or differs on another machine: start it again.")
    if (folder / "config.json").is_file():
        return take_up(folder, federation=federation)
    return begin_on(settings, federation)


def _remove(folder: Path) -> None:
    """Delete the folder of a run that is no longer needed; refuses while another process writes to it."""
    if folder.exists():
        with RunLock(folder):
            shutil.rmtree(folder, ignore_errors=True)
