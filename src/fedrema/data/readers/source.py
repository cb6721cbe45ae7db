"""What a reader of tables provides, and how its blocks become a `Table`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedrema.data.checks import BadRow
from fedrema.data.roles import Roles
from fedrema.data.table import CategoryColumn, NumberColumn, Table, client_rows
from fedrema.data.text_columns import MAXIMUM_CATEGORIES, ColumnBuilder, Kind, KindChanged
from fedrema.errors import BadInput

Block = Mapping[str, Sequence[str] | NDArray[Any]]
"""Some rows of a table: for each column texts, or an array of numbers or of datetime64."""

_TEST = {"train": False, "test": True, "0": False, "1": True, "false": False, "true": True}


class TableSource(Protocol):
    """A table that can be read in blocks, more than once."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the columns."""

    @property
    def clients(self) -> Sequence[str] | None:
        """Names of the clients if the source has one part per client; None if a column names the client."""

    def blocks(self, columns: Sequence[str]) -> Iterator[tuple[int, Block]]:
        """Return the rows of these columns in blocks, each with the number of the part that it belongs to."""

    def locate(self, part: int, row: int) -> str:
        """Return where a row (counted from 0) of a part is, for messages."""


def read_table(
    source: TableSource, roles: Roles, kinds: Mapping[str, Kind] | None = None, limit: int | None = MAXIMUM_CATEGORIES
) -> Table:
    """Read all blocks of a source.

    `kinds` says what input columns must hold; by default it is inferred. A column that turns out to be text after
    blocks of numbers is read again from the start, because the original texts of the numbers are needed. `limit` is the
    largest number of categories of an input column.
    """
    found: dict[str, Kind] = {}
    while True:
        try:
            return _read_once(source, roles, kinds or {}, found, limit)
        except KindChanged as change:
            found[change.column] = change.kind


def _read_once(
    source: TableSource,
    roles: Roles,
    required: Mapping[str, Kind],
    inferred: Mapping[str, Kind],
    limit: int | None,
) -> Table:
    builders: dict[str, ColumnBuilder] = {}
    for name in roles.all:
        if name in (roles.client, roles.split):
            builders[name] = ColumnBuilder(name, Kind.TEXT, limit=None)
        elif name in roles.targets:
            builders[name] = ColumnBuilder(name, inferred.get(name), exact=True, limit=None)
        else:
            kind = inferred.get(name, required.get(name))
            builders[name] = ColumnBuilder(name, kind, required=name in required, limit=limit)
    sizes: list[tuple[int, int]] = []  # part and number of rows of each block
    locate = _locator(source, sizes)
    try:
        for part, block in source.blocks(roles.all):
            sizes.append((part, len(block[roles.all[0]])))
            for name, builder in builders.items():
                builder.add(block[name])
    except BadRow as error:
        raise error.at(locate(error.row)) from None
    if not sum(rows for _, rows in sizes):
        raise BadInput("the table has no rows; there must be at least one sample.")
    columns = {name: builder.finish() for name, builder in builders.items()}
    names = source.clients
    if roles.client is not None:
        column = columns.pop(roles.client)
        assert isinstance(column, CategoryColumn)
        client, names = client_rows(column, roles.client, locate)
    else:
        assert names is not None
        client = np.repeat([part for part, _ in sizes], [rows for _, rows in sizes]).astype(np.int64)
    test = None if roles.split is None else _test_mask(columns.pop(roles.split), roles.split, locate)
    return Table(
        {name: columns[name] for name in roles.inputs},
        {name: columns[name] for name in roles.targets},
        client,
        tuple(names),
        test,
        locate,
    )


def _locator(source: TableSource, sizes: Sequence[tuple[int, int]]) -> Callable[[int], str]:
    """Return a function that says where a row of the table is in the source."""

    def locate(row: int) -> str:
        before: dict[int, int] = {}  # rows of each part in earlier blocks
        for part, rows in sizes:
            if row < rows:
                return source.locate(part, before.get(part, 0) + row)
            row -= rows
            before[part] = before.get(part, 0) + rows
        raise IndexError(row)

    return locate


def _test_mask(column: NumberColumn | CategoryColumn, name: str, locate: Callable[[int], str]) -> NDArray[np.bool_]:
    """Return which samples the split column marks as test samples."""
    assert isinstance(column, CategoryColumn)
    values = [_TEST.get(category.lower().removesuffix(".0")) for category in column.categories]
    codes = column.codes
    for code, value in enumerate((*values, None)):
        if value is None and (wrong := codes == (code if code < len(values) else -1)).any():
            row = int(np.argmax(wrong))
            shown = repr(column.categories[code]) if code < len(values) else "no value"
            raise BadInput(
                f"column {name!r} has {shown} in {locate(row)}; valid are train and test, or 0 and 1 (1 = test)."
            )
    test: NDArray[np.bool_] = np.array([bool(value) for value in values], np.bool_)[codes]
    return test
