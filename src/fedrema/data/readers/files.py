"""Tables in files: one file with a column that names the client, or a folder with one file per client."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from fedrema.data.readers.csv_files import CsvFile
from fedrema.data.readers.source import Block
from fedrema.data.roles import CLIENT_NAMES
from fedrema.data.table import sorted_categories
from fedrema.errors import BadInput

TABLE_SUFFIXES = (".csv", ".csv.gz", ".parquet")


class TableFile(Protocol):
    """A table in one file."""

    names: list[str]

    def blocks(self, columns: Sequence[str]) -> Iterator[Block]:
        """Return the rows of these columns in blocks."""


class FileSource:
    """One file with the samples of all clients, or of the client `client` if no column names the clients."""

    def __init__(self, path: Path, client: str | None = None) -> None:
        self._path, self._file = path, open_file(path)
        self.names = self._file.names
        alone = client is not None and not set(CLIENT_NAMES) & set(self.names)
        self.clients: Sequence[str] | None = [client] if client is not None and alone else None

    def blocks(self, columns: Sequence[str]) -> Iterator[tuple[int, Block]]:
        """Return the rows in blocks."""
        return ((0, block) for block in self._file.blocks(columns))

    def locate(self, part: int, row: int) -> str:
        """Return the number of a row, counted from 1."""
        return f"data row {row + 1} of {self._path.name}"


class FolderSource:
    """A folder with one file per client, named after it."""

    def __init__(self, files: Sequence[Path]) -> None:
        by_name = {client_name(path): path for path in files}
        if len(by_name) < len(files):
            twice = next(path for path in files if by_name[client_name(path)] != path)
            raise BadInput(
                f"{twice.name} and {by_name[client_name(twice)].name} are files of one client; there must be one each."
            )
        self.clients: Sequence[str] | None = sorted_categories(list(by_name))
        self._paths = [by_name[name] for name in self.clients]
        self._files = [open_file(path) for path in self._paths]
        self.names = self._files[0].names
        for client, file in zip(self.clients, self._files, strict=True):
            check_same_columns(self.clients[0], self.names, client, file.names)

    def blocks(self, columns: Sequence[str]) -> Iterator[tuple[int, Block]]:
        """Return the rows of all files in blocks."""
        for part, file in enumerate(self._files):
            empty = True
            for block in file.blocks(columns):
                empty = False
                yield part, block
            if empty:
                raise BadInput(f"{self._paths[part]} has no rows; every client needs at least one sample.")

    def locate(self, part: int, row: int) -> str:
        """Return the file and the number of the row in it, counted from 1."""
        return f"data row {row + 1} of {self._paths[part].name}"


def check_same_columns(client: str, names: Sequence[str], other: str, other_names: Sequence[str]) -> None:
    """Raise `BadInput` unless two clients have the same columns."""
    if different := [name for name in (*names, *other_names) if (name in names) != (name in other_names)]:
        name = different[0]
        has, lacks = (client, other) if name in names else (other, client)
        raise BadInput(
            f"client {has!r} has a column {name!r} and client {lacks!r} has none; all clients need the same columns."
        )


def is_table(path: Path) -> bool:
    """Return whether a file is a table by its name."""
    return path.name.lower().endswith(TABLE_SUFFIXES) and not path.name.startswith(".")


def client_name(path: Path) -> str:
    """Return the name of the client that a file is named after."""
    suffix = next(suffix for suffix in TABLE_SUFFIXES if path.name.lower().endswith(suffix))
    return path.name[: -len(suffix)]


def open_file(path: Path) -> TableFile:
    """Open a table, by the suffix of its name."""
    if path.name.lower().endswith(".parquet"):
        from fedrema.data.readers.parquet_files import ParquetTable

        return ParquetTable(path)
    return CsvFile(path)
