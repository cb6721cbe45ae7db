"""The run's folder on the server, as `fedrema run` would write it; the server resumes from it after a crash.

Next to the folder are its log (NAME.log) and, after a failure, the reason (NAME.stopped).
"""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from fedrema.base.files import atomic_file, write_text
from fedrema.base.terminal import safe, safe_logger
from fedrema.config.settings import Settings
from fedrema.deploy.agreement import Agreement
from fedrema.deploy.registry import Registry
from fedrema.deploy.run_config import Plan, identity_values
from fedrema.deploy.scores import Score
from fedrema.deploy.server import CentralServer
from fedrema.errors import BadInput, FedremaError
from fedrema.runs.checkpoint import read_checkpoint, required_rounds
from fedrema.runs.checksums import CHANGED, REMEDY, verified, with_checksum
from fedrema.runs.directory import RunDirectory
from fedrema.runs.lock import RunLock
from fedrema.runs.manifest import FederationFacts, Manifest, read_object
from fedrema.runs.provenance import CODE, check_unchanged, inputs_of, method_name, method_revision, ran_on, revisions_of
from fedrema.runs.trust import marks_of, named_code
from fedrema.simulation.records import RoundRecord


class RunState:
    """Writes records, checkpoints and the summary; the metrics of a round arrive with the replies to the next round."""

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        plan: Plan,
        central: CentralServer,
        agreement: Agreement | None = None,
    ) -> None:
        settings = settings.for_columns(central.simulator.federation)
        self.directory, self.settings, self.plan, self.central = RunDirectory(folder), settings, plan, central
        self.agreement = None if agreement == Agreement() else agreement
        """What the nodes agreed on before round 1; None if there was nothing to agree on."""
        self.inputs = {name: digests for name, digests in inputs_of(settings).items() if name in CODE}
        content: list[Any] = sorted(identity_values(settings, plan).items())
        content += [self.inputs] if self.inputs else []
        revision = method_revision(type(settings.method), settings.simulation)
        content += [revision] if revision > 1 else []
        content += [msgspec.to_builtins(self.agreement)] if self.agreement is not None else []
        self.identity = digest(content)
        self.lock = self.directory.lock()
        """Held from `open` to `finish`."""
        self.ran_on = ran_on(central.simulator)
        self.pending: RoundRecord | None = None
        """The record of the last round, still without its metrics."""

    def open(self, lock: RunLock | None = None) -> None:
        """Resume from the last checkpoint, or start; acquires the run's lock unless the caller holds it already."""
        directory = self.directory
        self.lock = (lock or self.lock).acquire()
        if directory.checkpoint_file.is_file():
            self._resume()
        else:
            # A server that was killed before it completed a round has written nothing but the settings.
            same_run = directory.config_file.is_file() and directory.identity() == self.identity
            directory.check_free(overwrite=same_run and not directory.rounds())
            directory.create(self._manifest())
            directory.truncate_rounds(0)
        self.lock.training_from(len(directory.rounds()))

    def _resume(self) -> None:
        directory, central = self.directory, self.central
        before = directory.manifest()
        check_unchanged(directory.path, before.revisions, before.inputs, self.settings)
        if before.identity != self.identity:
            raise BadInput(f"The settings of {directory.path} have changed since it was started: it cannot be resumed.")
        facts, _ = directory.checkpoint(resuming=True)
        state = directory.state(resuming=True)
        if state.clients != central.capacity:
            raise BadInput(f"{directory.path} was started with --most-clients {state.clients}, not {central.capacity}.")
        try:
            registry = Registry.read(facts["more"]["registry"])
            pending = msgspec.convert(facts["more"]["pending"], RoundRecord | None)
        except (msgspec.ValidationError, KeyError, TypeError) as error:
            raise BadInput(f"The checkpoint {directory.checkpoint_file} {CHANGED}: {REMEDY}.") from error
        central.state = state.placed(central.simulator.storage, central.simulator.device)
        central.registry = registry
        directory.check_rounds(state.round - 1 if pending else state.round)
        # A finished run already has the last record, with the metrics of all clients.
        self.pending = None if directory.has_record(state.round) else pending
        directory.remove_summary()
        directory.truncate_rounds(state.round - 1 if self.pending else state.round)
        self.ran_on = replace(self.ran_on, started=before.ran_on.started)
        # A server that was killed right after a checkpoint has not written the names of clients that had just joined.
        directory.write_manifest(self._manifest())

    def add_scores(self, scores: Mapping[str, Score | None]) -> None:
        """Complete the last round's record with the scores of its models, and write it."""
        if self.pending is not None:
            self.directory.append(replace(self.pending, metrics=self.central.metrics(scores)))
            self.pending = None

    def save_round(self, record: RoundRecord) -> None:
        """Save a completed round."""
        self.pending = record
        self._save_checkpoint(record)

    def rewrite(self, change: Callable[[RoundRecord], RoundRecord]) -> None:
        """Change all records, and save them with the present state and registry; each file completely or not at all."""
        directory = self.directory
        facts, _ = read_checkpoint(directory.checkpoint_file)
        saved = msgspec.convert(facts["more"]["pending"], RoundRecord)  # the last record, even if it is written already
        number = required_rounds(facts).rounds
        chain, lines, marks = directory.chain(), [], [directory.mark(number)]
        if not number:
            marks.append(directory.mark(0))
        for record in map(change, directory.rounds()):
            lines.append(chain.seal(record))
            if chain.lines == number:
                marks.append(chain.mark)
        self._save_checkpoint(change(saved), marks)  # valid with the records before and after they are replaced
        with atomic_file(directory.rounds_file) as temporary:
            temporary.write_bytes(b"".join(lines))
        self._save_checkpoint(change(saved))
        if self.pending is None and self.central.round >= self.settings.simulation.rounds:
            directory.write_summary(directory.rounds())

    def _save_checkpoint(self, record: RoundRecord, records: Sequence[str] | None = None) -> None:
        more: dict[str, object] = {"registry": self.central.registry.plain(), "pending": msgspec.to_builtins(record)}
        if self.agreement is not None:
            more["agreement"] = msgspec.to_builtins(self.agreement)
        self.directory.sync_rounds()  # before the checkpoint that relies on them
        marks = [self.directory.mark(self.central.state.round - 1)] if records is None else records
        self.directory.save_state(self.central.state, more, marks)
        self.directory.write_manifest(self._manifest())

    def finish(self, scores: Mapping[str, Score | None]) -> None:
        """Write the last record and the summary."""
        self.add_scores(scores)
        self.directory.write_summary(self.directory.rounds())
        self.lock.release()

    def _manifest(self) -> Manifest:
        registry, task = self.central.registry, self.plan.predicted
        federation = FederationFacts(
            # The server has not seen the samples: it knows only the names of the clients.
            hashlib.sha256(json.dumps(registry.names).encode()).hexdigest(),
            list(registry.names),
            self.plan.classes,
            list(self.plan.names),
            tuple(self.plan.shape),
            [registry.train_counts.get(name, 0) for name in registry.names],
            # A node that protects its samples reports no scores.
            [sum(registry.test_counts.get(name, ())) for name in registry.names],
            {"network": "Flower"},
            last_counted=[registry.last_used_round.get(name, 0) for name in registry.names],
            preprocessing=None if self.agreement is None else self.agreement.preprocessing,
            own_task=task if task.rare or not task.has_softmax else None,
        )
        method = self.settings.method
        revisions = revisions_of(self.settings, self.central.simulator.device.type)
        settings = self.settings.described()
        return Manifest(
            method_name(method),
            settings,
            self.identity,
            revisions,
            self.inputs,
            federation,
            self.ran_on,
            method.reports,
            method.called(),
            marks_of(self.identity, named_code(method_name(method), settings)),
        )


def digest(content: object) -> str:
    """Return a digest of JSON values."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def save_agreement(folder: Path, agreement: Agreement, key: str) -> None:
    """Save what the nodes agreed on next to the run's folder; `key` identifies the settings that it is for.

    From round 1 on, it is a part of every checkpoint as well.
    """
    content = {"key": key, "agreement": msgspec.to_builtins(agreement)}
    write_text(agreement_file(folder), f"{json.dumps(with_checksum(content), indent=1)}\n")


def saved_agreement(folder: Path, key: str) -> Agreement | None:
    """Return what the nodes of a run agreed on; None if they did not yet, or for other settings."""
    checkpoint, file = RunDirectory(folder).checkpoint_file, agreement_file(folder)
    try:
        if checkpoint.is_file():
            facts, _ = read_checkpoint(checkpoint)
            return msgspec.convert(facts["more"]["agreement"], Agreement)
        if not file.is_file():
            return None
        content = verified(read_object(file, "cannot be read"), file, remedy="delete it, and the nodes agree again")
        return msgspec.convert(content["agreement"], Agreement) if content["key"] == key else None
    except (msgspec.ValidationError, KeyError, TypeError) as error:
        raise BadInput(f"{checkpoint if checkpoint.is_file() else file} {CHANGED}: {REMEDY}.") from error


def agreement_file(folder: Path) -> Path:
    """Return the file with what the nodes of the run in a folder agreed on."""
    return folder.with_name(f"{folder.name}.agreed.json")


@contextmanager
def locked_run(folder: Path) -> Iterator[RunLock]:
    """Hold the run's lock; write the log, and after a failure its reason, next to the run's folder."""
    lock = RunLock(folder).acquire()
    handler = logging.FileHandler(log_file(folder))
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    log = safe_logger("fedrema")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    stop_reason_file(folder).unlink(missing_ok=True)
    try:
        yield lock
    except FedremaError as error:
        log.error("%s", error)
        write_text(stop_reason_file(folder), f"{safe(error)}\n")
        raise
    except Exception:
        log.exception("an unexpected error occurred")
        raise
    finally:
        log.removeHandler(handler)
        handler.close()
        lock.release()


@dataclass(frozen=True)
class FailedAttempts:
    """The failed attempts at the round that is being repeated; `deploy status` shows why nodes are missing."""

    round: int = 0
    attempts: int = 0
    missing: dict[str, str] = field(default_factory=dict)
    """The nodes without a usable reply in the last attempt, and why."""

    def save(self, folder: Path) -> None:
        """Write the attempts next to the run's folder."""
        write_text(attempts_file(folder), json.dumps(asdict(self)) + "\n", durable=False)

    @classmethod
    def read(cls, folder: Path) -> "FailedAttempts":
        """Return the attempts at the present round; none if the last one was completed."""
        try:
            return msgspec.json.decode(attempts_file(folder).read_bytes(), type=cls)
        except (OSError, msgspec.DecodeError):
            return cls()


def attempts_file(folder: Path) -> Path:
    """Return the file with the failed attempts of the run in a folder; it exists while a round is being repeated."""
    return folder.with_name(f"{folder.name}.attempts.json")


def log_file(folder: Path) -> Path:
    """Return the log of the run in a folder."""
    return folder.with_name(f"{folder.name}.log")


def stop_reason_file(folder: Path) -> Path:
    """Return the file with the reason for which the server stopped the run in a folder."""
    return folder.with_name(f"{folder.name}.stopped")


def stop_reason(folder: Path) -> str:
    """Return why the last server stopped the run; empty if it did not."""
    file = stop_reason_file(folder)
    return file.read_text(encoding="utf-8").strip() if file.is_file() else ""
