"""Plays a task in this process: finished runs are kept, a stopped one goes on from its checkpoint."""

import shutil
from collections.abc import Callable
from pathlib import Path

from fedrema.config.settings import Settings
from fedrema.errors import BadInput, Diverged
from fedrema.experiments.store import Store
from fedrema.experiments.work import Task
from fedrema.runs.directory import RunDirectory
from fedrema.runs.execute import Watcher
from fedrema.runs.joint import execute_all
from fedrema.runs.lock import RunLock
from fedrema.runs.manifest import Inputs
from fedrema.runs.provenance import changed_files, inputs_of, is_outdated
from fedrema.runs.run import Run, is_finished


class Runner:
    """Plays the seeds of a task, together where that is possible."""

    def __init__(self, store: Store, work: Path, watching: Callable[[Settings], Watcher], beside: int = 0) -> None:
        self.store, self.work, self.watching = store, work, watching
        self.beside = beside
        """How many other tasks are played on the same device at the same time; kept with what took how long."""

    def play(self, task: Task) -> list[str]:
        """Play a task, keep its runs, and return what went wrong.

        Raises
        ------
        Interrupted
            When someone asked to stop; the same task then goes on from its checkpoints.
        """
        placed = [settings.placed(self.work / key) for settings, key in zip(task.runs, task.keys, strict=True)]
        folders = [settings.output.folder for settings in placed]
        for folder in folders:
            if not _can_go_on(folder):
                _remove(folder)
        for settings in [each for each in placed if is_finished(each.output.folder)]:  # stopped before it was kept
            self.store.put(settings, Run(settings.output.folder), self.beside, task.inputs)
            placed.remove(settings)
        failed = []
        for settings in placed:
            _check_inputs(task.inputs, settings)
        for settings, outcome in execute_all(placed, self.watching, resume=True):
            if isinstance(outcome, Diverged):
                self.store.put_failed(settings, str(outcome), task.inputs)
                failed.append(f"{task.cell.title}, seed {settings.simulation.seed}: {outcome}")
            else:
                self.store.put(settings, outcome, self.beside, task.inputs)
        for folder in folders:
            _remove(folder)
        return failed


def _can_go_on(folder: Path) -> bool:
    """Tell whether a run has begun in a folder, with the present revisions."""
    if not (folder / "config.json").is_file():  # killed before it had begun
        return False
    manifest = RunDirectory(folder).manifest()
    return not is_outdated(manifest.method, manifest.revisions)


def _check_inputs(planned: Inputs, settings: Settings) -> None:
    """Refuse a run where the user's files are not those it was planned with."""
    present = inputs_of(settings)
    for name in planned.keys() & present.keys():
        if changed := changed_files(planned[name], present[name]):
            raise BadInput(f"{changed} since the command was given, or differs on another machine: give it again.")


def _remove(folder: Path) -> None:
    """Delete the folder of a run that is not needed any more; refuses while another process writes to it."""
    if folder.exists():
        with RunLock(folder):
            shutil.rmtree(folder, ignore_errors=True)
