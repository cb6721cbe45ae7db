"""Read CSV files in blocks, with Python's `csv` module."""

import csv
import gzip
import io
import itertools
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from fedrema.base.files import regular_file
from fedrema.data.checks import list_names
from fedrema.data.readers.source import Block
from fedrema.errors import BadInput

DELIMITERS = (",", ";", "\t", "|")
MOST_COLUMNS = 20_000
MAXIMUM_RATIO, UNCHECKED_SIZE = 200, 100 * 10**6
"""As of .npz files: the largest compression ratio, and the decompressed bytes up to which it is not checked."""
_ROWS = 10_000
"""Rows per block: 50 columns of text then need about 40 MB."""


class CsvFile:
    """One CSV file, optionally gzipped, with a header; a first column without a name is ignored."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _opened(path) as stream:
            if path.suffix == ".gz":
                _check_ratio(path)
            self.delimiter = find_delimiter(next(filter(str.strip, stream), ""))
            stream.seek(0)
            header = next((row for row in self._reader(stream) if row), None)
        if header is None:
            raise BadInput(f"{path} is empty; the first line must name the columns.")
        if len(header) > MOST_COLUMNS:
            raise BadInput(
                f"{path} has {len(header)} columns; at most {MOST_COLUMNS} are valid: save wide data as .npz."
            )
        self._fields = [name.strip() for name in header]
        # pandas and R write row numbers as a first column without a name.
        self.names = self._fields[1:] if len(header) > 1 and not self._fields[0] else self._fields
        if "" in self.names:
            place = len(self._fields) - len(self.names) + self.names.index("") + 1
            raise BadInput(f"{path}: column {place} of the header has no name; name every column.")
        if repeated := [name for place, name in enumerate(self.names) if name in self.names[:place]]:
            raise BadInput(f"{path} has two columns named {repeated[0]!r}; the names of columns must be unique.")

    def blocks(self, columns: Sequence[str]) -> Iterator[Block]:
        """Return the rows in blocks of texts."""
        places = [(name, self._fields.index(name)) for name in columns]
        done = 0
        with _opened(self.path) as stream:
            rows = self._rows(stream)
            while block := list(itertools.islice(rows, _ROWS)):
                if set(map(len, block)) != {len(self._fields)}:
                    self._refuse_ragged(done, block)
                texts = list(zip(*block, strict=True))
                yield {name: texts[place] for name, place in places}
                done += len(block)

    def _reader(self, stream: TextIO) -> "Iterator[list[str]]":
        return csv.reader(stream, delimiter=self.delimiter, strict=True)

    def _rows(self, stream: TextIO) -> Iterator[list[str]]:
        """Return the rows after the header, without blank lines."""
        return itertools.islice(filter(None, self._reader(stream)), 1, None)

    def _refuse_ragged(self, done: int, block: Sequence[Sequence[str]]) -> None:
        """Raise for the first row of a block that has too few or too many fields."""
        number, row = next((n, row) for n, row in enumerate(block) if len(row) != len(self._fields))
        with _opened(self.path) as stream:
            reader = csv.reader(stream, delimiter=self.delimiter, strict=True)
            for _ in itertools.islice(filter(None, reader), done + number + 2):
                pass
            line = reader.line_num
        raise BadInput(
            f"{self.path}, line {line} has {len(row)} fields, but the header names {len(self._fields)} columns "
            f"({list_names(self.names)})."
        )


def _check_ratio(path: Path) -> None:
    """Refuse a gzipped file that grows like one that was made to exhaust a machine, before its rows are parsed."""
    most, size = max(UNCHECKED_SIZE, MAXIMUM_RATIO * path.stat().st_size), 0
    with gzip.open(path) as stream:
        while piece := stream.read(1 << 20):
            size += len(piece)
            if size > most:
                raise BadInput(f"{path} grows by more than a factor of {MAXIMUM_RATIO}: save it uncompressed.")


def find_delimiter(header: str) -> str:
    """Return the delimiter that occurs most often in the header, outside quotes."""
    outside = "".join(header.split('"')[::2])
    return max(DELIMITERS, key=outside.count)


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """Open a CSV file; report what can go wrong while it is read."""
    try:
        with regular_file(path).open("rb") as raw:
            binary = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
            with io.TextIOWrapper(io.BufferedReader(binary, 1 << 20), "utf-8-sig", newline="") as stream:
                yield stream
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text (byte {error.object[error.start]:#x}); save it as UTF-8.") from error
    except csv.Error as error:
        raise BadInput(f"{path} is not a valid CSV file: {error}.") from error
    except (EOFError, zlib.error) as error:
        raise BadInput(f"{path} is truncated or damaged: {error}.") from error
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}.") from error
