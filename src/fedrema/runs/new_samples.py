"""Read samples to predict: raw rows of a table, images or arrays, preprocessed as in the run, with their clients."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrema.data.checks import check_samples, list_names
from fedrema.data.from_table import image_shape
from fedrema.data.natural import NATURAL
from fedrema.data.npz import read_npz
from fedrema.data.preprocessing import Preprocessing
from fedrema.data.readers.files import FileSource, FolderSource, is_table
from fedrema.data.readers.frames import FramesSource, is_frame
from fedrema.data.readers.image_files import SUFFIXES, load_images
from fedrema.data.readers.source import Block, TableSource, read_table
from fedrema.data.roles import CLIENT_NAMES, Roles
from fedrema.errors import BadInput
from fedrema.runs.manifest import Manifest


@dataclass(frozen=True, eq=False)
class NewSamples:
    """Samples to predict."""

    x: NDArray[Any]
    """[N, ...] inputs of the network."""
    clients: list[str]
    """The client whose model predicts each sample."""
    labels: list[str]
    """What each sample is in the data: its row, counted from 1, or its file."""


@dataclass(frozen=True, eq=False)
class NewData:
    """How samples to predict are read."""

    preprocessing: Preprocessing | None
    shape: tuple[int, ...]
    """Shape of a sample of the run."""
    client_column: str | None = None
    """Column of a table that names the client; None: the column client or site."""

    def read(self, data: Any, client: str | None = None) -> NewSamples:
        """Read a file, a folder, a frame or an array; `client` is the client of all samples."""
        if isinstance(data, str | Path):
            return self._from_path(Path(data).expanduser(), client)
        if is_frame(data):
            return self._from_table(FramesSource([data]), client, "the table")
        return self._from_arrays({"x": np.asarray(data)}, client, "the array")

    def _from_path(self, path: Path, client: str | None) -> NewSamples:
        if not path.exists():
            raise BadInput(f"{path} does not exist; name a table, a folder of images or a .npz file.")
        if path.is_file() and path.suffix == ".npz":
            arrays = read_npz(path, required=("x",), optional=("client", "y", "split", "meta"))
            return self._from_arrays(arrays, client, path)
        if path.is_file() and is_table(path):
            return self._from_table(FileSource(path), client, path)
        if path.is_file() and path.name.lower().endswith(SUFFIXES):
            return self._from_images([path], client, path)
        if path.is_dir():
            if tables := sorted(file for file in path.iterdir() if is_table(file)):
                return self._from_table(FolderSource(tables), client, path)
            files = sorted(file for file in path.rglob("*") if file.name.lower().endswith(SUFFIXES))
            return self._from_images(files, client, path)
        raise BadInput(f"{path} is not a table (.csv, .csv.gz, .parquet), a .npz file, an image or a folder of them.")

    def _from_table(self, source: TableSource, client: str | None, where: object) -> NewSamples:
        rules = self.preprocessing
        if rules is None or rules.images:
            kind = "images" if rules is not None else "arrays"
            raise BadInput(f"{where} is a table, but the run was trained on {kind}.")
        if missing := [name for name in rules.used if name not in source.names]:
            raise BadInput(
                f"{where} has no column {missing[0]!r}; the run needs {list_names(rules.used)}, and the table has "
                f"{list_names(list(source.names))}."
            )
        if client is not None:
            source = _OneClient(source, client)
        column = None if source.clients is not None else self._client_column(source.names, where)
        table = read_table(source, Roles((), column, None, rules.used), rules.kinds())
        clients = [table.names[row] for row in table.client.tolist()]
        return NewSamples(rules.transform(table), clients, [str(row + 1) for row in range(len(table))])

    def _client_column(self, names: Sequence[str], where: object) -> str:
        candidates = [self.client_column] if self.client_column else list(CLIENT_NAMES)
        found = [name for name in candidates if name in names]
        if len(found) != 1:
            raise BadInput(
                f"{where} has no column {' or '.join(repr(name) for name in candidates)} that names the client of each "
                "row: add it, or use --client for all rows."
            )
        return found[0]

    def _from_images(self, files: Sequence[Path], client: str | None, where: Path) -> NewSamples:
        if self.preprocessing is None or not self.preprocessing.images:
            raise BadInput(f"{where} holds images, but the run was not trained on image files.")
        if not files:
            raise BadInput(f"{where} has no images ({', '.join(SUFFIXES)}).")
        folder = where if where.is_dir() else where.parent
        parts = [file.relative_to(folder).parts for file in files]
        if client is None and any(len(each) < 2 for each in parts):
            raise BadInput(f"{where} has images outside folders named after clients: use --client for all of them.")
        pixels = load_images(files, shape=image_shape(self.preprocessing))
        return NewSamples(pixels, [client or each[0] for each in parts], ["/".join(each) for each in parts])

    def _from_arrays(self, arrays: dict[str, NDArray[Any]], client: str | None, where: object) -> NewSamples:
        if self.preprocessing is not None:
            raise BadInput(f"{where} holds arrays, but the run was trained on a table or on images: give those.")
        x = check_samples(arrays["x"])
        if x.shape[1:] != self.shape:
            raise BadInput(f"{where} has samples of shape {x.shape[1:]}; the run was trained on {self.shape}.")
        if client is None and "client" not in arrays:
            raise BadInput(f"{where} does not name the client of each sample: use --client.")
        clients = [client] * len(x) if client is not None else [str(each) for each in arrays["client"]]
        if len(clients) != len(x):
            raise BadInput(f"{where} has {len(x)} samples but {len(clients)} clients; the numbers must be equal.")
        return NewSamples(x, clients, [str(row + 1) for row in range(len(x))])


def client_column(manifest: Manifest) -> str | None:
    """Return the column that names the client in the table that a run was trained on; None: the default."""
    natural = NATURAL.get(str(manifest.settings.get("dataset")))
    given = manifest.settings.get("client-column") or (natural.client if natural is not None else None)
    found = given or manifest.federation.info.get("client_column")  # of a frame
    return None if found is None else str(found)


class _OneClient:
    """A source whose rows all belong to one client."""

    def __init__(self, source: TableSource, client: str) -> None:
        self._source = source
        self.names: Sequence[str] = source.names
        self.clients: Sequence[str] | None = (client,)

    def blocks(self, columns: Sequence[str]) -> Iterator[tuple[int, Block]]:
        """Return all blocks as those of the only client."""
        return ((0, block) for _, block in self._source.blocks(columns))

    def locate(self, part: int, row: int) -> str:
        """Return where a row is, for messages."""
        return self._source.locate(part, row)
