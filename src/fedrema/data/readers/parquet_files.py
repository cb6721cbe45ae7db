"""Read Parquet files by row groups, with pyarrow."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrema.base.files import regular_file
from fedrema.data.readers.source import Block
from fedrema.errors import BadInput

_ROWS = 100_000
"""Rows per block."""


class ParquetTable:
    """One Parquet file."""

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise BadInput(
                f"{path} is a Parquet file, which needs pyarrow: install it with pip install 'fedrema[parquet]'."
            ) from error
        self.path, self._error = path, pyarrow.ArrowException
        try:
            with parquet.ParquetFile(regular_file(path)) as file:
                self.names: list[str] = list(file.schema_arrow.names)
        except (pyarrow.ArrowException, OSError) as error:
            raise BadInput(f"{path} is not a Parquet file or is damaged: {_first_line(error)}.") from error
        if repeated := [name for place, name in enumerate(self.names) if name in self.names[:place]]:
            raise BadInput(f"{path} has two columns named {repeated[0]!r}; the names of columns must be unique.")

    def blocks(self, columns: Sequence[str]) -> Iterator[Block]:
        """Return the rows in blocks of numbers, times and texts."""
        from pyarrow import parquet

        try:
            with parquet.ParquetFile(self.path) as file:
                for batch in file.iter_batches(_ROWS, columns=list(columns)):
                    if batch.num_rows:
                        yield {name: arrow_values(batch.column(name), name) for name in columns}
        except (self._error, OSError) as error:
            raise BadInput(f"{self.path} is damaged: {_first_line(error)}.") from error


def arrow_values(array: Any, name: str) -> Sequence[str] | NDArray[Any]:
    """Return an Arrow array as numbers (NaN for missing ones), datetime64 or texts (empty for missing ones)."""
    import pyarrow
    from pyarrow import types

    kind = array.type
    if types.is_dictionary(kind):
        return arrow_values(array.dictionary_decode(), name)
    if types.is_boolean(kind):
        return ["" if value is None else str(value) for value in array.to_pylist()]
    if types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind):
        numbers: NDArray[Any] = array.cast(pyarrow.float64(), safe=False).to_numpy(zero_copy_only=False)
        return numbers
    if types.is_date(kind) or types.is_timestamp(kind):
        times: NDArray[Any] = array.cast(pyarrow.timestamp("us"), safe=False).to_numpy(zero_copy_only=False)
        return times
    if types.is_null(kind):
        return np.full(len(array), np.nan)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return ["" if value is None else value for value in array.to_pylist()]
    raise BadInput(
        f"column {name!r} has the type {kind}; valid are numbers, texts, true or false, and dates: name the columns "
        "to use with --columns."
    )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".")
