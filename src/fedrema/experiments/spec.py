"""What an experiment is: rows × columns of settings, seeds, published numbers, claims and figures."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from fedrema.config.settings import Settings, make_settings

Vary = Literal["training", "both"]
ClaimKind = Literal["first", "above", "no-worse", "collapse", "faster", "lighter", "falls"]
MatchingCurve = Literal["precision", "recall"]
FigureKind = Literal["curves", "samples", "similarity", "matching", "period", "peers", "clients", "ranks", "components"]

REPLICATES: dict[Vary, str] = {"training": "seeds", "both": "replicates"}
"""What the runs of a cell are called, by what distinguishes them."""

Value = bool | int | float | str
"""A setting's value in a grid file."""
Values = Mapping[str, Value]
"""Settings by their names on the command line."""


@dataclass(frozen=True)
class Line:
    """A row or a column: its title, and what it sets."""

    name: str
    title: str
    settings: Values
    base: str = ""
    """In a sweep: the row that this is a variant of."""
    swept: Values = field(default_factory=dict)
    """In a sweep: the settings that distinguish it from other variants of that row."""


@dataclass(frozen=True)
class Published:
    """What others report, in the unit of the table: accuracies in percent."""

    mean: float
    deviation: float | None = None


@dataclass(frozen=True)
class Claim:
    """A statement about the results that the results can confirm or refute."""

    says: str
    kind: ClaimKind
    rows: tuple[str, ...]
    """The rows that it is about."""
    over: tuple[str, ...]
    """The rows that they are compared with (first, above, no-worse, faster, lighter)."""
    columns: tuple[str, ...]
    """The columns in which it is to hold; the name is "" in an experiment without columns."""
    share: float
    """collapse: the share of the best value that is lost by the end; faster, lighter: the highest ratio of the seconds
    or of the bytes sent; no-worse: the largest difference that is accepted."""
    curve: MatchingCurve
    """falls: precision or recall."""


@dataclass(frozen=True)
class FigureSpec:
    """A figure that is drawn from the results."""

    kind: FigureKind
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    title: str


@dataclass(frozen=True)
class Cell:
    """One combination of settings, run several times: with other training seeds, or also on other partitions."""

    row: Line
    column: Line
    method: str
    values: Values
    """All settings that the file gives it; a row's override its column's, and these the common ones."""
    published: Published | None = None
    vary: Vary = "training"

    @property
    def title(self) -> str:
        """Its title outside the table."""
        return f"{self.row.title}, {self.column.title}" if self.column.title else self.row.title

    @cached_property
    def parsed(self) -> Settings:
        """The settings of all its runs except for their seed."""
        return make_settings(self.method, self.values)

    def settings(self, seed: int) -> Settings:
        """Return the settings of one run; with `vary = "both"`, replicate i has partition i and training seed i."""
        settings = self.parsed.seeded(seed)
        if self.vary == "both":
            settings = replace(settings, data=replace(settings.data, data_seed=settings.data.data_seed + seed))
        return settings


@dataclass(frozen=True)
class Experiment:
    """A table whose cells are rows × columns."""

    name: str
    title: str
    about: str
    seeds: int
    quantity: str
    """What published numbers are compared with: honest, best, final or worst_tenth of the task's primary metric, or of
    another metric with its name, such as best_accuracy. The best is what papers report."""
    rows: tuple[Line, ...]
    columns: tuple[Line, ...]
    cells: tuple[Cell, ...] = field(repr=False)
    claims: tuple[Claim, ...] = ()
    figures: tuple[FigureSpec, ...] = ()
    also: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Other published numbers by quantity and row, in an experiment without columns: final_accuracy, seconds, …"""

    @property
    def replicates(self) -> str:
        """What the runs of a cell are called: seeds, or replicates if they vary the partition too."""
        return REPLICATES[self.cells[0].vary]

    def cell(self, row: str, column: str) -> Cell:
        """Return a cell by the names of its row and column."""
        return next(cell for cell in self.cells if (cell.row.name, cell.column.name) == (row, column))

    def retitled(self, title: str, about: str = "") -> "Experiment":
        """Return the experiment run with other settings, without the published numbers, which do not apply then."""
        cells = tuple(replace(cell, published=None) for cell in self.cells)
        return replace(self, title=title, about=about or self.about, cells=cells, also={})

    def title_of(self, name: str) -> str:
        """Return the title of a row or a column."""
        return next(line.title for line in (*self.rows, *self.columns) if line.name == name)
