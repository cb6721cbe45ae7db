"""Reads an experiment from a grid file (TOML) and validates all of it before any run starts."""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from fedrema.config.settings import read_toml
from fedrema.errors import BadInput, describe
from fedrema.experiments.spec import (
    Cell,
    Claim,
    ClaimKind,
    Experiment,
    FigureKind,
    FigureSpec,
    Line,
    MatchingCurve,
    Published,
    Values,
    Vary,
)
from fedrema.experiments.sweep import expanded
from fedrema.methods import find_method, registry
from fedrema.reporting.quantities import find_quantity
from fedrema.tasks import METRICS

T = TypeVar("T")
SHARES: dict[ClaimKind, float] = {"no-worse": 0.02, "collapse": 0.2, "faster": 1.0, "lighter": 1.0}
"""Default of a claim's `share`."""
Tables = dict[str, Any]
"""Tables that are validated entry by entry, so that a message can name the entry."""
NUMBERS = {"seeds": "a whole number of at least 1", "share": "a number from 0 to 1"}
"""What is valid for a number, in messages."""


class ClaimTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of `[[claims]]`."""

    kind: ClaimKind
    says: str = ""
    rows: list[str] | None = None
    over: list[str] | None = None
    columns: list[str] | None = None
    share: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    curve: MatchingCurve = "precision"


class FigureTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One of `[[figures]]`."""

    kind: FigureKind
    rows: list[str] | None = None
    columns: list[str] | None = None
    title: str = ""


class GridFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a grid file; docs/grids.md explains it."""

    format: Literal[1] = 1
    title: str = ""
    about: str = ""
    seeds: Annotated[int, msgspec.Meta(ge=1)] = 1
    methods: Literal["listed", "all"] = "listed"
    quantity: str = "best"
    vary: Vary = "training"
    settings: Tables = {}
    rows: Tables = {}
    columns: Tables = {}
    published: Tables = {}
    also: Tables = {}
    claims: list[Tables] = []
    figures: list[Tables] = []
    sweep: Tables = {}


def read_experiment(file: Path, changes: Values | None = None, more_methods: Sequence[str] = ()) -> Experiment:
    """Read a grid file and validate every cell of it, so that no mistake is found after hours of training.

    Parameters
    ----------
    file
        TOML; docs/grids.md describes its content.
    changes
        Settings that override those of the file in every cell.
    more_methods
        Methods that get a row in addition to those of the file, each by its name or as module:Class.
    """
    where = f"The grid file {file}"
    content = _converted(read_toml(file, "The grid file"), GridFile, where)
    find_quantity(content.quantity, "accuracy", f"{where}: quantity")
    methods = [*(registry() if content.methods == "all" else ()), *more_methods]
    given = {**{name: {"title": find_method(name).title} for name in methods}, **content.rows}
    rows = tuple(_line(name, "rows", value, where) for name, value in given.items())
    columns = tuple(_line(name, "columns", value, where) for name, value in content.columns.items())
    if not rows:
        raise BadInput(f'{where} has no rows: add at least one [rows.NAME], or methods = "all".')
    rows = expanded(rows, content.sweep, where)
    published = _published(content.published, rows, columns, where)
    columns = columns or (Line("", "", {}),)
    cells = tuple(
        _cell(
            row, column, {**content.settings, **column.settings, **row.settings, **(changes or {})}, content.vary, where
        )
        for row, column in itertools.product(rows, columns)
    )
    cells = tuple(
        dataclasses.replace(cell, published=published.get((cell.row.name, cell.column.name))) for cell in cells
    )
    claims = [_converted(claim, ClaimTable, f"{where}: [[claims]]") for claim in content.claims]
    figures = [_converted(figure, FigureTable, f"{where}: [[figures]]") for figure in content.figures]
    return Experiment(
        file.stem,
        content.title or file.stem,
        content.about,
        content.seeds,
        content.quantity,
        rows,
        columns,
        cells,
        tuple(_claim(claim, rows, columns, where) for claim in claims),
        tuple(_figure(figure, rows, columns, where) for figure in figures),
        _also(content.also, cells, rows, columns, where),
    )


def _line(name: str, part: str, value: Any, where: str) -> Line:
    if not isinstance(value, dict):
        raise BadInput(f"{where}: [{part}.{name}] must be a table of settings, got {describe(value)}.")
    title = value.get("title", name)
    if not isinstance(title, str):
        raise BadInput(f"{where}: title in [{part}.{name}] must be a text, got {describe(title)}.")
    return Line(name, title, {setting: given for setting, given in value.items() if setting != "title"})


def _cell(row: Line, column: Line, values: Values, vary: Vary, where: str) -> Cell:
    method = str(values.get("method", row.name))
    cell = Cell(row, column, method, {name: value for name, value in values.items() if name != "method"}, vary=vary)
    try:
        _ = cell.parsed
    except BadInput as error:
        reason = str(error).removeprefix("settings: ")
        raise BadInput(f"{where}, cell {row.name} × {column.name or 'all'}: {reason}") from error
    return cell


def _published(
    tables: Tables, rows: Sequence[Line], columns: Sequence[Line], where: str
) -> dict[tuple[str, str], Published]:
    """Read `[published.COLUMN]`, or `[published]` without columns, with `ROW = [mean, deviation]` or `ROW = mean`."""
    found: dict[tuple[str, str], Published] = {}
    for column, entries in (tables if columns else {"": tables}).items():
        if columns and column not in _names(columns):
            raise BadInput(f"{where}: [published.{column}] is not a column; columns are {', '.join(_names(columns))}.")
        if not isinstance(entries, dict):
            raise BadInput(f"{where}: [published.{column}] must be a table of numbers by row, got {describe(entries)}.")
        for row, entry in entries.items():
            _check_row(row, rows, "published", where)
            try:
                numbers = msgspec.convert(entry if isinstance(entry, list) else [entry], list[float])
            except msgspec.ValidationError:
                numbers = []
            if len(numbers) not in (1, 2):
                raise BadInput(
                    f"{where}: published {row!r} must be a number or [mean, deviation], got {describe(entry)}."
                )
            found[row, column] = Published(*numbers)
    return found


def _also(
    tables: Tables, cells: Sequence[Cell], rows: Sequence[Line], columns: Sequence[Line], where: str
) -> dict[str, dict[str, float]]:
    """Read `[also.QUANTITY]` with `ROW = number`: other published numbers, in an experiment without columns."""
    if tables and columns[0].name:
        raise BadInput(f"{where}: [also] is only valid in an experiment without columns.")
    periods = {period.name for cell in cells if (period := cell.parsed.method.reports.period)}
    valid = ["final_METRIC", *(f"{name}_rounds" for name in sorted(periods)), "seconds"]
    for quantity, entries in tables.items():
        if quantity not in valid and quantity.removeprefix("final_") not in METRICS:
            raise BadInput(f"{where}: [also.{quantity}] is unknown; valid are {', '.join(valid)}.")
        if not isinstance(entries, dict):
            raise BadInput(f"{where}: [also.{quantity}] must be a table of numbers by row, got {describe(entries)}.")
        for row, number in entries.items():
            _check_row(row, rows, f"also.{quantity}", where)
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise BadInput(f"{where}: {row!r} in [also.{quantity}] must be a number, got {describe(number)}.")
    return tables


def _claim(given: ClaimTable, rows: Sequence[Line], columns: Sequence[Line], where: str) -> Claim:
    if not given.says or not given.rows:
        raise BadInput(f"{where}: each of [[claims]] needs says = '…' and rows = […].")
    chosen = _chosen(given.rows, "rows", rows, where)
    others = tuple(name for name in _names(rows) if name not in chosen)
    return Claim(
        given.says,
        given.kind,
        chosen,
        others if given.over is None else _chosen(given.over, "over", rows, where),
        _chosen(given.columns, "columns", columns, where),
        SHARES.get(given.kind, 0.0) if given.share is None else given.share,
        given.curve,
    )


def _figure(given: FigureTable, rows: Sequence[Line], columns: Sequence[Line], where: str) -> FigureSpec:
    shown = _chosen(given.rows, "rows", rows, where), _chosen(given.columns, "columns", columns, where)
    return FigureSpec(given.kind, *shown, given.title)


def _chosen(wanted: Sequence[str] | None, part: str, lines: Sequence[Line], where: str) -> tuple[str, ...]:
    """Return names of rows or columns; all of them by default."""
    valid = _names(lines)
    for name in wanted or ():
        if name not in valid:
            raise BadInput(f"{where}: {part} names {name!r}; valid are {', '.join(valid)}.")
    return tuple(valid if wanted is None else wanted)


def _names(lines: Sequence[Line]) -> list[str]:
    return [line.name for line in lines]


def _check_row(name: str, rows: Sequence[Line], table: str, where: str) -> None:
    if name not in _names(rows):
        raise BadInput(f"{where}: {name!r} in [{table}] is not a row; rows are {', '.join(_names(rows))}.")


def _converted(content: Tables, kind: type[T], where: str) -> T:
    """Return a table as a struct; a field that is unknown, missing or invalid becomes one sentence."""
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        raise BadInput(f"{where}{_problem(error, content, kind)}") from None


def _problem(error: msgspec.ValidationError, content: Tables, kind: type[Any]) -> str:
    fields = get_type_hints(kind)
    if unknown := sorted(content.keys() - fields.keys()):
        return f" has the unknown field {unknown[0]!r}; valid are {', '.join(sorted(fields))}."
    message, _, path = str(error).partition(" - at `$.")
    name = path.strip("`").partition("[")[0].partition(".")[0]
    if not name:  # a field is missing
        required = next(each for each in fields if f"`{each}`" in message)
        return f" needs {required}; valid are {', '.join(map(str, get_args(fields[required])))}."
    value = content[name]
    if choices := get_args(fields[name]) if get_origin(fields[name]) is Literal else ():
        return f": {name} {describe(value)} is unknown; valid are {', '.join(map(str, choices))}."
    return f": {name} must be {_expected(name, fields[name])}, got {describe(value)}."


def _expected(name: str, hint: Any) -> str:
    """Say what is valid for a field that is not a choice."""
    if name in NUMBERS:
        return NUMBERS[name]
    if hint == list[Tables]:
        return f"written as [[{name}]]"
    return "a text" if hint is str else "a table of settings" if hint == Tables else "a list of names"
