"""What the server keeps on disk: a run's folder like any other, from which it goes on after a crash."""

import hashlib
import json
import platform
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import fedrema
from fedrema.deploy.central import Central, Registry
from fedrema.deploy.letters import Score
from fedrema.deploy.plan import Plan, run_config
from fedrema.errors import BadInput
from fedrema.runs.checkpoint import load_world, read_checkpoint, save_world
from fedrema.runs.directory import RunDirectory
from fedrema.runs.manifest import method_name
from fedrema.runs.player import playing
from fedrema.score import summarise
from fedrema.settings import Settings

WHERE = ("folder", "least-clients", "most-samples", "most-noise", "wait-seconds", "round-seconds", "rounds", "device")
"""What may change when a federation goes on."""


class Ledger:
    """Writes records, checkpoints and the summary; a round's accuracies come with the replies of the next."""

    def __init__(self, folder: Path, settings: Settings, plan: Plan, central: Central) -> None:
        self.directory, self.settings, self.plan, self.central = RunDirectory(folder), settings, plan, central
        what = {name: value for name, value in run_config(settings, plan).items() if name not in WHERE}
        self.identity = hashlib.sha256(json.dumps(sorted(what.items())).encode()).hexdigest()[:32]
        self.note = ExitStack()
        """Says in the folder that the federation goes on; after a crash it names a process that is gone."""
        self.pending: dict[str, Any] | None = None
        """The record of the last round, which still lacks its accuracies."""

    def take_up(self) -> None:
        """Go on from the last checkpoint, or begin."""
        directory = self.directory
        if directory.checkpoint_file.is_file():
            self._go_on()
        else:
            # One that was killed before it had closed a round has left nothing but its settings.
            mine = directory.config_file.is_file() and directory.config().get("identity") == self.identity
            directory.check_free(overwrite=mine and not directory.rounds())
            directory.create(self._config())
        self.note.enter_context(playing(directory.player_file, len(directory.rounds())))

    def _go_on(self) -> None:
        directory, central = self.directory, self.central
        facts, _ = read_checkpoint(directory.checkpoint_file)
        world = load_world(directory.checkpoint_file, self.identity)
        if world.clients != central.capacity:
            raise BadInput(f"{directory.path} was begun for {world.clients} clients, not {central.capacity}.")
        central.world = world.placed(central.simulator.shelf, central.simulator.device)
        central.registry = Registry.read(facts["more"]["registry"])
        self.pending = facts["more"]["pending"]
        directory.keep_rounds(world.round - 1 if self.pending else world.round)
        directory.summary_file.unlink(missing_ok=True)

    def scored(self, scores: Mapping[str, Score | None]) -> None:
        """Complete the last round's record by what clients say of the models that came of it."""
        if self.pending is not None:
            self.directory.append({**self.pending, **self.central.accuracies(scores)})
            self.pending = None

    def closed(self, record: dict[str, Any]) -> None:
        """Save a round that has been closed."""
        self.pending = record
        more = {"registry": self.central.registry.plain(), "pending": record}
        save_world(self.central.world, self.directory.checkpoint_file, self.identity, more)
        self.directory.write_json(self.directory.config_file, self._config())

    def finish(self, scores: Mapping[str, Score | None]) -> None:
        """Write the last record and the summary."""
        self.scored(scores)
        self.directory.write_json(self.directory.summary_file, summarise(self.directory.rounds()))
        self.note.close()

    def _config(self) -> dict[str, Any]:
        return {
            "method": method_name(self.settings.method),
            "settings": self.settings.flat(),
            "identity": self.identity,
            "federation": {
                # Nobody here has seen the samples: the names are all that is known of them.
                "fingerprint": hashlib.sha256(json.dumps(self.central.registry.names).encode()).hexdigest(),
                "names": list(self.central.registry.names),
                "classes": self.plan.classes,
                "sample_shape": list(self.plan.shape),
                "info": {"network": "Flower"},
            },
            "ran_on": {
                "device": str(self.central.simulator.device),
                "started": datetime.now(UTC).isoformat(timespec="seconds"),
                "python": platform.python_version(),
                "versions": {"fedrema": fedrema.__version__, "torch": torch.__version__},
            },
        }
