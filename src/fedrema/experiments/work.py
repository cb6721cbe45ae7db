"""What is still to be played of an experiment, and what is finished."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedrema.config.settings import Settings
from fedrema.experiments.spec import Cell, Line
from fedrema.experiments.store import Finished, Store, key_of
from fedrema.runs.joint import split_groups
from fedrema.runs.manifest import Inputs
from fedrema.runs.provenance import inputs_of


@dataclass(frozen=True)
class Task:
    """A cell with the seeds that are still missing."""

    cell: Cell
    seeds: tuple[int, ...]
    inputs: Inputs = field(default_factory=dict)
    """Digests of the user's files that it depends on, as they were when it was planned."""

    @property
    def runs(self) -> list[Settings]:
        """The settings of its runs."""
        return [self.cell.settings(seed) for seed in self.seeds]

    @property
    def keys(self) -> list[str]:
        """The keys of its runs."""
        return [key_of(settings, self.inputs) for settings in self.runs]

    @property
    def rounds(self) -> int:
        """How many rounds are to be played, over all its seeds."""
        return len(self.seeds) * self.cell.parsed.simulation.rounds

    def order(self) -> dict[str, Any]:
        """Return what another process, or machine, needs to play it; JSON."""
        cell = self.cell
        arguments = {"method": cell.method, "arguments": list(cell.arguments), "vary": cell.vary}
        return {"title": cell.title, **arguments, "seeds": list(self.seeds), "inputs": self.inputs}

    @classmethod
    def ordered(cls, order: dict[str, Any]) -> "Task":
        """Return the task that an order describes."""
        row, nothing = Line("", order["title"], {}), Line("", "", {})
        cell = Cell(row, nothing, order["method"], tuple(order["arguments"]), vary=order["vary"])
        return cls(cell, tuple(order["seeds"]), order["inputs"])


def missing(cells: Iterable[Cell], seeds: int, store: Store, known: set[str] | None = None) -> list[Task]:
    """Return what is neither in the store nor among the keys `known`, each run once; `known` grows by them.

    What the store has from an older revision is missing too.
    """
    known = set() if known is None else known
    tasks = []
    for cell in cells:
        inputs = inputs_of(cell.parsed)
        keys = {seed: key_of(cell.settings(seed), inputs) for seed in range(seeds)}
        absent = [seed for seed, key in keys.items() if key not in known and not store.has(key)]
        known.update(keys.values())
        # Runs on other data cannot train together: each is a task of its own.
        groups = [[seed] for seed in absent] if cell.vary == "both" else [absent] if absent else []
        tasks += [Task(cell, tuple(group), inputs) for group in groups]
    return tasks


def divided(tasks: Sequence[Task], workers: int) -> list[Task]:
    """Halve the largest tasks until there is one for each worker, as far as they can be halved."""
    parts = split_groups([[(task, seed) for seed in task.seeds] for task in tasks], workers)
    return [replace(part[0][0], seeds=tuple(seed for _, seed in part)) for part in parts]


def outdated(cells: Iterable[Cell], seeds: int, store: Store) -> set[str]:
    """Return the keys of runs in the store that an older revision computed."""
    settings = [cell.settings(seed) for cell in cells for seed in range(seeds)]
    return {key_of(each) for each in settings if (found := store.find(each)) is not None and found.outdated}


def finished(cell: Cell, seeds: int, store: Store) -> list[Finished]:
    """Return a cell's finished runs, in the order of their seeds; where it has none, its outdated ones."""
    found = [store.find(cell.settings(seed)) for seed in range(seeds)]
    ended = [one for one in found if one is not None]
    return [one for one in ended if not one.outdated] or ended
