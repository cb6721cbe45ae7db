"""Tables: the raw columns of the samples of all clients, before preprocessing."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrema.data.checks import are_integers
from fedrema.data.partitions import draw_test_mask
from fedrema.errors import BadInput

_FIRST = 65_536
"""Number of values for which a column reserves memory at first."""
_ROUNDING = 1e-4
"""Largest rounding error of float32, as a fraction of the range of the values, with which numbers are stored so."""


@dataclass(frozen=True, eq=False)
class NumberColumn:
    """A column of numbers."""

    values: NDArray[Any]
    """[N] float32 or float64; NaN where the value is missing."""
    unit: str = ""
    """What the numbers are, if the source held something else, such as dates."""

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True, eq=False)
class CategoryColumn:
    """A column of categories."""

    codes: NDArray[np.int32]
    """[N] position in `categories`; -1 where the value is missing."""
    categories: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.codes)


@dataclass(frozen=True, eq=False)
class ImageColumn:
    """A column of images of one size."""

    pixels: NDArray[np.uint8]
    """[N, channels, height, width]."""

    def __len__(self) -> int:
        return len(self.pixels)


Column = NumberColumn | CategoryColumn | ImageColumn


def _plain_row(row: int) -> str:
    return f"data row {row + 1}"


@dataclass(frozen=True, eq=False)
class Table:
    """The raw columns of N samples of all clients."""

    inputs: dict[str, Column]
    """The columns from which the network predicts, in the order of the source."""
    targets: dict[str, NumberColumn | CategoryColumn]
    """The columns to predict: one, or several for a multilabel task; empty for samples to predict."""
    client: NDArray[np.int64]
    """[N] position in `names` of the client that holds the sample."""
    names: tuple[str, ...]
    """Names of the clients, sorted: as numbers if all are whole numbers, otherwise as text."""
    test: NDArray[np.bool_] | None = None
    """[N] whether the sample is a test sample; None if the source does not say so."""
    locate: Callable[[int], str] = field(default=_plain_row)
    """Returns where a sample is in the source, for messages: "data row 7 of north.csv"."""

    def __len__(self) -> int:
        return len(self.client)

    def rows_by_client(self) -> list[NDArray[np.int64]]:
        """Return for each client the rows of its samples, in ascending order."""
        order = np.argsort(self.client, kind="stable")
        ends = np.cumsum(np.bincount(self.client, minlength=len(self.names)))
        return np.split(order, ends[:-1])

    def test_mask(
        self, data_seed: int, test_share: float, classes: NDArray[np.int64] | None = None
    ) -> NDArray[np.bool_]:
        """Return which samples are test samples: as in the source, or drawn for each client.

        With the class of each sample, the draw is stratified by class.
        """
        if self.test is not None:
            return self.test
        test = np.zeros(len(self), np.bool_)
        for name, rows in zip(self.names, self.rows_by_client(), strict=True):
            own = None if classes is None else classes[rows]
            test[rows] = draw_test_mask(len(rows), test_share, data_seed, name, own)
        return test

    def where(self, row: int) -> str:
        """Return where a sample is in the source, and its client."""
        return f"{self.locate(row)} (client {self.names[self.client[row]]!r})"


class Buffer:
    """A one-dimensional array that grows; appended blocks of a wider type convert it.

    Many small arrays that are joined at the end would need twice the memory, because the allocator keeps what they
    occupied. Memory that was reserved but never written to is not occupied.
    """

    def __init__(self) -> None:
        self._array: NDArray[Any] = np.empty(0, np.int8)
        self._length = 0

    def append(self, block: NDArray[Any]) -> None:
        """Append a block."""
        end = self._length + len(block)
        kind = block.dtype if not self._length else np.promote_types(self._array.dtype, block.dtype)
        if end > len(self._array) or kind != self._array.dtype:
            grown = np.empty(max(end, _FIRST, 2 * self._length if end > len(self._array) else len(self._array)), kind)
            grown[: self._length] = self._array[: self._length]
            self._array = grown
        self._array[self._length : end] = block
        self._length = end

    def array(self) -> NDArray[Any]:
        """Return what was appended."""
        return self._array[: self._length]


def compact(values: NDArray[np.float64]) -> NDArray[Any]:
    """Return numbers as float32 if rounding them does not matter compared with their range."""
    present = values[~np.isnan(values)]
    if not present.size:
        return values.astype(np.float32)
    low, high = float(present.min()), float(present.max())
    largest, spread = max(-low, high), high - low
    if largest > float(np.finfo(np.float32).max):
        return values
    harmless = largest * 2.0**-24 <= _ROUNDING * spread if spread else float(np.float32(low)) == low
    return values.astype(np.float32) if harmless else values


def sorted_categories(names: Sequence[str]) -> list[str]:
    """Sort names: as numbers if all of them are whole numbers, otherwise as text."""
    return sorted(names, key=int) if are_integers(names) else sorted(names)


def client_rows(column: CategoryColumn, name: str, locate: Callable[[int], str]) -> tuple[NDArray[np.int64], list[str]]:
    """Return the clients' rows and sorted names from the column that holds them."""
    missing = column.codes < 0
    if missing.any():
        row = int(np.argmax(missing))
        raise BadInput(f"column {name!r} is empty in {locate(row)}; every sample needs a client.")
    names = sorted_categories(column.categories)
    place = {each: number for number, each in enumerate(names)}
    return np.array([place[each] for each in column.categories], np.int64)[column.codes], names
