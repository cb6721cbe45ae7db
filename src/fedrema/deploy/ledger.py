"""What the server keeps on disk: a run's folder like any other, from which it goes on after a crash."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from fedrema.config.settings import Settings
from fedrema.deploy.central import Central, Registry
from fedrema.deploy.letters import Score
from fedrema.deploy.plan import Plan, run_config
from fedrema.errors import BadInput
from fedrema.runs.checkpoint import load_state, read_checkpoint, save_state
from fedrema.runs.directory import RunDirectory
from fedrema.runs.lock import RunLock
from fedrema.runs.manifest import FederationFacts, Manifest
from fedrema.runs.provenance import CODE, check_unchanged, inputs_of, method_name, ran_on, revisions_of
from fedrema.simulation.records import RoundRecord

WHERE = ("folder", "least-clients", "most-samples", "most-noise", "wait-seconds", "round-seconds", "rounds", "device")
"""What may change when a federation goes on."""


class Ledger:
    """Writes records, checkpoints and the summary; a round's accuracies come with the replies of the next."""

    def __init__(self, folder: Path, settings: Settings, plan: Plan, central: Central) -> None:
        self.directory, self.settings, self.plan, self.central = RunDirectory(folder), settings, plan, central
        what = {name: value for name, value in run_config(settings, plan).items() if name not in WHERE}
        self.inputs = {name: digests for name, digests in inputs_of(settings).items() if name in CODE}
        content: list[Any] = sorted(what.items())
        content += [self.inputs] if self.inputs else []
        content += [settings.method.revision] if settings.method.revision > 1 else []
        self.identity = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
        self.lock = self.directory.lock()
        """Held from `take_up` to `finish`."""
        self.ran_on = ran_on(central.simulator)
        self.pending: RoundRecord | None = None
        """The record of the last round, which still lacks its accuracies."""

    def take_up(self, lock: RunLock | None = None) -> None:
        """Go on from the last checkpoint, or begin; takes the run's lock unless the caller holds it already."""
        directory = self.directory
        self.lock = (lock or self.lock).acquire()
        if directory.checkpoint_file.is_file():
            self._go_on()
        else:
            # One that was killed before it had closed a round has left nothing but its settings.
            mine = directory.config_file.is_file() and directory.identity() == self.identity
            directory.check_free(overwrite=mine and not directory.rounds())
            directory.create(self._manifest())
            directory.keep_rounds(0)
        self.lock.training_from(len(directory.rounds()))

    def _go_on(self) -> None:
        directory, central = self.directory, self.central
        before = directory.manifest()
        check_unchanged(directory.path, before.revisions, before.inputs, self.settings)
        facts, _ = read_checkpoint(directory.checkpoint_file)
        state = load_state(directory.checkpoint_file, self.identity)
        if state.clients != central.capacity:
            raise BadInput(f"{directory.path} was begun for {state.clients} clients, not {central.capacity}.")
        central.state = state.placed(central.simulator.storage, central.simulator.device)
        central.registry = Registry.read(facts["more"]["registry"])
        pending = facts["more"]["pending"] and msgspec.convert(facts["more"]["pending"], RoundRecord)
        directory.check_rounds(state.round - 1 if pending else state.round)
        # A finished run has the last record already, with the accuracies of all clients.
        self.pending = None if directory.has_record(state.round) else pending
        directory.remove_summary()
        directory.keep_rounds(state.round - 1 if self.pending else state.round)
        self.ran_on = replace(self.ran_on, started=before.ran_on.started)
        # A server that was killed right after a checkpoint has not written the names of those who joined in its round.
        directory.write_manifest(self._manifest())

    def scored(self, scores: Mapping[str, Score | None]) -> None:
        """Complete the last round's record by what clients say of the models that came of it."""
        if self.pending is not None:
            self.directory.append(replace(self.pending, metrics=self.central.accuracies(scores)))
            self.pending = None

    def closed(self, record: RoundRecord) -> None:
        """Save a round that has been closed."""
        self.pending = record
        more = {"registry": self.central.registry.plain(), "pending": msgspec.to_builtins(record)}
        self.directory.sync_rounds()  # before the checkpoint that counts on them
        save_state(self.central.state, self.directory.checkpoint_file, self.identity, more)
        self.directory.write_manifest(self._manifest())

    def finish(self, scores: Mapping[str, Score | None]) -> None:
        """Write the last record and the summary."""
        self.scored(scores)
        self.directory.write_summary(self.directory.rounds())
        self.lock.release()

    def _manifest(self) -> Manifest:
        registry = self.central.registry
        federation = FederationFacts(
            # The server has not seen the samples: it knows only the names of the clients.
            hashlib.sha256(json.dumps(registry.names).encode()).hexdigest(),
            list(registry.names),
            self.plan.classes,
            list(self.plan.names),
            tuple(self.plan.shape),
            [registry.counts.get(name, 0) for name in registry.names],
            # A node that protects its samples reports no scores.
            [sum(registry.tests.get(name, ())) for name in registry.names],
            {"network": "Flower"},
            last_counted=[registry.accepted.get(name, 0) for name in registry.names],
        )
        method = self.settings.method
        revisions = revisions_of(method, self.central.simulator.device.type)
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
        )
