"""What all figures share: the finished runs of their cells, captions about what is missing, sizes and panels."""

import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from fedrema.experiments.finished_run import FinishedRun
from fedrema.experiments.spec import Cell, Experiment, FigureSpec, Line
from fedrema.experiments.store import Store
from fedrema.experiments.table import primary_of
from fedrema.experiments.tasks import finished_runs
from fedrema.reporting.plots import Look, looks
from fedrema.tasks import METRICS, Metric

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 7.2
"""Inches: one and a half columns of a paper."""
SMALL = 8.0
"""Points: the smallest font size."""
TITLE = 10.5
GREY = "0.35"
_TITLE_CHARACTERS, _CAPTION_CHARACTERS = 13.0, 16.0
"""How many characters fit into an inch of title or caption."""
_LINE_SPACING = 1.3


Having = Callable[[Cell, FinishedRun], object]
"""Whether a run has what a figure shows."""


class Results:
    """The cells of a figure, with their finished runs."""

    def __init__(self, spec: FigureSpec, experiment: Experiment, seeds: int, store: Store) -> None:
        self.spec, self.experiment = spec, experiment
        self.rows = [line for line in experiment.rows if line.name in spec.rows]
        self.columns = [line for line in experiment.columns if line.name in spec.columns]
        self._all = {
            (row.name, column.name): finished_runs(experiment.cell(row.name, column.name), seeds, store)
            for row in self.rows
            for column in self.columns
        }

    @cached_property
    def metric(self) -> Metric:
        """The primary metric of the runs."""
        return METRICS[primary_of(run for runs in self._all.values() for run in runs)]

    def title(self, shown: str) -> str:
        """Return the figure's own title, or the experiment's with what is shown of it."""
        title = self.experiment.title
        return self.spec.title or (title if shown.lower() in title.lower() else f"{title}. {shown}")

    def runs(self, row: Line, column: Line) -> list[FinishedRun]:
        """Return a cell's finished runs, without those that diverged."""
        return [run for run in self._all[row.name, column.name] if not run.failed]

    def cell(self, row: Line, column: Line) -> Cell:
        """Return a cell."""
        return self.experiment.cell(row.name, column.name)

    def cells(self, having: Having) -> Iterator[tuple[Line, Line, list[FinishedRun]]]:
        """Yield rows, columns and their runs that have what is to be shown."""
        for row in self.rows:
            for column in self.columns:
                runs = [run for run in self.runs(row, column) if having(self.cell(row, column), run)]
                if runs:
                    yield row, column, runs

    def started(self) -> list[Line]:
        """Return the columns in which anything has been run."""
        return [column for column in self.columns if any(self.runs(row, column) for row in self.rows)]

    def name(self, row: Line, column: Line) -> str:
        """Return the title of a cell's panel: what distinguishes it from the other panels."""
        if len(self.columns) == 1:
            return row.title
        return column.title if len(self.rows) == 1 else f"{row.title}, {column.title}"

    @cached_property
    def looks(self) -> dict[str, Look]:
        """The colour and stroke of each row, by name: the method's own where the row is that method."""
        cells = {cell.row.name: cell for cell in reversed(self.experiment.cells)}
        rows = [row.name for row in self.experiment.rows]
        declared = {cells[row].method: cells[row].parsed.method.reports for row in rows}
        return dict(zip(rows, looks([self._method(cells[row]) for row in rows], declared), strict=True))

    def _method(self, cell: Cell) -> str:
        """Return the method whose colour a row has; "" where it gets a free one."""
        method = cell.parsed.method
        # Of several rows with one method, the one with default settings gets the method's colour.
        return cell.method if cell.row.name == cell.method or method == type(method)() else ""

    @property
    def comparable(self) -> bool:
        """Whether all columns use the same dataset, so that panels can share an axis."""
        cells = (self.cell(self.rows[0], column) for column in self.columns)
        return len({cell.parsed.data.dataset for cell in cells}) == 1

    @property
    def seed_words(self) -> str:
        """What the runs of a cell are called."""
        return "replicates" if self.experiment.replicates == "replicates" else "training seeds"

    def missing(self) -> list[str]:
        """Return sentences that name the cells that have not been run or that diverged."""
        absent = [cell for cell, runs in self._all.items() if not runs]
        diverged = [cell for cell, runs in self._all.items() if any(run.failed for run in runs)]
        sentences = (("Not run", absent), ("Diverged, at least in one seed", diverged))
        found = [f"{words}: {self._list(cells)}." for words, cells in sentences if cells]
        return [*found, *([self.outdated] if self.outdated else [])]

    @property
    def outdated(self) -> str:
        """A sentence that names the cells computed by an older revision; "" if there are none."""
        cells = [cell for cell, runs in self._all.items() if any(run.outdated for run in runs)]
        return f"Computed by an older revision, to be run again: {self._list(cells)}." if cells else ""

    def lacking(self, words: str, having: Having) -> str:
        """Return a sentence that names the cells whose runs lack what is to be shown; "" if none does."""
        cells = [
            (row.name, column.name)
            for row in self.rows
            for column in self.columns
            if (runs := self.runs(row, column)) and not any(having(self.cell(row, column), run) for run in runs)
        ]
        return f"{words}: {self._list(cells)}." if cells else ""

    def _list(self, cells: Sequence[tuple[str, str]]) -> str:
        """Return cells as text; complete rows and columns by their titles."""
        rest, names = set(cells), []
        for row in self.rows:
            own = {(row.name, column.name) for column in self.columns}
            if own <= rest:
                names.append(row.title)
                rest -= own
        for column in self.columns:
            # Complete rows are listed already.
            own = {(row.name, column.name) for row in self.rows if row.title not in names}
            if own and own <= rest:
                names.append(column.title)
                rest -= own
        between = "; " if rest else ", "
        for row in self.rows:
            where = [column.title for column in self.columns if (row.name, column.name) in rest]
            names += [f"{row.title} at {', '.join(where)}"] if where else []
        return between.join(names)


def metric_label(metric: Metric, whose: str = "") -> str:
    """Return the label of an axis with a metric on test samples."""
    return f"Test {metric.title}{whose}{' (%)' if metric.percent else ''}"


def period_end(runs: Sequence[FinishedRun]) -> float | None:
    """Return the last round of the method's period, averaged over seeds; None if a run has no ended period."""
    ends = [next(iter(run.summary.period_rounds.values()), 0) for run in runs]
    if not runs or any(not end or end >= run.summary.rounds for end, run in zip(ends, runs, strict=True)):
        return None
    return float(np.mean(ends))


def new_figure(height: float, width: float = WIDTH) -> "Figure":
    """Return an empty figure of this size in inches; title and caption add their own height."""
    # Imported here because it takes half a second. Not pyplot, which would keep every figure in memory.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def panels(figure: "Figure", count: int, per_line: int, share_x: bool = True, share_y: bool = True) -> list["Axes"]:
    """Return panels line by line; a shared axis has tick labels at the outer panels only."""
    per_line = min(count, per_line)
    lines = -(-count // per_line)
    grid = figure.subplots(lines, per_line, sharex=share_x, sharey=share_y, squeeze=False).flatten().tolist()
    for empty in grid[count:]:
        empty.remove()
    for place, axes in enumerate(grid[:count]):
        # With an incomplete last line there are panels without one below them: then all have tick labels.
        own = not share_x or count % per_line > 0
        axes.tick_params(labelbottom=own or place // per_line == lines - 1, labelsize=SMALL)
    return grid[:count]


def outer_labels(axes: Sequence["Axes"], per_line: int, across: str, up: str) -> None:
    """Label the axes at the left and in the last line only."""
    last = (len(axes) - 1) // per_line
    for place, one in enumerate(axes):
        one.set_xlabel(across if place // per_line == last else "", fontsize=SMALL + 1)
        one.set_ylabel(up if place % per_line == 0 else "", fontsize=SMALL + 1)


def panel_title(axes: "Axes", title: str) -> None:
    """Set the title of a panel."""
    axes.set_title(title, fontsize=SMALL + 1, loc="left")


def add_texts(figure: "Figure", title: str, sentences: Sequence[str]) -> None:
    """Add the title above and the caption below, wrapped, and increase the height by theirs."""
    width, height = figure.get_size_inches()
    above = textwrap.wrap(title, int(_TITLE_CHARACTERS * width))
    below = textwrap.wrap(" ".join(filter(None, sentences)), int(_CAPTION_CHARACTERS * width))
    figure.suptitle("\n".join(above), fontsize=TITLE, x=0.01, ha="left")
    figure.supxlabel("\n".join(below), fontsize=SMALL, color=GREY, x=0.01, ha="left")
    figure.set_figheight(height + _LINE_SPACING * (TITLE * len(above) + SMALL * len(below)) / 72)
