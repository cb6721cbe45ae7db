"""What an experiment is: rows × columns of settings, seeds, and what others published for them; read from TOML."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from fedrema.errors import BadInput
from fedrema.settings import Settings, as_arguments, parse_settings, read_toml

FIELDS = {"title", "about", "seeds", "quantity", "settings", "rows", "columns", "published"}
QUANTITIES = ("best_accuracy", "honest_accuracy", "final_accuracy", "worst_tenth")


@dataclass(frozen=True)
class Line:
    """A row or a column: how it is called, and what it sets."""

    name: str
    title: str
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Published:
    """What somebody else reports, in percent."""

    mean: float
    deviation: float | None = None


@dataclass(frozen=True)
class Cell:
    """One combination of settings, run with several seeds."""

    row: Line
    column: Line
    method: str
    arguments: tuple[str, ...]
    published: Published | None = None

    @property
    def title(self) -> str:
        """How it is called where it stands alone."""
        return f"{self.row.title}, {self.column.title}" if self.column.title else self.row.title

    @cached_property
    def parsed(self) -> Settings:
        """The settings of all its runs but for their seed."""
        return parse_settings(self.method, self.arguments, "fedrema grid")

    def settings(self, seed: int) -> Settings:
        """Return the settings of one run."""
        return self.parsed.seeded(seed)


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

    def cell(self, row: str, column: str) -> Cell:
        """Return a cell by the names of its row and column."""
        return next(cell for cell in self.cells if (cell.row.name, cell.column.name) == (row, column))


def read_experiment(file: Path, changes: tuple[str, ...] = ()) -> Experiment:
    """Read a file and check every cell of it, so that nothing is refused after hours.

    Parameters
    ----------
    file
        TOML; docs/grids.md says what may stand in it.
    changes
        Arguments that override what the file says, in every cell.
    """
    content = read_toml(file, "The grid file")
    where = f"The grid file {file}"
    if unknown := sorted(content.keys() - FIELDS):
        raise BadInput(f"{where} has the unknown field {unknown[0]!r}; valid are {', '.join(sorted(FIELDS))}.")
    rows, columns = (_lines(content, part, where) for part in ("rows", "columns"))
    if not rows:
        raise BadInput(f"{where} has no rows: at least one [rows.NAME] must stand in it.")
    seeds, quantity = content.get("seeds", 1), content.get("quantity", "best_accuracy")
    if not isinstance(seeds, int) or isinstance(seeds, bool) or seeds < 1:
        raise BadInput(f"{where}: seeds must be a whole number of at least 1, got {seeds!r}.")
    if quantity not in QUANTITIES:
        raise BadInput(f"{where}: quantity {quantity!r} is unknown; valid are {', '.join(QUANTITIES)}.")
    published = _published(content.get("published", {}), rows, columns, where)
    common = _table(content.get("settings", {}), "settings", where)
    columns = columns or (Line("", "", {}),)
    cells = tuple(
        _cell(row, column, common, published.get((row.name, column.name)), changes, where)
        for row, column in itertools.product(rows, columns)
    )
    title, about = str(content.get("title", file.stem)), str(content.get("about", ""))
    return Experiment(file.stem, title, about, seeds, quantity, rows, columns, cells)


def _table(value: Any, name: str, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadInput(f"{where}: [{name}] must hold settings, got {value!r}.")
    return value


def _lines(content: Mapping[str, Any], part: str, where: str) -> tuple[Line, ...]:
    return tuple(_line(name, part, value, where) for name, value in _table(content.get(part, {}), part, where).items())


def _line(name: str, part: str, value: Any, where: str) -> Line:
    settings = dict(_table(value, f"{part}.{name}", where))
    return Line(name, str(settings.pop("title", name)), settings)


def _published(
    value: Any, rows: tuple[Line, ...], columns: tuple[Line, ...], where: str
) -> dict[tuple[str, str], Published]:
    """Read `[published.COLUMN]` with `ROW = [mean, deviation]` or `ROW = mean`; `[published]` where there are none."""
    table = _table(value, "published", where)
    by_column = {"": table}
    if columns:
        by_column = {name: _table(cells, f"published.{name}", where) for name, cells in table.items()}
    found: dict[tuple[str, str], Published] = {}
    for column, row, cell in _entries(by_column):
        if column not in {line.name for line in columns} | ({""} if not columns else set()):
            raise BadInput(f"{where}: [published.{column}] is no column; columns are {_names(columns)}.")
        if row not in {line.name for line in rows}:
            raise BadInput(f"{where}: {row!r} in [published] is no row; rows are {_names(rows)}.")
        numbers = cell if isinstance(cell, list) else [cell]
        if not 1 <= len(numbers) <= 2 or not all(isinstance(number, int | float) for number in numbers):
            raise BadInput(f"{where}: published {row!r} must be a number or [mean, deviation], got {cell!r}.")
        found[row, column] = Published(*(float(number) for number in numbers))
    return found


def _entries(by_column: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, Any]]:
    for column, cells in by_column.items():
        for row, cell in cells.items():
            yield column, row, cell


def _names(lines: tuple[Line, ...]) -> str:
    return ", ".join(line.name for line in lines) or "none"


def _cell(
    row: Line,
    column: Line,
    common: Mapping[str, Any],
    published: Published | None,
    changes: tuple[str, ...],
    where: str,
) -> Cell:
    merged = {**common, **column.settings, **row.settings}
    method = str(merged.pop("method", row.name))
    try:
        cell = Cell(row, column, method, (*as_arguments(merged), *changes), published)
        _ = cell.parsed  # refused now, not after hours
    except BadInput as error:
        raise BadInput(f"{where}, cell {row.name} × {column.name or 'all'}: {error}") from error
    return cell
