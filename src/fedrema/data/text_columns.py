"""Infer what a column of text holds: numbers, dates or categories."""

import datetime
import logging
import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrema.data.checks import BadRow
from fedrema.data.table import Buffer, CategoryColumn, NumberColumn, compact
from fedrema.errors import BadInput

log = logging.getLogger("fedrema")

MISSING = frozenset({"", "NA", "N/A", "n/a", "NaN", "nan", "NAN", "null", "NULL", "Null", "None", "?"})
"""Texts that mean that a value is missing."""
DAYS = "days since 1970-01-01"
MAXIMUM_CATEGORIES = 1000
"""Largest number of categories of an input column."""

_DATE = re.compile(
    r"(?:(?P<year>\d{4})[-/](?P<month>\d{1,2})[-/](?P<day>\d{1,2})"
    r"|(?P<first>\d{1,2})(?P<mark>[./-])(?P<second>\d{1,2})(?P=mark)(?P<last>\d{4}))"
    r"(?:[T ](?P<hour>\d{1,2}):(?P<minute>\d{2})(?::(?P<seconds>\d{2}(?:\.\d+)?))? ?(?P<zone>Z|[+-]\d{2}:?\d{2})?)?"
)
_EPOCH = datetime.date(1970, 1, 1).toordinal()


class Kind(StrEnum):
    """What a column holds."""

    NUMBER = "numbers"
    DATE = "dates"
    DAY_FIRST = "dates (day/month/year)"
    MONTH_FIRST = "dates (month/day/year)"
    TEXT = "text"

    @property
    def is_date(self) -> bool:
        return self in (Kind.DATE, Kind.DAY_FIRST, Kind.MONTH_FIRST)


class KindChanged(Exception):
    """A later block of a column does not fit the kind of the earlier ones: the source must be read again."""

    def __init__(self, column: str, kind: Kind) -> None:
        self.column, self.kind = column, kind
        super().__init__(column, kind)


class ColumnBuilder:
    """Builds a column from blocks of text, numbers or times; numbers are converted at once to save memory.

    Parameters
    ----------
    name
        Name of the column.
    kind
        What it holds, if this is known; by default it is inferred.
    required
        Whether a block that does not fit `kind` is an error of the user.
    exact
        Whether to keep numbers as float64.
    limit
        Largest number of categories.
    """

    def __init__(
        self,
        name: str,
        kind: Kind | None = None,
        required: bool = False,
        exact: bool = False,
        limit: int | None = MAXIMUM_CATEGORIES,
    ) -> None:
        self.name, self.kind, self.required, self.exact, self.limit = name, kind, required, exact, limit
        self._given = kind is not None
        self._buffer = Buffer()
        self._codes: dict[str, int] = {}
        self._rows = 0
        self._comma = ""

    def add(self, values: Sequence[str] | NDArray[Any]) -> None:
        """Append a block: texts, or an array of numbers or of datetime64."""
        if self.kind is Kind.TEXT:
            self._add_categories(values)
        else:
            kind, numbers = self._numbers(values)
            if kind is not None:
                self._check_kind(kind, values)
            if kind is Kind.TEXT:
                self._buffer = Buffer()
                self._buffer.append(np.full(self._rows, -1, np.int32))  # all missing until now
                self._add_categories(values)
            else:
                assert numbers is not None
                infinite = np.isinf(numbers)
                if infinite.any():
                    row = self._rows + int(np.argmax(infinite))
                    raise BadRow(f"column {self.name!r} has an infinite value", row, "; values must be finite.")
                self._buffer.append(numbers if self.exact else compact(numbers))
        self._rows += len(values)

    def finish(self) -> NumberColumn | CategoryColumn:
        """Return the column, and log a warning if its values were interpreted."""
        values = self._buffer.array()
        if self.kind is Kind.TEXT:
            names = sorted(self._codes)
            place = np.empty(len(names) + 1, np.int32)
            place[[self._codes[name] for name in names]] = np.arange(len(names), dtype=np.int32)
            place[-1] = -1
            return CategoryColumn(place[values], tuple(names))
        if self._comma:
            number = self._comma.replace(",", ".")
            log.warning("Warning: column %r has a decimal comma: %s is read as %s.", self.name, self._comma, number)
        if self.kind is not None and self.kind.is_date:
            log.warning("Warning: column %r holds %s; they are used as %s.", self.name, self.kind.value, DAYS)
        return NumberColumn(values, DAYS if self.kind is not None and self.kind.is_date else "")

    def _numbers(self, values: Sequence[str] | NDArray[Any]) -> tuple[Kind | None, NDArray[np.float64] | None]:
        """Return the kind of a block and its values as numbers; None for a block without values, and for text."""
        if isinstance(values, np.ndarray):
            kind = Kind.DATE if values.dtype.kind == "M" else Kind.NUMBER
            numbers = days(values) if kind is Kind.DATE else values.astype(np.float64)
            return None if np.isnan(numbers).all() else kind, numbers
        parsed = parse_numbers(values)
        if parsed is not None:
            return None if np.isnan(parsed).all() else Kind.NUMBER, parsed
        trimmed = [value.strip() for value in values]
        with_comma = parse_decimal_comma(trimmed)
        if with_comma is not None:
            self._comma = self._comma or next(value for value in trimmed if "," in value)
            return Kind.NUMBER, with_comma
        return parse_dates(trimmed, self.kind) or (Kind.TEXT, None)

    def _check_kind(self, kind: Kind, values: Sequence[str] | NDArray[Any]) -> None:
        """Set the kind of the column to that of a block, or raise if earlier blocks have another one."""
        common = kind if self.kind is None else common_kind(self.kind, kind)
        if common is self.kind:
            return
        if self.required and common is Kind.TEXT:
            texts = [] if isinstance(values, np.ndarray) else values
            example = next((value for value in texts if parse_numbers([value]) is None), None)
            found = kind.value if example is None else repr(example)
            raise BadInput(f"column {self.name!r} has {found}; the federation's column holds {self.kind}.")
        if {self.kind, kind} == {Kind.DAY_FIRST, Kind.MONTH_FIRST}:
            # Day first is a guess until a block can only be read with the month first.
            guess = self.kind is Kind.DAY_FIRST and not self._given
            raise KindChanged(self.name, Kind.MONTH_FIRST if guess else Kind.TEXT)
        if self.kind is not None and common is Kind.TEXT:
            raise KindChanged(self.name, Kind.TEXT)
        self.kind = common

    def _add_categories(self, values: Sequence[str] | NDArray[Any]) -> None:
        texts = number_texts(values) if isinstance(values, np.ndarray) else values
        block: dict[str, int] = {}
        for value in set(texts):
            name = value.strip()
            block[value] = -1 if name in MISSING else self._codes.setdefault(name, len(self._codes))
        if self.limit is not None and len(self._codes) > self.limit:
            raise BadInput(
                f"column {self.name!r} has more than {self.limit:,} different texts; name the columns to use with "
                "--columns."
            )
        self._buffer.append(np.fromiter(map(block.__getitem__, texts), np.int32, len(texts)))


def common_kind(one: Kind, other: Kind) -> Kind:
    """Return the kind of a column that has blocks of two kinds."""
    if one is other:
        return one
    if one.is_date and other.is_date and Kind.DATE in (one, other):
        return other if one is Kind.DATE else one
    return Kind.TEXT


def parse_numbers(values: Sequence[str]) -> NDArray[np.float64] | None:
    """Return numbers, NaN for missing ones; None if a text is not a number."""
    # Attempts in the order of their cost: most columns have neither missing values nor spaces.
    for attempt in range(3):
        if attempt == 1:
            values = ["nan" if value in MISSING else value for value in values]
        if attempt == 2:
            values = ["nan" if value.strip() in MISSING else value for value in values]
        try:
            numbers = np.fromiter(map(float, values), np.float64, len(values))
        except ValueError:
            continue
        return None if "_" in "".join(values) else numbers  # Python reads 1_2 as 12
    return None


def parse_decimal_comma(values: Sequence[str]) -> NDArray[np.float64] | None:
    """Return numbers of which some have a decimal comma; None if a text is neither a number nor missing."""
    if any("," in value and (value.count(",") > 1 or "." in value) for value in values):
        return None
    return parse_numbers([value.replace(",", ".") for value in values])


def parse_dates(values: Sequence[str], expected: Kind | None) -> tuple[Kind, NDArray[np.float64]] | None:
    """Return the kind of dates and the days since 1970-01-01; None if a text is neither a date nor missing."""
    distinct = set(values) - MISSING
    found = {value: _DATE.fullmatch(value) for value in distinct}
    if not all(found.values()):
        return None
    matches = {value: match for value, match in found.items() if match is not None}
    marks = {match["mark"] for match in matches.values()}
    orders = [Kind.DATE] if marks <= {None, "."} else [Kind.DAY_FIRST, Kind.MONTH_FIRST]
    if expected is Kind.MONTH_FIRST:
        orders.reverse()
    for order in orders:
        try:
            day = {value: _day(match, order) for value, match in matches.items()}
        except ValueError:  # there is no such month or day
            continue
        numbers = np.fromiter((day.get(value, np.nan) for value in values), np.float64, len(values))
        return order, numbers
    return None


def _day(match: "re.Match[str]", order: Kind) -> float:
    if match["year"]:
        year, month, day = match["year"], match["month"], match["day"]
    else:
        year, day, month = match["last"], match["first"], match["second"]
        if order is Kind.MONTH_FIRST and match["mark"] != ".":
            day, month = month, day
    number = float(datetime.date(int(year), int(month), int(day)).toordinal() - _EPOCH)
    if match["hour"]:
        minutes = int(match["hour"]) * 60 + int(match["minute"])
        zone = match["zone"] or "Z"
        if zone != "Z":
            offset = int(zone[1:3]) * 60 + int(zone[-2:])
            minutes -= offset if zone[0] == "+" else -offset
        number += (minutes + float(match["seconds"] or 0) / 60) / 1440
    return number


def days(times: NDArray[Any]) -> NDArray[np.float64]:
    """Return datetime64 values as days since 1970-01-01; NaN where they are missing."""
    numbers = times.astype("datetime64[us]").astype(np.int64) / 86_400e6
    return np.where(np.isnat(times), np.nan, numbers)


def number_texts(values: NDArray[Any]) -> list[str]:
    """Return numbers or times as text: whole numbers without a decimal point; empty where they are missing."""
    if values.dtype.kind == "M":
        return ["" if np.isnat(value) else str(value) for value in values]
    return [
        "" if value != value else str(int(value)) if float(value).is_integer() else repr(float(value))
        for value in values.tolist()
    ]
