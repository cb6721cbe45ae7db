"""The part of the page's document about pairs of clients: who is like whom, who learns from whom."""

import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fedrema.errors import BadInput
from fedrema.page.clients import evenly
from fedrema.page.encode import packed
from fedrema.page.reading import ThinnedRun
from fedrema.runs.checkpoint import read_checkpoint
from fedrema.runs.checksums import CHANGED, CHECKSUM, REMEDY

DEPENDENCIES = "server/dependencies"
KEPT_CLIENTS = 150
KEPT_ROUNDS = 60
BYTES = 6_000_000
"""Of all matrices of all runs together."""
CLUSTERED = 2000
"""Clients among which neighbours are sought; the time grows with their square."""
ORDERED_WELL = 300
TIES = 5
"""How many ties of each client the graph shows."""


def relations_part(runs: Sequence[ThinnedRun]) -> dict[str, Any]:
    """Return the matrices between clients of the runs that kept any."""
    files = [_stacks(run) for run in runs]
    share = BYTES // max(1, sum(bool(file.rounds) for file in files))
    return {"runs": [_relations(run, file, share) for run, file in zip(runs, files, strict=True)]}


def _stacks(run: ThinnedRun) -> "Stacks":
    with run.directory.complete() as counts:
        file = Stacks(run.directory.relations_file)
        counts["relations"] = len(file.rounds)
    return file


class Stacks:
    """A relations.npz, read round by round: the whole may be larger than memory.

    Each part that is read is verified by the checksum that the format has for it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rounds: list[int] = []
        self.names: list[str] = []
        if not path.exists():
            return
        with _reading(path), path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            self.rounds = [int(number) for number in file["rounds"]]
            self.names = [name for name in file.files if name not in ("rounds", CHECKSUM)]

    def read(self, name: str, wanted: Sequence[int], rows: np.ndarray | None = None) -> np.ndarray:
        """Return [R, n, n], one matrix per wanted round, for some clients or all."""
        found = []
        with _reading(self.path), zipfile.ZipFile(self.path) as archive, archive.open(f"{name}.npy") as stream:
            version = np.lib.format.read_magic(stream)
            read_header = np.lib.format.read_array_header_1_0
            shape, _, kind = (read_header if version == (1, 0) else np.lib.format.read_array_header_2_0)(stream)
            size = int(np.prod(shape[1:])) * kind.itemsize
            for number in self.rounds:
                matrix = np.frombuffer(stream.read(size), kind).reshape(shape[1:])
                if number in wanted:
                    found.append(matrix if rows is None else matrix[np.ix_(rows, rows)])
            stream.read()  # at its end a member's checksum is compared
        return np.stack(found).astype(np.float32)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror or error}; {REMEDY}.") from error
    except Exception as error:  # zipfile, zlib and numpy raise a dozen kinds, which change with their versions
        raise BadInput(f"{path} {CHANGED}: {REMEDY}.") from error


def _relations(run: ThinnedRun, file: Stacks, share: int) -> dict[str, Any] | None:
    clients = len(run.names)
    if clients < 2:
        return None
    if not file.rounds or not file.names:
        return _from_checkpoint(run)
    telling = "S" if "S" in file.names else file.names[0]
    among = np.array(evenly(range(clients), CLUSTERED))
    last = file.read(telling, file.rounds[-1:], among)[0]
    order = among[neighbours(last)]
    rows = np.array(evenly(order.tolist(), KEPT_CLIENTS))
    room = share // max(1, 2 * len(rows) ** 2 * len(file.names))
    rounds = evenly(file.rounds, max(2, min(KEPT_ROUNDS, room)))
    matrices = {name: file.read(name, rounds, rows) for name in file.names}
    found: dict[str, Any] = {
        "rounds": rounds,
        "clients": rows.tolist(),
        "matrices": {name: _packed(name, stack) for name, stack in matrices.items()},
        "notes": _notes(len(rows), clients, len(rounds), len(file.rounds)),
    }
    source = next((name for name in ("G", "weights", "S") if name in matrices), None)
    if source:
        found["graph"] = {"source": source, **_graph(_latest(matrices[source]))}
    return found


def _from_checkpoint(run: ThinnedRun) -> dict[str, Any] | None:
    """Return the dependency map of a run that recorded no matrices, as FedReMa's server keeps it to go on from."""
    if not run.directory.checkpoint_file.exists():
        return None
    facts, found = read_checkpoint(run.directory.checkpoint_file, [DEPENDENCIES])
    if DEPENDENCIES not in found:  # another method
        return None
    counts, number = found[DEPENDENCIES].float().numpy(), int(facts["round"])
    clients = len(run.names)
    counts = counts[:clients, :clients]
    among = np.array(evenly(range(clients), CLUSTERED))
    order = among[neighbours(np.minimum(counts, counts.T)[np.ix_(among, among)])]
    rows = np.array(evenly(order.tolist(), KEPT_CLIENTS))
    shown = counts[np.ix_(rows, rows)]
    return {
        "rounds": [number],
        "clients": rows.tolist(),
        "matrices": {"G": packed(shown[None])},
        "notes": [f"As of the checkpoint of round {number:,}.", *_notes(len(rows), clients, 1, 1)],
        "graph": {"source": "G", **_graph(shown)},
    }


def _packed(name: str, stack: np.ndarray) -> dict[str, Any]:
    return packed(stack, 1.0 if name in ("S", "sets", "weights") else None)


def _latest(stack: np.ndarray) -> np.ndarray:
    known = [matrix for matrix in stack if not np.isnan(matrix).all()]
    return np.asarray(np.nan_to_num(known[-1] if known else stack[-1]))


def neighbours(similarity: np.ndarray) -> np.ndarray:
    """Return clients in an order in which similar ones lie side by side."""
    from scipy.cluster.hierarchy import leaves_list, linkage
    from scipy.spatial.distance import squareform

    alike = np.nan_to_num((similarity + similarity.T) / 2)
    highest = max(float(alike.max()), 1e-9)
    apart = np.clip(1 - alike / highest, 0, None)
    np.fill_diagonal(apart, 0)
    tree = linkage(squareform(apart, checks=False), "average", optimal_ordering=len(apart) <= ORDERED_WELL)
    return np.asarray(leaves_list(tree))


def _graph(weights: np.ndarray) -> dict[str, Any]:
    """Return places and clusters of the clients, by whom each depends on most."""
    import networkx

    shares = weights.copy()
    np.fill_diagonal(shares, 0)
    highest = shares.max(axis=1, keepdims=True)
    np.divide(shares, highest, out=shares, where=highest > 0)
    fifth = np.sort(shares, axis=1)[:, [-min(TIES, len(shares) - 1)]]
    ties = np.where(shares >= fifth, shares, 0) ** 2  # the strongest count: weak ties lead everywhere
    graph = networkx.from_numpy_array(ties + ties.T)
    clusters = networkx.community.louvain_communities(graph, seed=0)
    cluster = {client: place for place, members in enumerate(sorted(clusters, key=min)) for client in members}
    placed = networkx.spring_layout(graph, seed=0, k=3.0 / np.sqrt(len(ties)), iterations=300)
    places = np.array([placed[client] for client in range(len(ties))])
    for members in map(list, clusters):
        _give_room(places, members)
    x, y = places.round(4).T.tolist()
    return {"x": x, "y": y, "cluster": [cluster[client] for client in range(len(ties))]}


def _give_room(places: np.ndarray, members: list[int]) -> None:
    """Draw a cluster apart that springs have pulled into a point, as they do where it has no ties to others."""
    centre = places[members].mean(axis=0)
    radius = float(np.linalg.norm(places[members] - centre, axis=1).max())
    wanted = 0.4 * np.sqrt(len(members) / len(places))
    if 0 < radius < wanted:
        places[members] = centre + (places[members] - centre) * wanted / radius


def _notes(shown: int, clients: int, rounds: int, recorded: int) -> list[str]:
    notes = []
    if shown < clients:
        notes.append(f"{shown} of {clients:,} clients are drawn, evenly spaced in the order of similarity.")
    if rounds < recorded:
        notes.append(f"{rounds} of {recorded:,} recorded rounds can be looked at, evenly spaced.")
    return notes
