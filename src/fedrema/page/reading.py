"""Reads the records of runs of any length, finished or not: of a long run, evenly spaced rounds only."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedrema.base.files import regular_file
from fedrema.errors import BadInput
from fedrema.runs.checksums import REMEDY
from fedrema.runs.manifest import Manifest
from fedrema.runs.records import RecordChain
from fedrema.runs.run import Run
from fedrema.simulation.records import MetricRecord, RoundRecord, Summary, TraceValue

KEPT_ROUNDS = 400
"""Rounds that the page shows; more would share pixels."""
BUFFER = 2**20
ABSENT, FAILED, PARTICIPATED = 0, 1, 2


@dataclass(frozen=True)
class ClientRows:
    """The values of a record per client, as arrays [clients]; NaN where unknown."""

    score: np.ndarray
    """The primary metric."""
    trained: np.ndarray
    """The primary metric right after local training."""
    loss: np.ndarray
    presence: np.ndarray
    """ABSENT, FAILED or PARTICIPATED."""
    traces: dict[str, np.ndarray]
    """What the method traces per client."""

    @classmethod
    def of(cls, record: RoundRecord, names: Sequence[str], traces: Sequence[str] = ()) -> "ClientRows":
        """Read them from a record; `traces` are the names of the quantities that the method traces per client."""
        clients, rows = len(names), record.participants
        return cls(
            spread(_clients(record.metrics), rows, clients),
            spread(_clients(record.trained), rows, clients),
            spread(record.client_loss, rows, clients),
            _presence(record, names),
            {name: spread(record.trace.get(name), rows, clients) for name in traces},
        )


@dataclass(frozen=True)
class KeptRound:
    """A round that the page shows."""

    record: RoundRecord
    """Without its lists over clients, which take ten times the memory of arrays."""
    clients: ClientRows


def spread(values: Any, rows: Sequence[int], clients: int) -> np.ndarray:
    """Return an array over all clients from the values of all, or of those in `rows`; NaN where there is none."""
    found = np.full(clients, np.nan, np.float32)
    if not isinstance(values, list):
        return found
    if len(values) == clients:
        rows = range(clients)
    for row, value in zip(rows, values, strict=False):
        if 0 <= row < clients and value is not None:
            found[row] = value
    return found


def _clients(metrics: dict[str, MetricRecord]) -> list[float | None] | None:
    return next((found.clients for found in metrics.values()), None)


def _presence(record: RoundRecord, names: Sequence[str]) -> np.ndarray:
    presence = np.full(len(names), ABSENT, np.uint8)
    for rows, value in ((record.dropped, FAILED), (record.participants, PARTICIPATED)):
        presence[[row for row in rows if row < len(names)]] = value
    for name in record.rejected:
        if name in names:
            presence[list(names).index(name)] = FAILED
    return presence


class RecordsFile:
    """A `rounds.jsonl` that may be growing: every line is verified, but only the rounds that are kept are parsed.

    Where there are more than `most`, every k-th round is kept, and the first and the last. k is `every`, the number of
    rounds between evaluations, times a power of two: runs of equal length keep the same, evaluated rounds.
    """

    def __init__(
        self,
        chain: RecordChain,
        names: Sequence[str],
        traces: Sequence[str] = (),
        every: int = 1,
        most: int = KEPT_ROUNDS,
    ) -> None:
        self.beginning, self.path, self.every, self.most = chain, chain.file, every, most
        self.names, self.traces = names, traces
        self._forget()

    def _forget(self) -> None:
        self.starts = [0]
        """Offset of each line; the last one may be incomplete."""
        self.chain = replace(self.beginning)
        self.node = 0
        self.parsed: dict[int, KeptRound] = {}

    @property
    def count(self) -> int:
        """Number of complete lines."""
        return len(self.starts) - 1

    @property
    def stride(self) -> int:
        """Distance between rounds that are kept."""
        if self.count <= self.most:
            return 1
        stride = self.every
        while self.count // stride > self.most:
            stride *= 2
        return stride

    def grow(self) -> bool:
        """Verify new lines; return whether there are any, or the file was replaced."""
        try:
            facts = self.path.stat()
        except OSError:
            had = self.count > 0
            self._forget()
            return had
        replaced = self.node not in (0, facts.st_ino) or facts.st_size < self.starts[-1]
        if replaced:  # a resumed run drops the rounds after its checkpoint
            self._forget()
        self.node = facts.st_ino
        before = self.count
        try:
            self._verify()
        except BadInput:
            if not before:
                raise
            self._forget()  # possibly another file with the same inode: read it from the start
            replaced = True
            self._verify()
        return replaced or self.count > before

    def _verify(self) -> None:
        try:
            with regular_file(self.path).open("rb", buffering=BUFFER) as stream:
                stream.seek(self.starts[-1])
                for line in stream:
                    if line.endswith(b"\n"):
                        self.chain.verify(line)
                        self.starts.append(self.starts[-1] + len(line))
        except OSError as error:
            raise BadInput(f"{self.path} cannot be read: {error.strerror}; {REMEDY}.") from error

    def kept(self) -> list[KeptRound]:
        """Return the rounds that are kept."""
        stride, last = self.stride, self.count - 1
        wanted = [place for place in range(self.count) if (place + 1) % stride == 0 or place in (0, last)]
        self.parsed = {place: self.parsed[place] for place in wanted if place in self.parsed}
        missing = [place for place in wanted if place not in self.parsed]
        if missing:
            with self.path.open("rb") as stream:
                for place in missing:
                    stream.seek(self.starts[place])
                    line = stream.read(self.starts[place + 1] - self.starts[place])
                    record = replace(self.beginning, lines=place + 1).parse(line)
                    self.parsed[place] = KeptRound(_light(record), ClientRows.of(record, self.names, self.traces))
        return [self.parsed[place] for place in wanted]


def _light(record: RoundRecord) -> RoundRecord:
    """Return a record without its lists over clients."""
    metrics, trained = (
        {name: replace(metric, clients=[]) for name, metric in found.items()}
        for found in (record.metrics, record.trained)
    )
    trace: dict[str, TraceValue] = {name: value for name, value in record.trace.items() if not isinstance(value, list)}
    return replace(record, participants=[], dropped=[], client_loss=[], metrics=metrics, trained=trained, trace=trace)


class DownsampledRun(Run):
    """A run of which at most `most` evenly spaced rounds are read."""

    def __init__(self, path: Path | str, most: int = KEPT_ROUNDS) -> None:
        super().__init__(path)
        self.most = most
        self.file = self._begin()
        self._grow()

    @cached_property
    def kept(self) -> list[KeptRound]:
        """The rounds that are kept."""
        return self.file.kept()

    @cached_property
    def rounds(self) -> list[RoundRecord]:
        """The records of the rounds that are kept, without lists over clients."""
        return [one.record for one in self.kept]

    @cached_property
    def summary(self) -> Summary:
        """Headline numbers; of the rounds that are kept where the run is not finished."""
        found = self.directory.summary()
        if found is None:
            found = self.directory.summarise(self.rounds)
            if self.file.stride > 1:  # sums over some of the rounds would be too small
                found = replace(found, seconds={}, bytes_up=0, bytes_down=0)
        return found

    def refresh(self) -> bool:
        """Read new records; return whether anything has changed."""
        before, finished = self.manifest, self.directory.finished()
        self.manifest = self.directory.manifest()
        if _source(self.manifest) != _source(before):  # another run in the same folder, or clients have joined
            self.file = self._begin()
        changed = self._grow() or self.manifest != before or finished != self.__dict__.get("ended")
        if changed:
            self.__dict__["ended"] = finished
            for name in ("kept", "rounds", "summary"):
                self.__dict__.pop(name, None)
        return changed

    def _begin(self) -> RecordsFile:
        every = int(self.settings.get("evaluate-every", 1))
        traces = [trace.name for trace in self.reports.traces if trace.per_client]
        return RecordsFile(self.directory.chain(), self.names, traces, max(1, every), self.most)

    def _grow(self) -> bool:
        with self.directory.check_all_read() as counts:
            self.directory.has_rounds()
            changed = self.file.grow()
            counts["rounds"] = self.file.count
        return changed


def _source(manifest: Manifest) -> tuple[str, list[str]]:
    return manifest.identity, manifest.federation.names


def thinned_notes(runs: Sequence[DownsampledRun]) -> list[str]:
    """Return sentences that describe which rounds are not shown."""
    strides = {run.file.stride: run for run in runs if run.file.stride > 1}
    notes = [
        f"Of {run.file.count:,} rounds, every {stride}th is shown, and the first and the last."
        for stride, run in sorted(strides.items())
    ]
    if any(not run.finished for run in strides.values()):
        notes.append("Headline numbers of unfinished runs are computed from the rounds shown.")
    return notes
