"""The leaderboard as an experiment: which runs it consists of, and the order of the methods."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from statistics import mean

from fedrema.base.files import atomic_file, write_text
from fedrema.experiments.comparisons import runs_of, scores
from fedrema.experiments.spec import Cell, Experiment, Line, Values
from fedrema.experiments.spec_file import read_experiment
from fedrema.experiments.store import FOLDER, TABLE, Store
from fedrema.experiments.sweep import Choice, choices, tuned_file
from fedrema.methods import registry
from fedrema.reporting.statistics import Ranking, rank

PACKAGED = Path(__file__).parent
"""The folder of the grid files, and of the finished runs that come with fedrema."""
COMPLETE = ("digits", "few-strong", "few-weak")
"""Columns in which all methods are run; they decide the order."""
ON_CPU = ("digits",)
"""Columns that do not need a GPU."""
BEST, ALWAYS = 12, ("local", "fedavg", "fedrema")
"""How many of the best methods are run in the other columns, and which methods in any case."""
TUNED = {"digits": "digits", "few-strong": "cifar10"}
"""Columns in which tuned methods are run, and the dataset that they were tuned on."""
BEST_TUNED = 6
TUNED_FILE = "tuned.toml"


class Board:
    """The leaderboard's experiments with the finished runs in a folder.

    Parameters
    ----------
    folder
        Holds the finished runs and the settings that tuning has chosen.
    own
        The user's methods, as module:Class, which get rows of their own.
    changes
        Settings that override those of the grid files, such as fewer rounds.
    seeds
        Number of replicates; default: that of the grid file.
    """

    def __init__(
        self, folder: Path = PACKAGED, own: Sequence[str] = (), changes: Values | None = None, seeds: int | None = None
    ) -> None:
        self.folder, self.changes = folder, changes
        self.experiment = read_experiment(PACKAGED / "leaderboard.toml", changes, own)
        self.seeds = seeds or self.experiment.seeds
        self.store = Store(folder / FOLDER)

    def adopt(self, other: Path) -> None:
        """Copy the finished runs from another folder; files that are present already are kept."""
        for file in (*(other / FOLDER).glob(f"*{TABLE}"), *(other / FOLDER).glob("*.json")):
            if not (copy := self.store.folder / file.name).exists():
                with atomic_file(copy) as temporary:
                    temporary.write_bytes(file.read_bytes())

    def ranked(self) -> tuple[Ranking | None, list[str]]:
        """Return the average ranks by honest accuracy, and the rows that have runs, best first.

        There are no ranks if too few runs have finished. Rows without all runs follow by their mean accuracy.
        """
        table = scores(runs_of(self.complete_cells(), self.seeds, self.store), "honest")
        most = max(map(len, table.values()))  # a method with fewer replicates would reduce those of all others
        ranking = rank({row: values for row, values in table.items() if len(values) == most})
        names = list(ranking.names) if ranking else []
        others = [row for row, values in table.items() if values and row not in names]
        return ranking, [*names, *sorted(others, key=lambda row: -mean(table[row].values()))]

    def best(self, count: int) -> list[str]:
        """Return the best of fedrema's own methods."""
        return [row for row in self.ranked()[1] if row in registry()][:count]

    def complete_cells(self) -> list[Cell]:
        """Return the cells of the columns in which all methods are run, one column after the other."""
        return [self.experiment.cell(row.name, column) for column in COMPLETE for row in self.experiment.rows]

    def further_cells(self) -> list[Cell]:
        """Return the cells of the columns in which only the best methods are run, one column after the other."""
        rows = dict.fromkeys([*self.best(BEST), *ALWAYS])
        columns = [column.name for column in self.experiment.columns if column.name not in COMPLETE]
        return [self.experiment.cell(row, column) for column in columns for row in rows]

    @cached_property
    def tuning(self) -> dict[str, Experiment]:
        """The sweeps by dataset, with rows for all methods."""
        names = dict.fromkeys(TUNED.values())
        return {name: read_experiment(PACKAGED / f"tuning-{name}.toml", self.changes) for name in names}

    def tuning_cells(self) -> list[Cell]:
        """Return the cells of the sweeps that choose the settings of the best methods."""
        rows = self.best(BEST_TUNED)
        return [cell for sweep in self.tuning.values() for cell in sweep.cells if cell.row.base in rows]

    def choices(self) -> list[Choice]:
        """Return what the sweeps have chosen for the methods of which all combinations have been run."""
        found = []
        for sweep in self.tuning.values():
            needed = Counter(cell.row.base for cell in sweep.cells)
            chosen = choices(sweep, sweep.seeds, self.store)
            found += [choice for choice in chosen if choice.tried == needed[choice.method]]
        return found

    def untuned(self) -> list[tuple[str, str]]:
        """Return the columns and the best methods whose settings in that column have not been chosen yet."""
        chosen = {(choice.dataset, choice.method) for choice in self.choices()}
        best = self.best(BEST_TUNED)
        return [(column, row) for column, dataset in TUNED.items() for row in best if (dataset, row) not in chosen]

    def write_tuned(self) -> None:
        """Write the chosen settings as a file for --tuned."""
        if found := self.choices():
            write_text(self.folder / TUNED_FILE, tuned_file(found, "the leaderboard's tuning"))

    def tuned_cells(self) -> list[Cell]:
        """Return the cells of the tuned methods with the settings that were chosen for them."""
        chosen = {(choice.dataset, choice.method): choice.settings for choice in self.choices()}
        return [
            replace(
                cell,
                row=Line(f"{cell.row.name}-tuned", f"{cell.row.title}, tuned", settings, cell.row.name, settings),
                values={**cell.values, **settings},
            )
            for cell in self.experiment.cells
            if (settings := chosen.get((TUNED.get(cell.column.name, ""), cell.row.name))) is not None
        ]
