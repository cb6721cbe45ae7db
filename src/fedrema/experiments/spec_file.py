"""Experiments are read from TOML, and refused before any work where something in them cannot be."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from fedrema.config.settings import as_arguments, read_toml
from fedrema.errors import BadInput
from fedrema.experiments.spec import Cell, Claim, ClaimKind, Experiment, Line, Picture, PictureKind, Published, Vary
from fedrema.experiments.sweep import expanded

FIELDS = {
    *("title", "about", "seeds", "quantity", "vary", "settings", "rows", "columns"),
    *("published", "also", "claims", "figures", "sweep"),
}
ALSO = ("final_accuracy", "critical_rounds", "seconds")
QUANTITIES = ("best_accuracy", "honest_accuracy", "final_accuracy", "worst_tenth")
CLAIM_FIELDS = {"says", "kind", "rows", "over", "columns", "share", "curve"}
FIGURE_FIELDS = {"kind", "rows", "columns", "title"}
SHARES = {"collapse": 0.2, "faster": 1.0}
"""What a claim's `share` is where the file does not say."""
CURVES = ("precision", "recall")


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
    rows = expanded(rows, _table(content.get("sweep", {}), "sweep", where), where)
    seeds, quantity = content.get("seeds", 1), content.get("quantity", "best_accuracy")
    if not isinstance(seeds, int) or isinstance(seeds, bool) or seeds < 1:
        raise BadInput(f"{where}: seeds must be a whole number of at least 1, got {seeds!r}.")
    if quantity not in QUANTITIES:
        raise BadInput(f"{where}: quantity {quantity!r} is unknown; valid are {', '.join(QUANTITIES)}.")
    vary = content.get("vary", "training")
    if vary not in get_args(Vary):
        raise BadInput(f"{where}: vary {vary!r} is unknown; valid are {', '.join(get_args(Vary))}.")
    published = _published(content.get("published", {}), rows, columns, where)
    common = _table(content.get("settings", {}), "settings", where)
    columns = columns or (Line("", "", {}),)
    cells = tuple(
        _cell(row, column, common, published.get((row.name, column.name)), changes, where, vary)
        for row, column in itertools.product(rows, columns)
    )
    title, about = str(content.get("title", file.stem)), str(content.get("about", ""))
    claims = tuple(_claim(each, rows, columns, where) for each in _several(content, "claims", where))
    figures = tuple(_figure(each, rows, columns, where) for each in _several(content, "figures", where))
    also = _also(content.get("also", {}), rows, columns, where)
    return Experiment(file.stem, title, about, seeds, quantity, rows, columns, cells, claims, figures, also)


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


def _also(value: Any, rows: tuple[Line, ...], columns: tuple[Line, ...], where: str) -> dict[str, dict[str, float]]:
    """Read `[also.QUANTITY]` with `ROW = number`: more that was published, where there are no columns."""
    tables = {name: _table(found, f"also.{name}", where) for name, found in _table(value, "also", where).items()}
    if tables and columns[0].name:
        raise BadInput(f"{where}: [also] is for tables without columns.")
    for quantity, row, number in _entries(tables):
        if quantity not in ALSO:
            raise BadInput(f"{where}: [also.{quantity}] is unknown; valid are {', '.join(ALSO)}.")
        if row not in {line.name for line in rows}:
            raise BadInput(f"{where}: {row!r} in [also.{quantity}] is no row; rows are {_names(rows)}.")
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise BadInput(f"{where}: {row!r} in [also.{quantity}] must be a number, got {number!r}.")
    return tables


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
    vary: Vary,
) -> Cell:
    merged = {**common, **column.settings, **row.settings}
    method = str(merged.pop("method", row.name))
    try:
        cell = Cell(row, column, method, (*as_arguments(merged), *changes), published, vary)
        _ = cell.parsed  # refused now, not after hours
    except BadInput as error:
        raise BadInput(f"{where}, cell {row.name} × {column.name or 'all'}: {error}") from error
    return cell


def _several(content: Mapping[str, Any], part: str, where: str) -> list[dict[str, Any]]:
    found = content.get(part, [])
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise BadInput(f"{where}: {part} must be written as [[{part}]], got {found!r}.")
    return found


def _claim(given: dict[str, Any], rows: Sequence[Line], columns: Sequence[Line], where: str) -> Claim:
    kind = _kind(given, CLAIM_FIELDS, get_args(ClaimKind), "claims", where)
    chosen = _chosen(given, "rows", rows, where)
    if not given.get("says") or not given.get("rows"):
        raise BadInput(f"{where}: each of [[claims]] needs says = '…' and rows = […], got {given!r}.")
    others = tuple(line.name for line in rows if line.name not in chosen)
    over = _chosen(given, "over", rows, where) if "over" in given else others
    share, curve = given.get("share", SHARES.get(kind, 0.0)), given.get("curve", CURVES[0])
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise BadInput(f"{where}: share of a claim must lie in [0, 1], got {share!r}.")
    if curve not in CURVES:
        raise BadInput(f"{where}: curve {curve!r} of a claim is unknown; valid are {', '.join(CURVES)}.")
    return Claim(str(given["says"]), kind, chosen, over, _chosen(given, "columns", columns, where), float(share), curve)


def _figure(given: dict[str, Any], rows: Sequence[Line], columns: Sequence[Line], where: str) -> Picture:
    kind = _kind(given, FIGURE_FIELDS, get_args(PictureKind), "figures", where)
    title = str(given.get("title", ""))
    return Picture(kind, _chosen(given, "rows", rows, where), _chosen(given, "columns", columns, where), title)


def _kind(given: Mapping[str, Any], fields: set[str], kinds: Sequence[str], part: str, where: str) -> Any:
    if unknown := sorted(given.keys() - fields):
        raise BadInput(
            f"{where}: [[{part}]] has the unknown field {unknown[0]!r}; valid are {', '.join(sorted(fields))}."
        )
    if given.get("kind") not in kinds:
        raise BadInput(f"{where}: kind {given.get('kind')!r} in [[{part}]] is unknown; valid are {', '.join(kinds)}.")
    return given["kind"]


def _chosen(given: Mapping[str, Any], part: str, lines: Sequence[Line], where: str) -> tuple[str, ...]:
    """Return names of rows or columns; all of them where nothing is said."""
    names = [line.name for line in lines]
    wanted = given.get(part, names)
    for name in wanted if isinstance(wanted, list) else [wanted]:
        if not isinstance(wanted, list) or name not in names:
            raise BadInput(f"{where}: {part} = {wanted!r} names {name!r}; a list of {_names(tuple(lines))} is valid.")
    return tuple(wanted)
