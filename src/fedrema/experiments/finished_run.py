"""What a grid keeps of a finished run: summary, curves, scores per client, some matrices, and where it ran."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from fedrema.config.presets import PlainValue
from fedrema.config.settings import Settings
from fedrema.core import Moment
from fedrema.core.reports import HEAD_SIMILARITY
from fedrema.engine import choose_device
from fedrema.experiments.matching import precision_and_recall, true_groups
from fedrema.runs.manifest import Inputs
from fedrema.runs.provenance import inputs_of, is_outdated, method_name, revisions_of
from fedrema.runs.run import Run
from fedrema.simulation.records import Summary

FORMAT = 3
SHOWN = (0.0, 0.1, 0.2, 0.3, 1.0)
"""After which share of the rounds similarities are kept: of 500 rounds the 1st, 50th, 100th, 150th and last."""
PEERS = ("weights", "counts")
"""Kinds of declared matrices that are kept as of the last round: how much each client takes from each other."""
STARTING = 3
"""Rounds at the start of a run that may take longer than others because programs are compiled."""
PLACES = ("out", "data-dir")

Rows = list[list[float | None]]
"""A matrix between clients; None for absent clients."""


@dataclass(frozen=True)
class ClientScores:
    """The clients of a run."""

    names: list[str] = field(default_factory=list)
    accuracy: list[float | None] = field(default_factory=list)
    """Mean over the last five evaluated rounds; None for a client that was never scored. Empty for tasks with another
    primary metric."""
    groups: list[int] | None = None
    """The group of each client, where the data was partitioned in groups."""
    scores: list[float | None] = field(default_factory=list)
    """The same as `accuracy`, of the primary metric of tasks that have another."""

    @property
    def primary(self) -> list[float | None]:
        """Each client's mean of the primary metric over the last five evaluated rounds."""
        return self.accuracy or self.scores


@dataclass(frozen=True)
class Matching:
    """How well the most similar clients match the true groups, over all recorded rounds."""

    round: list[int]
    precision: list[float | None]
    recall: list[float | None]


@dataclass(frozen=True)
class Machine:
    """Where and how a run was computed (`ran_on` of config.json)."""

    device: str
    backend: str = ""
    dtype: str = ""
    products: str | None = None
    threads: int | None = None
    threads_per_operation: int | None = None
    started: str = ""
    python: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    commit: str | None = None
    beside: int = 0
    """How many other tasks used the same device at the same time."""


@dataclass(frozen=True)
class FinishedRun:
    """A run that has finished or diverged: one line of a table of finished runs."""

    key: str
    """Digest of everything that defines the result (`key_of`)."""
    method: str
    settings: dict[str, bool | int | float | str | None]
    summary: Summary = field(default_factory=lambda: Summary(0))
    curves: dict[str, list[bool | int | float | None]] = field(default_factory=dict)
    """By name, one value per round; `round` itself is among them."""
    clients: ClientScores = field(default_factory=ClientScores)
    matrices: dict[str, dict[int, Rows]] = field(default_factory=dict)
    """Recorded matrices by name and round: the similarity at some rounds, those of kind `PEERS` at the last."""
    matching: Matching | None = None
    epochs: int | None = None
    """Local epochs in a round, over all phases of the method."""
    ran_on: Machine | None = None
    """None for a run that diverged."""
    failed: str = ""
    """Why it diverged; the rest is empty then."""
    revisions: dict[str, int] = field(default_factory=dict)
    """Of the method, and of the engine on the kind of device it ran on."""
    inputs: Inputs = field(default_factory=dict)
    """Digests of the user's files."""
    format: int = FORMAT

    @property
    def outdated(self) -> bool:
        """Whether an older revision of fedrema computed it: it is shown, but does not count as finished."""
        return is_outdated(self.method, self.revisions, self.settings)

    @property
    def seed(self) -> int:
        """The training seed."""
        return int(self.settings["seed"] or 0)

    @property
    def device(self) -> str:
        """The device that it ran on; empty for a run that diverged."""
        return "" if self.ran_on is None else self.ran_on.device

    @property
    def shared_device(self) -> bool:
        """Whether other tasks used the same device at the same time."""
        return self.ran_on is not None and self.ran_on.beside > 0

    @property
    def seconds(self) -> float:
        """How long it took, with the first rounds, which compile programs, counted like the later ones."""
        rounds = [float(value or 0) for value in self.curves.get("seconds", [])]
        settled = rounds[STARTING:]
        if not settled:
            return float(sum(self.summary.seconds.values()))
        return float(sum(settled) + (len(rounds) - len(settled)) * statistics.median(settled))

    @property
    def bytes_sent(self) -> float:
        """How many bytes a client sends to the server in a round, on average over clients and rounds."""
        return self._per_client_and_round(self.summary.bytes_up)

    @property
    def bytes_received(self) -> float:
        """How many bytes a client receives from the server in a round, on average over clients and rounds."""
        return self._per_client_and_round(self.summary.bytes_down)

    def _per_client_and_round(self, total: int) -> float:
        return total / max(1, len(self.clients.names) * self.summary.rounds)

    def curve(self, quantity: str) -> dict[int, float]:
        """Return a quantity by round, without rounds that lack it."""
        pairs = zip(self.curves.get("round", []), self.curves.get(quantity, []), strict=False)
        return {int(number): float(value) for number, value in pairs if number is not None and value is not None}

    def matrix(self, name: str) -> np.ndarray | None:
        """Return the last recorded value of a matrix, NaN for absent clients; None where there is none."""
        found = self.matrices.get(name)
        return as_array(found[max(found)]) if found else None


def as_array(rows: Rows) -> np.ndarray:
    """Return a kept matrix with NaN for absent clients."""
    return np.array([[np.nan if value is None else value for value in row] for row in rows], float)


def finished_run(key: str, settings: Settings, run: Run, concurrent_tasks: int = 0) -> FinishedRun:
    """Return what is kept of a run; `concurrent_tasks` is how many other tasks used its device at the same time."""
    curves: dict[str, list[bool | int | float | None]] = {"round": [record.round for record in run.rounds]}
    for name in (run.metric, *(trace.name for trace in settings.method.reports.traces), "seconds"):
        values = [record.quantity(name) for record in run.rounds]
        if any(value is not None for value in values):
            curves[name] = [_brief(value) for value in values]
    matrices, matching = _matrices(settings, run)
    return FinishedRun(
        key,
        run.method,
        _without_places(run.settings),
        run.summary,
        curves,
        _clients(run),
        matrices,
        matching,
        planned_epochs(settings),
        msgspec.convert({**msgspec.to_builtins(run.manifest.ran_on), "beside": concurrent_tasks}, Machine),
        revisions=run.manifest.revisions,
        inputs=run.manifest.inputs,
    )


def diverged_run(key: str, settings: Settings, reason: str, inputs: Inputs | None = None) -> FinishedRun:
    """Return what is kept of a run that diverged, so that it is not tried again."""
    return FinishedRun(
        key,
        method_name(settings.method),
        _without_places(settings.described()),
        failed=reason,
        revisions=revisions_of(settings, choose_device(settings.simulation.device).type),
        inputs=inputs_of(settings) if inputs is None else inputs,
    )


def planned_epochs(settings: Settings) -> int:
    """Return how many local epochs a round has, over all phases of the method."""
    moment = Moment(1, settings.simulation.rounds, settings.simulation.seed)
    return sum(phase.epochs for phase in settings.method.phases(settings.local, moment))


def _without_places(settings: Mapping[str, PlainValue]) -> dict[str, PlainValue]:
    return {name: value for name, value in settings.items() if name not in PLACES}


def _brief(value: Any, digits: int = 5) -> Any:
    """Return a number with few digits; of a list its mean, of parts their sum: enough to draw a curve."""
    if isinstance(value, dict):
        value = sum(value.values())
    if isinstance(value, list):
        value = sum(value) / len(value) if value else None
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def _clients(run: Run) -> ClientScores:
    last = [record.primary.clients for record in run.rounds if record.primary is not None][-5:]
    columns = [[value for value in column if value is not None] for column in zip(*last, strict=True)]
    scores, groups = [_brief(column) for column in columns], true_groups(run.settings, len(run.names))
    if run.metric == "accuracy":
        return ClientScores(run.names, scores, groups)
    return ClientScores(run.names, groups=groups, scores=scores)


def _matrices(settings: Settings, run: Run) -> tuple[dict[str, dict[int, Rows]], Matching | None]:
    found = run.relations()
    if not found:
        return {}, None
    last, similarity = max(found), HEAD_SIMILARITY.name
    wanted = {min(found, key=lambda number: abs(number - share * last)) for share in SHOWN}
    kept = {similarity: {number: _rows(found[number][similarity]) for number in sorted(wanted)}}
    for matrix in settings.method.reports.matrices:
        if matrix.kind in PEERS and matrix.name in found[last]:
            kept[matrix.name] = {last: _rows(found[last][matrix.name])}
    groups = true_groups(run.settings, len(run.names))
    if groups is None:
        return kept, None
    return kept, _matching(sorted(found), [found[number][similarity] for number in sorted(found)], groups)


def _matching(rounds: list[int], similarities: Sequence[np.ndarray], groups: Sequence[int]) -> Matching:
    pairs = [precision_and_recall(similarity, groups) for similarity in similarities]
    return Matching(rounds, [_brief(precision) for precision, _ in pairs], [_brief(recall) for _, recall in pairs])


def _rows(values: np.ndarray) -> Rows:
    """Return rows with three digits; None where a client was absent."""
    return [[None if np.isnan(value) else _brief(float(value), 3) for value in row] for row in values]
