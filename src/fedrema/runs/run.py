"""A finished or growing run, to look at."""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedrema.errors import BadInput
from fedrema.runs.checkpoint import load_world
from fedrema.runs.directory import RunDirectory
from fedrema.score import summarise
from fedrema.world import World


def is_finished(folder: Path) -> bool:
    """Tell whether a folder holds a run that has come to its end."""
    return (folder / "config.json").is_file() and Run(folder).finished


class Run:
    """What a run's folder holds.

    Examples
    --------
    >>> run = fedrema.load("runs/fedrema-digits")        # doctest: +SKIP
    >>> run.summary["best_accuracy"]                      # doctest: +SKIP
    >>> run.curve("accuracy")                             # doctest: +SKIP
    """

    def __init__(self, path: Path | str) -> None:
        self.directory = RunDirectory.open(Path(path))
        self.path = self.directory.path
        self.config: dict[str, Any] = self.directory.config()

    def __repr__(self) -> str:
        best = self.summary.get("best_accuracy")
        score = f", best {best:.1%}" if best is not None else ""
        return f"Run({str(self.path)!r}: {self.method}, {len(self.rounds)} rounds{score})"

    @property
    def method(self) -> str:
        """The method's name."""
        return str(self.config["method"])

    @property
    def settings(self) -> dict[str, Any]:
        """All settings, under their names on the command line."""
        return dict(self.config["settings"])

    @property
    def names(self) -> list[str]:
        """The clients' names."""
        return list(self.config["federation"]["names"])

    @property
    def finished(self) -> bool:
        """Whether it has come to its end."""
        return self.directory.finished()

    @cached_property
    def rounds(self) -> list[dict[str, Any]]:
        """A record per round, as far as it has come when first asked."""
        return self.directory.rounds()

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Headline numbers; of the rounds so far where the run has not ended."""
        return self.directory.summary() or summarise(self.rounds)

    def curve(self, quantity: str = "accuracy") -> tuple[np.ndarray, np.ndarray]:
        """Return rounds and values of a quantity of the records, or of the method's trace."""
        pairs = [
            (record["round"], record.get(quantity, record.get("trace", {}).get(quantity))) for record in self.rounds
        ]
        known = [(number, value) for number, value in pairs if value is not None]
        if not known:
            raise BadInput(f"{self.path} has no {quantity!r} in its rounds.")
        return np.array([number for number, _ in known]), np.array([value for _, value in known])

    def relations(self) -> dict[int, dict[str, np.ndarray]]:
        """Return the matrices between clients by round: S, sets and G (runs with --record relations)."""
        return self.directory.relations(count=self.summary.get("recorded_relations") if self.finished else None)

    def world(self) -> World:
        """Return the last saved state."""
        self.directory.check_version()
        return load_world(self.directory.checkpoint_file, self.config["identity"])

    def personal_model(self, client: str | int) -> dict[str, Tensor]:
        """Return a client's parameters as of the last checkpoint, by name or row."""
        row = client if isinstance(client, int) else self._row(client)
        if not 0 <= row < len(self.names):
            raise BadInput(f"There is no client {client} in {self.path}; rows go from 0 to {len(self.names) - 1}.")
        return self.world().params.row(row)

    def _row(self, client: str) -> int:
        if client not in self.names:
            raise BadInput(f"There is no client {client!r} in {self.path}; it has {', '.join(self.names[:10])} …")
        return self.names.index(client)
