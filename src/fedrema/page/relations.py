"""The part of the document about pairs of clients: how similar they are, and who learns from whom."""

import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

import numpy as np

from fedrema.base.files import regular_file
from fedrema.core.reports import HEAD_SIMILARITY, Matrix
from fedrema.errors import BadInput
from fedrema.page.clients import evenly_spaced
from fedrema.page.encode import Packed, packed
from fedrema.page.reading import DownsampledRun
from fedrema.reporting.matrices import declared_matrix, order_by_similarity, peer_matrix
from fedrema.runs.checksums import BELONGS, CHANGED, CHECKSUM, REMEDY

KEPT_CLIENTS = 150
KEPT_ROUNDS = 60
BYTES = 6_000_000
"""Of all matrices of all runs together."""
CLUSTERED = 2000
"""Clients that are clustered; the time grows quadratically."""
TIES = 5
"""Peers of each client to which the graph shows a line."""


class Graph(TypedDict):
    """Positions and clusters of the clients, and the matrix that the graph shows."""

    source: str
    x: list[float]
    y: list[float]
    cluster: list[int]


class RelationsOfRun(TypedDict):
    """The matrices of one run."""

    rounds: list[int]
    clients: list[int]
    """Rows of the clients, in the order in which they are shown."""
    matrices: dict[str, Packed]
    """By name, [rounds, clients, clients]."""
    notes: list[str]
    graph: Graph | None


class RelationsPart(TypedDict):
    """The part of the document about pairs of clients."""

    runs: list[RelationsOfRun | None]


def relations_part(runs: Sequence[DownsampledRun]) -> RelationsPart:
    """Return the matrices between clients; None for runs without any."""
    files = [_relations_file(run) for run in runs]
    share = BYTES // max(1, sum(bool(file.rounds) for file in files))
    return {"runs": [_relations(run, file, share) for run, file in zip(runs, files, strict=True)]}


def _relations_file(run: DownsampledRun) -> "RelationsFile":
    with run.directory.check_all_read() as counts:
        file = RelationsFile(run.directory.relations_file)
        if file.owner:
            run.directory.check_owner(run.directory.relations_file, file.owner)
        counts["relations"] = len(file.rounds)
    return file


class RelationsFile:
    """A relations.npz, read round by round because it may be larger than memory.

    Each array that is read is verified by the checksum in the archive.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rounds: list[int] = []
        self.names: list[str] = []
        self.owner = ""
        """What it belongs to; empty if there is no file."""
        if not path.exists():
            return
        with _reading(path), regular_file(path).open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            self.rounds = [int(number) for number in file["rounds"]]
            self.names = [name for name in file.files if name not in ("rounds", CHECKSUM, BELONGS)]
            self.owner = str(file[BELONGS])

    def read(self, name: str, wanted: Sequence[int], rows: np.ndarray | None = None) -> np.ndarray:
        """Return [R, n, n], one matrix per wanted round, for some clients or all."""
        found = []
        with (
            _reading(self.path),
            zipfile.ZipFile(regular_file(self.path)) as archive,
            archive.open(f"{name}.npy") as stream,
        ):
            version = np.lib.format.read_magic(stream)
            read_header = np.lib.format.read_array_header_1_0
            shape, _, kind = (read_header if version == (1, 0) else np.lib.format.read_array_header_2_0)(stream)
            size = int(np.prod(shape[1:])) * kind.itemsize
            for number in self.rounds:
                matrix = np.frombuffer(stream.read(size), kind).reshape(shape[1:])
                if number in wanted:
                    found.append(matrix if rows is None else matrix[np.ix_(rows, rows)])
            stream.read()  # the checksum is compared at the end of the member
        return np.stack(found).astype(np.float32)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}; {REMEDY}.") from error
    except Exception as error:  # zipfile, zlib and NumPy raise many types, which differ between versions
        raise BadInput(f"{path} {CHANGED}: {REMEDY}.") from error


def _relations(run: DownsampledRun, file: RelationsFile, share: int) -> RelationsOfRun | None:
    clients = len(run.names)
    if clients < 2:
        return None
    if not file.rounds or not file.names:
        return _from_checkpoint(run)
    shown = peer_matrix(file.names, run.reports)
    ordering = HEAD_SIMILARITY.name if HEAD_SIMILARITY.name in file.names else shown.name if shown else file.names[0]
    among = np.array(evenly_spaced(range(clients), CLUSTERED))
    order = among[order_by_similarity(file.read(ordering, file.rounds[-1:], among)[0])]
    rows = np.array(evenly_spaced(order.tolist(), KEPT_CLIENTS))
    room = share // max(1, 2 * len(rows) ** 2 * len(file.names))
    rounds = evenly_spaced(file.rounds, max(2, min(KEPT_ROUNDS, room)))
    stacks = {name: file.read(name, rounds, rows) for name in file.names}
    return {
        "rounds": rounds,
        "clients": rows.tolist(),
        "matrices": {name: _packed(declared_matrix(name, run.reports), stack) for name, stack in stacks.items()},
        "notes": _notes(len(rows), clients, len(rounds), len(file.rounds)),
        "graph": _graph(shown.name, _latest(stacks[shown.name])) if shown else None,
    }


def _from_checkpoint(run: DownsampledRun) -> RelationsOfRun | None:
    """Return a matrix that the server keeps in its state, for a run that recorded none."""
    kept = {f"server/{matrix.state}": matrix for matrix in run.reports.matrices if matrix.state is not None}
    if not kept or not run.directory.checkpoint_file.exists():
        return None
    facts, found = run.directory.checkpoint(list(kept))
    shown = peer_matrix([kept[name].name for name in found], run.reports)
    if shown is None:
        return None
    values, number = found[f"server/{shown.state}"].float().numpy(), int(facts["round"])
    clients = len(run.names)
    values = values[:clients, :clients]
    among = np.array(evenly_spaced(range(clients), CLUSTERED))
    order = among[order_by_similarity(np.minimum(values, values.T)[np.ix_(among, among)])]
    rows = np.array(evenly_spaced(order.tolist(), KEPT_CLIENTS))
    values = values[np.ix_(rows, rows)]
    return {
        "rounds": [number],
        "clients": rows.tolist(),
        "matrices": {shown.name: _packed(shown, values[None])},
        "notes": [f"From the checkpoint of round {number:,}.", *_notes(len(rows), clients, 1, 1)],
        "graph": _graph(shown.name, values),
    }


def _packed(matrix: Matrix, stack: np.ndarray) -> Packed:
    return packed(stack, None if matrix.kind == "counts" else 1.0)


def _latest(stack: np.ndarray) -> np.ndarray:
    known = [matrix for matrix in stack if not np.isnan(matrix).all()]
    return np.asarray(np.nan_to_num(known[-1] if known else stack[-1]))


def _graph(source: str, weights: np.ndarray) -> Graph:
    """Return positions and clusters of the clients from the strongest ties of each."""
    import networkx

    shares = weights.copy()
    np.fill_diagonal(shares, 0)
    highest = shares.max(axis=1, keepdims=True)
    np.divide(shares, highest, out=shares, where=highest > 0)
    fifth = np.sort(shares, axis=1)[:, [-min(TIES, len(shares) - 1)]]
    ties = np.where(shares >= fifth, shares, 0) ** 2  # squared: weak ties would connect everything
    graph = networkx.from_numpy_array(ties + ties.T)
    clusters = networkx.community.louvain_communities(graph, seed=0)
    cluster = {client: place for place, members in enumerate(sorted(clusters, key=min)) for client in members}
    placed = networkx.spring_layout(graph, seed=0, k=3.0 / np.sqrt(len(ties)), iterations=300)
    places = np.array([placed[client] for client in range(len(ties))])
    for members in map(list, clusters):
        _spread_out(places, members)
    x, y = places.round(4).T.tolist()
    return {"source": source, "x": x, "y": y, "cluster": [cluster[client] for client in range(len(ties))]}


def _spread_out(places: np.ndarray, members: list[int]) -> None:
    """Enlarge a cluster that the layout has contracted to a point, as it does with clusters without ties to others."""
    centre = places[members].mean(axis=0)
    radius = float(np.linalg.norm(places[members] - centre, axis=1).max())
    wanted = 0.4 * np.sqrt(len(members) / len(places))
    if 0 < radius < wanted:
        places[members] = centre + (places[members] - centre) * wanted / radius


def _notes(shown: int, clients: int, rounds: int, recorded: int) -> list[str]:
    notes = []
    if shown < clients:
        notes.append(f"{shown} of {clients:,} clients are shown, evenly spaced in the order of similarity.")
    if rounds < recorded:
        notes.append(f"{rounds} of {recorded:,} recorded rounds are available, evenly spaced.")
    return notes
