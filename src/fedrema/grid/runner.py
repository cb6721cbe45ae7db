"""Plays a task in this process: finished runs are kept, a stopped one goes on from its checkpoint."""

import shutil
from collections.abc import Callable
from pathlib import Path

from fedrema.data import Federation
from fedrema.errors import Diverged
from fedrema.grid.store import Store, key_of
from fedrema.grid.tasks import Task
from fedrema.runs.execute import Prepared, Watcher, begin_on, take_up
from fedrema.runs.lock import RunLock
from fedrema.runs.run import Run, is_finished
from fedrema.runs.together import play_seeds
from fedrema.settings import Settings


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
        placed = [self._placed(settings) for settings in task.runs]
        for settings in [each for each in placed if is_finished(each.output.folder)]:  # stopped before it was kept
            self.store.put(settings, Run(settings.output.folder), self.beside)
            placed.remove(settings)
        failed = []
        for settings, outcome in play_seeds(placed, self.watching, self._prepare) if placed else ():
            if isinstance(outcome, Diverged):
                self.store.put_failed(settings, str(outcome))
                failed.append(f"{task.cell.title}, seed {settings.simulation.seed}: {outcome}")
            else:
                self.store.put(settings, outcome, self.beside)
        for settings in task.runs:
            _remove(self._placed(settings).output.folder)
        return failed

    def _placed(self, settings: Settings) -> Settings:
        return settings.placed(self.work / key_of(settings))

    def _prepare(self, settings: Settings, federation: Federation) -> Prepared:
        folder = settings.output.folder
        if (folder / "config.json").is_file():
            return take_up(folder, federation=federation)
        _remove(folder)  # its process was killed before the run had begun
        return begin_on(settings, federation)


def _remove(folder: Path) -> None:
    """Delete the folder of a run that is not needed any more; refuses while another process writes to it."""
    if folder.exists():
        with RunLock(folder):
            shutil.rmtree(folder, ignore_errors=True)
