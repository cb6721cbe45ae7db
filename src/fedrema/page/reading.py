"""Reads records from runs of any length, growing or not: of a long run, evenly spaced rounds only."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedrema.errors import BadInput
from fedrema.runs.checksums import REMEDY
from fedrema.runs.records import RecordChain
from fedrema.runs.run import Run
from fedrema.simulation.records import MetricRecord, RoundRecord, Summary

KEPT_ROUNDS = 400
"""Rounds that a picture can show; more would lie on the same pixels."""
BUFFER = 2**20


class RecordsFile:
    """A `rounds.jsonl` that may be growing: every line is verified, but only the rounds that are kept are parsed.

    Where there are more than `most`, every k-th is kept, with the first and the last; k is `every` times a power of
    two, so that runs of one length keep the same rounds, and rounds that were scored.
    """

    def __init__(self, chain: RecordChain, every: int = 1, most: int = KEPT_ROUNDS) -> None:
        self.beginning, self.path, self.every, self.most = chain, chain.file, every, most
        self._forget()

    def _forget(self) -> None:
        self.starts = [0]
        """Where each line begins; the last one may not be whole yet."""
        self.chain = replace(self.beginning)
        self.node = 0
        self.parsed: dict[int, RoundRecord] = {}

    @property
    def count(self) -> int:
        """How many whole lines there are."""
        return len(self.starts) - 1

    @property
    def stride(self) -> int:
        """Every how manyth round is kept."""
        if self.count <= self.most:
            return 1
        stride = self.every
        while self.count // stride > self.most:
            stride *= 2
        return stride

    def grow(self) -> bool:
        """Look for new lines; tells whether there are any, or the file was replaced."""
        try:
            facts = self.path.stat()
        except OSError:
            had = self.count > 0
            self._forget()
            return had
        replaced = self.node not in (0, facts.st_ino) or facts.st_size < self.starts[-1]
        if replaced:  # a resumed run forgets what came after its checkpoint
            self._forget()
        self.node = facts.st_ino
        before = self.count
        try:
            self._verify()
        except BadInput:
            if not before:
                raise
            self._forget()  # it may be another file under the same number: that is damaged only if its beginning is
            replaced = True
            self._verify()
        return replaced or self.count > before

    def _verify(self) -> None:
        try:
            with self.path.open("rb", buffering=BUFFER) as stream:
                stream.seek(self.starts[-1])
                for line in stream:
                    if line.endswith(b"\n"):
                        self.chain.verify(line)
                        self.starts.append(self.starts[-1] + len(line))
        except OSError as error:
            raise BadInput(f"{self.path} cannot be read: {error.strerror}; {REMEDY}.") from error

    def records(self) -> list[RoundRecord]:
        """Return the kept records."""
        stride, last = self.stride, self.count - 1
        wanted = [place for place in range(self.count) if (place + 1) % stride == 0 or place in (0, last)]
        self.parsed = {place: self.parsed[place] for place in wanted if place in self.parsed}
        missing = [place for place in wanted if place not in self.parsed]
        if missing:
            with self.path.open("rb") as stream:
                for place in missing:
                    stream.seek(self.starts[place])
                    self._parse(place, stream.read(self.starts[place + 1] - self.starts[place]))
        return [self.parsed[place] for place in wanted]

    def _parse(self, place: int, line: bytes) -> None:
        self.parsed[place] = _compact(replace(self.beginning, lines=place + 1).parse(line))


def _compact(record: RoundRecord) -> RoundRecord:
    """Return a record with arrays for lists with one number per client: they take a tenth of the memory."""

    def array(values: Any, kind: type[Any]) -> Any:
        return np.array(values, kind)  # None becomes NaN

    def metrics(found: dict[str, MetricRecord]) -> dict[str, MetricRecord]:
        return {name: replace(metric, clients=array(metric.clients, np.float32)) for name, metric in found.items()}

    return replace(
        record,
        participants=array(record.participants, np.int64),
        dropped=array(record.dropped, np.int64),
        client_loss=array(record.client_loss, np.float32),
        metrics=metrics(record.metrics),
        trained=metrics(record.trained),
    )


class ThinnedRun(Run):
    """A run whose rounds are thinned where there are more than a page can show."""

    def __init__(self, path: Path | str, most: int = KEPT_ROUNDS) -> None:
        super().__init__(path)
        self.most = most
        self.file = self._begin()
        self._grow()

    @cached_property
    def rounds(self) -> list[RoundRecord]:
        """The kept records."""
        return self.file.records()

    @cached_property
    def summary(self) -> Summary:
        """Headline numbers; of the kept rounds where the run has not ended."""
        found = self.directory.summary()
        if found is None:
            found = self.directory.summarise(self.rounds)
            if self.file.stride > 1:  # sums over some of the rounds would mislead
                found = replace(found, seconds={}, bytes_up=0, bytes_down=0)
        return found

    def refresh(self) -> bool:
        """Read what is new; tells whether anything is."""
        config, finished = self.directory.config(), self.directory.finished()
        if config.get("identity") != self.config.get("identity"):  # another run in the same folder
            self.file = self._begin()
        changed = self._grow() or config != self.config or finished != self.__dict__.get("ended")
        self.config = config
        if changed:
            self.__dict__["ended"] = finished
            for name in ("rounds", "summary"):
                self.__dict__.pop(name, None)
        return changed

    def _begin(self) -> RecordsFile:
        every = int(self.config.get("settings", {}).get("evaluate-every", 1))
        return RecordsFile(self.directory.chain(), max(1, every), self.most)

    def _grow(self) -> bool:
        with self.directory.complete() as counts:
            self.directory.has_rounds()
            changed = self.file.grow()
            counts["rounds"] = self.file.count
        return changed


def thinned_notes(runs: Sequence[ThinnedRun]) -> list[str]:
    """Say in sentences what was left out."""
    strides = {run.file.stride: run for run in runs if run.file.stride > 1}
    notes = [
        f"Of {run.file.count:,} rounds every {stride}th is drawn, with the first and the last."
        for stride, run in sorted(strides.items())
    ]
    if any(not run.finished for run in strides.values()):
        notes.append("The headline numbers of runs that go on are of the rounds drawn.")
    return notes
