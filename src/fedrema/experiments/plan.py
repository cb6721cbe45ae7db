"""The runs that are missing, cell by cell in the order in which they run, with their estimated cost."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedrema.experiments.forecast import Forecaster, duration
from fedrema.experiments.spec import Cell, Experiment
from fedrema.experiments.store import Store
from fedrema.experiments.table import MISSING
from fedrema.experiments.tasks import missing_tasks
from fedrema.reporting.tables import markdown_lines

HEADINGS = ["experiment", "cell", "runs", "estimated"]
EXPERIMENT_HEADINGS = ["experiment", "cells", "runs", "estimated"]


@dataclass(frozen=True)
class PlannedCell:
    """A cell with missing runs."""

    experiment: str
    cell: str
    runs: int
    seconds: float | None
    """What all its missing runs take; None if unknown."""

    @property
    def texts(self) -> list[str]:
        """The cell as a line of a table."""
        return [self.experiment, self.cell, str(self.runs), MISSING if self.seconds is None else duration(self.seconds)]


@dataclass(frozen=True)
class Plan:
    """All cells with missing runs; a run that several cells show counts for the first."""

    cells: Sequence[PlannedCell]
    device: str
    """What the estimates are for."""

    @property
    def total(self) -> str:
        """A sentence with the number of runs and their time."""
        if not self.cells:
            return "All runs have finished already."
        runs, known = sum(each.runs for each in self.cells), [each for each in self.cells if each.seconds is not None]
        to_do = f"{'1 run' if runs == 1 else f'{runs} runs'} to do"
        if not known:
            return f"{to_do} on {self.device}; the time is known after the first."
        time = duration(sum(each.seconds or 0.0 for each in known))
        rest = runs - sum(each.runs for each in known)
        unknown = f", and {rest} runs of unknown time" if rest else ""
        return f"{to_do}: about {time} on {self.device}{unknown}."

    def markdown(self) -> str:
        """Return a table of the experiments, the total, and a table of the cells."""
        if not self.cells:
            return f"{self.total}\n"
        cells = markdown_lines(HEADINGS, [each.texts for each in self.cells], texts=2)
        return "\n".join([*markdown_lines(EXPERIMENT_HEADINGS, self.experiments), "", self.total, "", *cells, ""])

    @property
    def experiments(self) -> list[list[str]]:
        """The experiments as lines of a table: their numbers of cells and runs, and their known time."""
        names = dict.fromkeys(each.experiment for each in self.cells)
        return [[name, *self._sums([each for each in self.cells if each.experiment == name])] for name in names]

    @staticmethod
    def _sums(cells: Sequence[PlannedCell]) -> list[str]:
        """Return the numbers of cells and runs and the known time of some cells, as text."""
        runs, seconds = sum(each.runs for each in cells), sum(each.seconds or 0.0 for each in cells)
        return [str(len(cells)), str(runs), duration(seconds) if seconds else MISSING]


def make_plan(parts: Iterable[tuple[Experiment, Sequence[Cell], int]], store: Store, forecaster: Forecaster) -> Plan:
    """Return the missing runs of experiments, given with the cells to run and the number of replicates."""
    known: set[str] = set()
    planned = []
    for experiment, cells, replicates in parts:
        for cell in cells:
            tasks = missing_tasks([cell], replicates, store, known)
            if tasks:
                times = [forecaster.seconds(task) for task in tasks]
                seconds = None if None in times else sum(time for time in times if time is not None)
                runs = sum(len(task.seeds) for task in tasks)
                planned.append(PlannedCell(experiment.name, cell.title, runs, seconds))
    return Plan(planned, forecaster.device_name)
