"""What a picture is drawn from: the finished runs of its cells, how rows look, and what is missing."""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import numpy as np

from fedrema.experiments.spec import Cell, Experiment, Line, Picture
from fedrema.experiments.store import Finished, Store
from fedrema.experiments.work import finished
from fedrema.reporting.plots import Look, looks


class Results:
    """A picture's cells, as far as they have been run."""

    def __init__(self, picture: Picture, experiment: Experiment, seeds: int, store: Store) -> None:
        self.picture, self.experiment = picture, experiment
        self.rows = [line for line in experiment.rows if line.name in picture.rows]
        self.columns = [line for line in experiment.columns if line.name in picture.columns]
        self._all = {
            (row.name, column.name): finished(experiment.cell(row.name, column.name), seeds, store)
            for row in self.rows
            for column in self.columns
        }

    def title(self, shown: str) -> str:
        """Return the picture's own title, or the experiment's with what is shown of it."""
        title = self.experiment.title
        return self.picture.title or (title if shown.lower() in title.lower() else f"{title}. {shown}")

    def runs(self, row: Line, column: Line) -> list[Finished]:
        """Return a cell's runs that came to their end."""
        return [run for run in self._all[row.name, column.name] if not run.failed]

    def cell(self, row: Line, column: Line) -> Cell:
        """Return a cell."""
        return self.experiment.cell(row.name, column.name)

    def cells(self, having: Callable[[Finished], object]) -> Iterator[tuple[Line, Line, list[Finished]]]:
        """Yield rows, columns and those of their runs that have what is to be shown."""
        for row in self.rows:
            for column in self.columns:
                runs = [run for run in self.runs(row, column) if having(run)]
                if runs:
                    yield row, column, runs

    def started(self) -> list[Line]:
        """Return the columns in which anything has been run."""
        return [column for column in self.columns if any(self.runs(row, column) for row in self.rows)]

    def name(self, row: Line, column: Line) -> str:
        """Name a panel of one cell by what tells it from the picture's others."""
        if len(self.columns) == 1:
            return row.title
        return column.title if len(self.rows) == 1 else f"{row.title}, {column.title}"

    @cached_property
    def looks(self) -> dict[str, Look]:
        """The look of each row of the experiment, by name: a method's own where the row is that method."""
        rows = self.experiment.rows
        return dict(zip((row.name for row in rows), looks([self._method(row) for row in rows]), strict=True))

    def _method(self, row: Line) -> str:
        cell = next(cell for cell in self.experiment.cells if cell.row == row)
        method = cell.parsed.method
        # Of several rows with one method, the one that leaves its settings alone is what others call by its name.
        return cell.method if row.name == cell.method or method == type(method)() else ""

    @property
    def comparable(self) -> bool:
        """Whether all columns are on one dataset, so that accuracies are worth comparing across panels."""
        cells = (self.cell(self.rows[0], column) for column in self.columns)
        return len({cell.parsed.data.dataset for cell in cells}) == 1

    @property
    def seed_words(self) -> str:
        """Of what the seeds are."""
        both = any(cell.vary == "both" for cell in self.experiment.cells)
        return "seeds of training and data" if both else "training seeds"

    def missing(self) -> list[str]:
        """Say in sentences what has not been run, and what has not come to its end."""
        absent = [cell for cell, runs in self._all.items() if not runs]
        diverged = [cell for cell, runs in self._all.items() if any(run.failed for run in runs)]
        sentences = (("Not run", absent), ("Diverged, at least in one seed", diverged))
        found = [f"{words}: {self._list(cells)}." for words, cells in sentences if cells]
        return [*found, *([self.outdated] if self.outdated else [])]

    @property
    def outdated(self) -> str:
        """A sentence that names the cells computed by an older revision; "" where none was."""
        cells = [cell for cell, runs in self._all.items() if any(run.outdated for run in runs)]
        return f"Computed by an older revision, to be run again: {self._list(cells)}." if cells else ""

    def lacking(self, words: str, having: Callable[[Finished], object]) -> str:
        """Say in a sentence which cells were run without what is to be shown; "" where all have it."""
        runs = {cell: [run for run in runs if not run.failed] for cell, runs in self._all.items()}
        cells = [cell for cell, some in runs.items() if some and not any(map(having, some))]
        return f"{words}: {self._list(cells)}." if cells else ""

    def _list(self, cells: Sequence[tuple[str, str]]) -> str:
        """List cells as rows and columns where they are whole ones."""
        rest, names = set(cells), []
        for row in self.rows:
            own = {(row.name, column.name) for column in self.columns}
            if own <= rest:
                names.append(row.title)
                rest -= own
        for column in self.columns:
            # What whole rows lack needs no second word.
            own = {(row.name, column.name) for row in self.rows if row.title not in names}
            if own and own <= rest:
                names.append(column.title)
                rest -= own
        between = "; " if rest else ", "
        for row in self.rows:
            where = [column.title for column in self.columns if (row.name, column.name) in rest]
            names += [f"{row.title} at {', '.join(where)}"] if where else []
        return between.join(names)


def by_round(run: Finished, quantity: str) -> dict[int, float]:
    """Return a curve of a run by round, where it has values."""
    pairs = zip(run.curves["round"], run.curves.get(quantity, []), strict=False)
    return {int(number): float(value) for number, value in pairs if value is not None}


def critical_end(runs: Sequence[Finished]) -> float | None:
    """Return the last critical round, averaged over seeds; None where one has no critical period, or no end of it."""
    ends = [run.summary.get("critical_rounds") for run in runs]
    if not runs or any(not end or end >= run.summary["rounds"] for end, run in zip(ends, runs, strict=True)):
        return None
    return float(np.mean([end for end in ends if end]))
