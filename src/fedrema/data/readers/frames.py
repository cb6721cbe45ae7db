"""Read pandas and polars frames, and Hugging Face datasets, as tables."""

import datetime
import numbers
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrema.data.readers.files import check_same_columns
from fedrema.data.readers.hugging_face import hugging_face_block, is_hugging_face
from fedrema.data.readers.source import Block
from fedrema.data.roles import SPLIT_NAME
from fedrema.data.table import sorted_categories
from fedrema.errors import BadInput

_ROWS = 100_000
"""Rows per block."""


class FramesSource:
    """Frames: one with all clients, one per client, or one per split."""

    def __init__(
        self, frames: Sequence[Any], clients: Sequence[str] | None = None, splits: Sequence[str] | None = None
    ) -> None:
        self.frames, self.splits, self.clients = list(map(_native, frames)), splits, clients
        if clients is not None:
            by_name = dict(zip(clients, self.frames, strict=True))
            if len(by_name) < len(clients):
                raise BadInput("two clients have the same name; names must be unique.")
            self.clients = sorted_categories(clients)
            self.frames = [by_name[name] for name in self.clients]
        names = [_column_names(frame) for frame in self.frames]
        labels = self.clients or splits or [""]
        for label, others in zip(labels, names, strict=True):
            check_same_columns(labels[0], names[0], label, others)
        self.names = [*names[0], *([SPLIT_NAME] if splits else [])]

    def blocks(self, columns: Sequence[str]) -> Iterator[tuple[int, Block]]:
        """Return the rows of all frames in blocks."""
        held = [name for name in columns if self.splits is None or name != SPLIT_NAME]
        for part, frame in enumerate(self.frames):
            if self.clients is not None and not len(frame):
                raise BadInput(f"client {self.clients[part]!r} has no rows; every client needs at least one sample.")
            for start in range(0, len(frame), _ROWS):
                block = _block(frame, start, min(start + _ROWS, len(frame)), held)
                if self.splits is not None:
                    block = {**block, SPLIT_NAME: [self.splits[part]] * len(block[held[0]])}
                yield part, block

    def locate(self, part: int, row: int) -> str:
        """Return the number of a row, counted from 0 as frames do."""
        if self.clients is not None:
            return f"row {row} of the table of client {self.clients[part]!r}"
        return f"row {row} of {self.splits[part]}" if self.splits is not None else f"row {row}"


def is_frame(value: Any) -> bool:
    """Return whether a value is a frame of pandas or polars, or a dataset of Hugging Face."""
    return library_of(value) is not None or is_hugging_face(value)


def _native(value: Any) -> Any:
    """Return the frame that a frame of Narwhals holds; anything else as it is."""
    return value.to_native() if type(value).__module__.startswith("narwhals.") else value


def library_of(value: Any) -> str | None:
    """Return pandas or polars if a value is one of their frames, or Narwhals' view of one; imports none of them."""
    for kind in type(_native(value)).__mro__:
        library = kind.__module__.partition(".")[0]
        if library in ("pandas", "polars") and kind.__name__ == "DataFrame":
            return library
    return None


def _column_names(frame: Any) -> list[str]:
    names = [str(name) for name in (frame.column_names if is_hugging_face(frame) else frame.columns)]
    if repeated := [name for place, name in enumerate(names) if name in names[:place]]:
        raise BadInput(f"the table has two columns named {repeated[0]!r}; the names of columns must be unique.")
    return names


def _block(frame: Any, start: int, end: int, columns: Sequence[str]) -> Block:
    if is_hugging_face(frame):
        return hugging_face_block(frame, start, end, columns)
    places = {name: place for place, name in enumerate(_column_names(frame))}
    if library_of(frame) == "pandas":
        part = frame.iloc[start:end]
        return {name: pandas_values(part.iloc[:, places[name]], name) for name in columns}
    part = frame[start:end]
    return {name: polars_values(part[name], name) for name in columns}


def pandas_values(series: Any, name: str) -> Sequence[str] | NDArray[Any]:
    """Return a pandas column as numbers, datetime64 or texts."""
    kind = getattr(series.dtype, "kind", "O")
    if str(series.dtype) == "category":
        return texts(series.astype(object), name)
    if kind in "iuf":
        numeric: NDArray[Any] = series.to_numpy(dtype=np.float64, na_value=np.nan)
        return numeric
    if kind == "M":
        if getattr(series.dtype, "tz", None) is not None:
            series = series.dt.tz_convert("UTC").dt.tz_localize(None)
        times: NDArray[Any] = series.to_numpy(dtype="datetime64[us]")
        return times
    if kind == "m":
        lengths: NDArray[Any] = series.to_numpy(dtype="timedelta64[us]") / np.timedelta64(1, "D")
        return lengths
    return texts(series.astype(object), name)


def polars_values(series: Any, name: str) -> Sequence[str] | NDArray[Any]:
    """Return a polars column as numbers, datetime64 or texts."""
    import polars

    kind = series.dtype
    if kind.is_numeric():
        numeric: NDArray[Any] = series.cast(polars.Float64).to_numpy()
        return numeric
    if kind in (polars.Date, polars.Datetime):
        if getattr(kind, "time_zone", None):
            series = series.dt.convert_time_zone("UTC").dt.replace_time_zone(None)
        times: NDArray[Any] = series.cast(polars.Datetime("us")).to_numpy()
        return times
    if kind == polars.Duration:
        lengths: NDArray[Any] = series.cast(polars.Duration("us")).to_numpy() / np.timedelta64(1, "D")
        return lengths
    return texts(series.to_list(), name)


def texts(values: Any, name: str) -> list[str]:
    """Return Python objects as texts; empty where they are missing."""
    found = []
    for value in values:
        if value is None or type(value).__name__ in ("NAType", "NaTType") or value != value:
            found.append("")
        elif isinstance(value, str | bool | np.bool_ | numbers.Number | datetime.date):
            found.append(str(value))
        else:
            raise BadInput(
                f"column {name!r} holds {type(value).__name__}; valid are numbers, texts, true or false, and dates: "
                "name the columns to use with --columns."
            )
    return found
