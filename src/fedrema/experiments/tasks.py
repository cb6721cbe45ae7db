"""Tasks: finds the missing runs of an experiment, and runs one task in this process."""

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from fedrema.config.settings import Settings
from fedrema.errors import BadInput, Diverged
from fedrema.experiments.finished_run import FinishedRun
from fedrema.experiments.spec import Cell, Line, Value, Vary
from fedrema.experiments.store import Store, key_of
from fedrema.runs.callbacks import CallbackFor
from fedrema.runs.directory import RunDirectory
from fedrema.runs.execute_many import execute_all, group_joint, split_groups
from fedrema.runs.lock import RunLock
from fedrema.runs.manifest import Inputs
from fedrema.runs.provenance import inputs_of, is_outdated
from fedrema.runs.run import Run, is_finished
from fedrema.runs.trust import changed_files


class TaskMessage(msgspec.Struct, frozen=True):
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
        # Another machine may have another device, for which `auto` would be another precision.
        values = {**cell.values, "precision": cell.parsed.simulation.precision}
        message = TaskMessage(cell.title, cell.method, values, cell.vary, self.seeds, self.inputs)
        return msgspec.json.encode(message).decode()

    @classmethod
    def decoded(cls, text: str) -> "Task":
        """Return the task that `encoded` described."""
        message = msgspec.json.decode(text, type=TaskMessage)
        cell = Cell(Line("", message.title, {}), Line("", "", {}), message.method, message.values, vary=message.vary)
        return cls(cell, message.seeds, message.inputs)


def missing_tasks(cells: Iterable[Cell], seeds: int, store: Store, known: set[str] | None = None) -> list[Task]:
    """Return tasks for the runs whose keys are neither in the store nor in `known`; adds these keys to `known`.

    Runs in the store from an older revision count as missing.
    """
    known = set() if known is None else known
    tasks = []
    for cell in cells:
        inputs = inputs_of(cell.parsed)
        keys = {seed: key_of(cell.settings(seed), inputs) for seed in range(seeds)}
        absent = [seed for seed, key in keys.items() if key not in known and not store.has(key)]
        known.update(keys.values())
        tasks += [Task(cell, tuple(absent), inputs)] if absent else []
    return tasks


def can_run_together(first: Task, other: Task) -> bool:
    """Whether the runs of two tasks have one shape, so that a GPU can execute them together."""
    return len(group_joint([first.runs[0], other.runs[0]])) == 1


def split_tasks(tasks: Sequence[Task], workers: int) -> list[Task]:
    """Halve the largest tasks until there is one for each worker, or none can be halved."""
    parts = split_groups([[(task, seed) for seed in task.seeds] for task in tasks], workers)
    return [replace(part[0][0], seeds=tuple(seed for _, seed in part)) for part in parts]


def outdated_keys(cells: Iterable[Cell], seeds: int, store: Store) -> set[str]:
    """Return the keys of runs in the store that come from an older revision."""
    settings = [cell.settings(seed) for cell in cells for seed in range(seeds)]
    return {found.key for each in settings if (found := store.find(each)) is not None and found.outdated}


def finished_runs(cell: Cell, seeds: int, store: Store) -> list[FinishedRun]:
    """Return a cell's finished runs in order of seeds; outdated ones only if there are no others.

    Outdated runs of a cell that varies the partition may all be on its first one: such runs are returned if there are
    more of them than outdated replicates. They are never mixed with others.
    """
    found = _in_store(cell, seeds, store)
    if current := [run for run in found if not run.outdated]:
        return current
    fixed = [run for run in _in_store(replace(cell, vary="training"), seeds, store) if run.outdated]
    return fixed if len(fixed) > len(found) else found


def on_one_partition(cell: Cell, runs: Sequence[FinishedRun]) -> bool:
    """Whether several runs of a cell that varies the partition are all on one."""
    return cell.vary == "both" and len(runs) > 1 and len({run.settings.get("data-seed") for run in runs}) == 1


def _in_store(cell: Cell, seeds: int, store: Store) -> list[FinishedRun]:
    found = [store.find(cell.settings(seed)) for seed in range(seeds)]
    return [run for run in found if run is not None]


class Runner:
    """Runs the seeds of tasks, together where possible; a stopped run continues from its checkpoint.

    Parameters
    ----------
    store
        Receives the finished runs.
    work
        Folder of the runs that have not finished.
    callback_for
        Returns the callback that receives the rounds of a run.
    concurrent_tasks
        How many other tasks use the same device at the same time; recorded with the run.
    """

    def __init__(self, store: Store, work: Path, callback_for: CallbackFor, concurrent_tasks: int = 0) -> None:
        self.store, self.work, self.callback_for, self.concurrent_tasks = store, work, callback_for, concurrent_tasks

    def run(self, task: Task) -> list[str]:
        """Run one task, and return a sentence for each run that diverged; see `run_together`."""
        return self.run_together([task])[0]

    def run_together(self, tasks: Sequence[Task]) -> list[list[str]]:
        """Run tasks, store their runs, and return for each task a sentence for each run that diverged.

        Raises
        ------
        Interrupted
            When a stop was requested; running the same tasks again continues from their checkpoints.
        """
        failed: list[list[str]] = [[] for _ in tasks]
        owners = {self.work / key: pair for pair in zip(tasks, failed, strict=True) for key in pair[0].keys}
        """By folder: the task of a run, and the task's sentences."""
        every = (settings for task in tasks for settings in task.runs)
        placed = [settings.placed(folder) for settings, folder in zip(every, owners, strict=True)]
        for folder in owners:
            if not _can_resume(folder):
                remove_run(folder)
        for settings in [each for each in placed if is_finished(each.output.folder)]:  # stopped before it was stored
            self._put(settings, Run(settings.output.folder), owners[settings.output.folder][0])
            placed.remove(settings)
        for settings in placed:
            _check_inputs(owners[settings.output.folder][0].inputs, settings)
        for settings, outcome in execute_all(placed, self.callback_for, resume=True, with_simple_models=False):
            task, sentences = owners[settings.output.folder]
            if isinstance(outcome, Diverged):
                self.store.put_diverged(settings, str(outcome), task.inputs)
                sentences.append(f"{task.cell.title}, seed {settings.simulation.seed}: {outcome}")
            else:
                self._put(settings, outcome, task)
        for folder in owners:
            remove_run(folder)
        return failed

    def _put(self, settings: Settings, run: Run, task: Task) -> None:
        self.store.put(settings, run, self.concurrent_tasks, task.inputs)


def _can_resume(folder: Path) -> bool:
    """Whether a folder holds a run that was started with the present revisions."""
    if not (folder / "config.json").is_file():  # killed before the run started
        return False
    manifest = RunDirectory(folder).manifest()
    return not is_outdated(manifest.method, manifest.revisions, manifest.settings)


def _check_inputs(planned: Inputs, settings: Settings) -> None:
    """Refuse a run if the user's files have changed since it was planned."""
    present = inputs_of(settings)
    for name in planned.keys() & present.keys():
        if changed := changed_files(planned[name], present[name]):
            raise BadInput(f"{changed} since the command started, or differs on another machine: repeat the command.")


def remove_run(folder: Path) -> None:
    """Delete the folder of a run that is no longer needed; refuses while another process writes to it."""
    if folder.exists():
        with RunLock(folder):
            shutil.rmtree(folder, ignore_errors=True)
