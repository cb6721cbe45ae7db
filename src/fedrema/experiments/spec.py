"""What an experiment is: rows × columns of settings, seeds, what others published, claimed and drew."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Literal

from fedrema.config.settings import Settings, parse_settings

Vary = Literal["training", "both"]
ClaimKind = Literal["first", "above", "collapse", "faster", "falls"]
PictureKind = Literal["curves", "samples", "similarity", "matching", "gap", "dependencies", "clients", "ranks"]


@dataclass(frozen=True)
class Line:
    """A row or a column: how it is called, and what it sets."""

    name: str
    title: str
    settings: Mapping[str, Any]
    base: str = ""
    """The row that it is a variant of, in a sweep."""
    swept: Mapping[str, Any] = field(default_factory=dict)
    """What it sets otherwise than other variants."""


@dataclass(frozen=True)
class Published:
    """What somebody else reports, in percent."""

    mean: float
    deviation: float | None = None


@dataclass(frozen=True)
class Claim:
    """Something that is said of the results, and can be judged by them."""

    says: str
    kind: ClaimKind
    rows: tuple[str, ...]
    """Of which rows it is said."""
    over: tuple[str, ...]
    """Which rows they are compared with (first, above, faster)."""
    columns: tuple[str, ...]
    """In which columns; the name is "" where the table has none."""
    share: float
    """collapse: which share of its best accuracy is lost by the end; faster: at most this share of the seconds."""
    curve: str
    """falls: precision or recall."""


@dataclass(frozen=True)
class Picture:
    """A figure that is drawn from the results."""

    kind: PictureKind
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    title: str


@dataclass(frozen=True)
class Cell:
    """One combination of settings, run with several seeds."""

    row: Line
    column: Line
    method: str
    arguments: tuple[str, ...]
    published: Published | None = None
    vary: Vary = "training"

    @property
    def title(self) -> str:
        """How it is called where it stands alone."""
        return f"{self.row.title}, {self.column.title}" if self.column.title else self.row.title

    @cached_property
    def parsed(self) -> Settings:
        """The settings of all its runs but for their seed."""
        # A file that the arguments name may have changed since they were last read.
        parse = _parsed.__wrapped__ if {"--config", "--tuned"} & set(self.arguments) else _parsed
        return parse(self.method, self.arguments)

    def settings(self, seed: int) -> Settings:
        """Return the settings of one run."""
        settings = self.parsed.seeded(seed)
        if self.vary == "both":
            settings = replace(settings, data=replace(settings.data, data_seed=settings.data.data_seed + seed))
        return settings


@cache
def _parsed(method: str, arguments: tuple[str, ...]) -> Settings:
    """Parse settings once, in however many tables they stand."""
    return parse_settings(method, arguments, "fedrema grid")


@dataclass(frozen=True)
class Experiment:
    """A table: its cells are rows × columns."""

    name: str
    title: str
    about: str
    seeds: int
    quantity: str
    """What published numbers are compared with; best_accuracy counts as papers do."""
    rows: tuple[Line, ...]
    columns: tuple[Line, ...]
    cells: tuple[Cell, ...] = field(repr=False)
    claims: tuple[Claim, ...] = ()
    figures: tuple[Picture, ...] = ()
    also: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """What else was published, by quantity and row, where there are no columns: final_accuracy, seconds, …"""

    def cell(self, row: str, column: str) -> Cell:
        """Return a cell by the names of its row and column."""
        return next(cell for cell in self.cells if (cell.row.name, cell.column.name) == (row, column))

    def titled_anew(self, title: str, about: str = "") -> "Experiment":
        """Return the same, run in another way: what was published is not about that, and is left out."""
        cells = tuple(replace(cell, published=None) for cell in self.cells)
        return replace(self, title=title, about=about or self.about, cells=cells, also={})

    def title_of(self, name: str) -> str:
        """Return how a row or a column is called."""
        return next(line.title for line in (*self.rows, *self.columns) if line.name == name)
