"""Plays what is missing of an experiment: finished runs are kept, a stopped one goes on from its checkpoint."""

import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedrema.data import Federation
from fedrema.errors import Diverged
from fedrema.grid.experiment import Cell
from fedrema.grid.store import Finished, Store, key_of
from fedrema.runs.execute import Prepared, Watcher, begin_on, take_up
from fedrema.runs.run import Run, is_finished
from fedrema.runs.together import play_seeds
from fedrema.settings import Settings


@dataclass(frozen=True)
class Task:
    """A cell with the seeds that are still missing."""

    cell: Cell
    runs: tuple[Settings, ...]

    @property
    def rounds(self) -> int:
        """How many rounds are to be played, over all its seeds."""
        return sum(settings.simulation.rounds for settings in self.runs)


def missing(cells: Iterable[Cell], seeds: int, store: Store) -> list[Task]:
    """Return what is not in the store, each run once, however many tables it belongs to."""
    known: set[str] = set()
    tasks = []
    for cell in cells:
        runs = [settings for settings in map(cell.settings, range(seeds)) if key_of(settings) not in known]
        known.update(map(key_of, runs))
        absent = tuple(settings for settings in runs if store.find(settings) is None)
        if absent:
            tasks.append(Task(cell, absent))
    return tasks


def finished(cell: Cell, seeds: int, store: Store) -> list[Finished]:
    """Return a cell's finished runs."""
    found = (store.find(cell.settings(seed)) for seed in range(seeds))
    return [one for one in found if one is not None]


class Runner:
    """Plays tasks one after the other, the seeds of each together where that is possible."""

    def __init__(self, store: Store, work: Path, watching: Callable[[Settings], Watcher]) -> None:
        self.store, self.work, self.watching = store, work, watching

    def play(self, tasks: Sequence[Task], minutes: float | None = None) -> Iterator[tuple[Task, list[str]]]:
        """Yield each task as it ends, with what went wrong in it.

        With `minutes`, a task is started only if it should be finished by then; how long it takes is judged by
        those before it, and by what the store knows.
        """
        begun = time.monotonic()
        for task in tasks:
            needed = self.seconds(task)
            left = None if minutes is None else 60 * minutes - (time.monotonic() - begun)
            if left is not None and (left <= 0 or (needed is not None and needed > left)):
                continue
            yield task, self._play(task)

    def seconds(self, task: Task) -> float | None:
        """Estimate how long a task takes, from runs that are most like it; None where nothing is known yet."""
        wanted = task.runs[0].flat()
        alike = ("dataset", "federation", "clients", "samples", "net", "epochs", "batch", "device")
        done = [one for one in self.store if not one.failed]
        known = [one for one in done if all(one.settings.get(name) == wanted[name] for name in alike)]
        of_method = [one for one in known if one.method == task.cell.method] or known
        if not of_method:
            return None
        per_round = [sum(one.summary["seconds"].values()) / max(one.summary["rounds"], 1) for one in of_method]
        return float(sum(per_round) / len(per_round) * task.rounds)

    def _play(self, task: Task) -> list[str]:
        placed = [self._placed(settings) for settings in task.runs]
        for settings in [each for each in placed if is_finished(each.output.folder)]:  # stopped before it was kept
            self.store.put(settings, Run(settings.output.folder))
            placed.remove(settings)
        failed = []
        for settings, outcome in play_seeds(placed, self.watching, self._prepare) if placed else ():
            if isinstance(outcome, Diverged):
                self.store.put_failed(settings, str(outcome))
                failed.append(f"{task.cell.title}, seed {settings.simulation.seed}: {outcome}")
            else:
                self.store.put(settings, outcome)
        for settings in task.runs:
            shutil.rmtree(self._placed(settings).output.folder, ignore_errors=True)
        return failed

    def _placed(self, settings: Settings) -> Settings:
        return settings.placed(self.work / key_of(settings))

    def _prepare(self, settings: Settings, federation: Federation) -> Prepared:
        folder = settings.output.folder
        if (folder / "config.json").is_file():
            return take_up(folder, federation=federation)
        return begin_on(settings, federation)
