"""What is still to be played of an experiment, and what is finished."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fedrema.grid.experiment import Cell, Line
from fedrema.grid.store import Finished, Store, key_of
from fedrema.runs.together import shares
from fedrema.settings import Settings


@dataclass(frozen=True)
class Task:
    """A cell with the seeds that are still missing."""

    cell: Cell
    seeds: tuple[int, ...]

    @property
    def runs(self) -> list[Settings]:
        """The settings of its runs."""
        return [self.cell.settings(seed) for seed in self.seeds]

    @property
    def rounds(self) -> int:
        """How many rounds are to be played, over all its seeds."""
        return len(self.seeds) * self.cell.parsed.simulation.rounds

    def order(self) -> dict[str, Any]:
        """Return what another process, or machine, needs to play it; JSON."""
        cell = self.cell
        arguments = {"method": cell.method, "arguments": list(cell.arguments), "vary": cell.vary}
        return {"title": cell.title, **arguments, "seeds": list(self.seeds)}

    @classmethod
    def ordered(cls, order: dict[str, Any]) -> "Task":
        """Return the task that an order describes."""
        row, nothing = Line("", order["title"], {}), Line("", "", {})
        cell = Cell(row, nothing, order["method"], tuple(order["arguments"]), vary=order["vary"])
        return cls(cell, tuple(order["seeds"]))


def missing(cells: Iterable[Cell], seeds: int, store: Store, known: set[str] | None = None) -> list[Task]:
    """Return what is neither in the store nor among the keys `known`, each run once; `known` grows by them."""
    known = set() if known is None else known
    tasks = []
    for cell in cells:
        keys = {seed: key_of(cell.settings(seed)) for seed in range(seeds)}
        absent = [seed for seed, key in keys.items() if key not in known and not store.has(key)]
        known.update(keys.values())
        # Runs on other data cannot train together: each is a task of its own.
        groups = [[seed] for seed in absent] if cell.vary == "both" else [absent] if absent else []
        tasks += [Task(cell, tuple(group)) for group in groups]
    return tasks


def divided(tasks: Sequence[Task], workers: int) -> list[Task]:
    """Halve the largest tasks until there is one for each worker, as far as they can be halved."""
    parts = shares([[(task.cell, seed) for seed in task.seeds] for task in tasks], workers)
    return [Task(part[0][0], tuple(seed for _, seed in part)) for part in parts]


def finished(cell: Cell, seeds: int, store: Store) -> list[Finished]:
    """Return a cell's finished runs, in the order of their seeds."""
    found = (store.find(cell.settings(seed)) for seed in range(seeds))
    return [one for one in found if one is not None]
