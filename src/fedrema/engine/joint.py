"""Several simulations of the same federation train as one program: seeds are nothing but more clients."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedrema.core import Method
from fedrema.engine.batches import Order
from fedrema.engine.cohort import Cohort, Engine, Hook, Job, Samples, Stacked
from fedrema.models.body_and_head import Tensors


@dataclass(frozen=True, eq=False)
class Scoring:
    """Scores that are to be found."""

    method: Method
    cohort: Cohort
    samples: Samples


class Room:
    """Where simulations meet: each runs in a thread of its own, but only while it holds the baton.

    One that wants to train or score waits; when all wait, what they want is done at once for all. So threads never
    compute side by side, and the order of things is always the same.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.baton = threading.Condition()
        self.parties: list[Party] = []
        self.waiting: dict[Party, Job | Scoring] = {}
        self.results: dict[Party, Any] = {}

    def play(self, works: Sequence[Callable[["Party"], Any]]) -> list[Any]:
        """Do several pieces of work, each with an engine of its own; where one fails, its error is its result."""
        results: list[Any] = [None] * len(works)
        self.parties = [Party(self) for _ in works]

        def do(number: int, party: Party) -> None:
            with self.baton:
                try:
                    results[number] = works[number](party)
                except BaseException as error:  # handed to the caller's thread
                    results[number] = error
                finally:
                    self.parties.remove(party)
                    self._serve()  # the others may have waited for this one

        numbered = enumerate(list(self.parties))
        threads = [threading.Thread(target=do, args=each, daemon=True) for each in numbered]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():  # waiting without end would keep Ctrl-C from being heard
                thread.join(0.2)
        return results

    def meet(self, party: "Party", wish: Job | Scoring) -> Any:
        """Wait until all others wait too; returns what was wished for."""
        self.waiting[party] = wish
        self._serve()
        while party not in self.results:
            self.baton.wait()
        result = self.results.pop(party)
        if isinstance(result, BaseException):
            raise result
        return result

    def _serve(self) -> None:
        if not self.parties or len(self.waiting) < len(self.parties):
            return
        parties = [party for party in self.parties if party in self.waiting]
        wishes = [self.waiting.pop(party) for party in parties]
        try:
            results = self._grant(wishes)
        except Exception as error:  # everyone waits for it, so everyone must hear of it
            results = [error] * len(parties)
        self.results.update(zip(parties, results, strict=True))
        self.baton.notify_all()

    def _grant(self, wishes: list[Job | Scoring]) -> list[Any]:
        whole = joined(wishes)
        if whole is None:
            return [self._alone(wish) for wish in wishes]
        sizes, found = [len(wish.cohort) for wish in wishes], self._alone(whole)
        if isinstance(whole, Scoring):
            return list(torch.split(found, sizes))
        params, velocity, losses = found
        return list(zip(_apart(params, sizes), _apart(velocity, sizes), torch.split(losses, sizes), strict=True))

    def _alone(self, wish: Job | Scoring) -> Any:
        if isinstance(wish, Job):
            return self.engine.train(wish)
        return self.engine.scores(wish.method, wish.cohort, wish.samples)


class Party:
    """The engine of one simulation among several."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.name = room.engine.name
        self.net = room.engine.net
        self.threads = room.engine.threads

    def each(self, hook: Hook, cohort: Cohort, samples: Samples | None) -> dict[str, Tensors]:
        """Apply a hook to every client; a hook belongs to one simulation, so this is not done together."""
        return self.room.engine.each(hook, cohort, samples)

    def scores(self, method: Method, cohort: Cohort, samples: Samples) -> Tensor:
        """Return the class each client predicts for each of its samples."""
        scores: Tensor = self.room.meet(self, Scoring(method, cohort, samples))
        return scores

    def train(self, job: Job) -> tuple[Tensors, Tensors, Tensor]:
        """Return trained parameters, momentum and mean losses."""
        trained: tuple[Tensors, Tensors, Tensor] = self.room.meet(self, job)
        return trained


def joined(wishes: Sequence[Job | Scoring]) -> Job | Scoring | None:
    """Return several wishes as one; None where they are not the same work for other clients, or there is only one."""
    first, cohorts = wishes[0], [wish.cohort for wish in wishes]
    alike = all(wish.method == first.method and wish.samples is first.samples for wish in wishes)
    if len(wishes) < 2 or not alike or not _same_names(cohorts):
        return None
    jobs = [wish for wish in wishes if isinstance(wish, Job)]
    if len(jobs) == len(wishes):
        return joined_job(jobs)
    return None if jobs else replace(first, cohort=joined_cohort(cohorts))


def joined_job(jobs: Sequence[Job]) -> Job | None:
    """Return jobs of one method on one federation as one; None where they train differently."""
    first = jobs[0]
    phases = [[phase for phase, _ in job.plan] for job in jobs]
    if any(each != phases[0] for each in phases):
        return None
    if any(job.local != first.local or job.velocity.keys() != first.velocity.keys() for job in jobs):
        return None
    orders = zip(*([order for _, order in job.plan] for job in jobs), strict=True)
    plan = [(phase, joined_order(order)) for phase, order in zip(phases[0], orders, strict=True)]
    velocity = {name: torch.cat([job.velocity[name] for job in jobs]) for name in first.velocity}
    return replace(first, cohort=joined_cohort([job.cohort for job in jobs]), plan=plan, velocity=velocity)


def joined_cohort(cohorts: Sequence[Cohort]) -> Cohort:
    """Return several cohorts as one; what was common to a cohort becomes each client's own."""

    def joined(groups: Sequence[Stacked]) -> Stacked:
        names = groups[0].merged()
        spread = [
            {name: value.expand(len(cohort), *value.shape) for name, value in group.common.items()} | group.own
            for group, cohort in zip(groups, cohorts, strict=True)
        ]
        return Stacked({name: torch.cat([each[name] for each in spread]) for name in names})

    at_first = None if cohorts[0].received is None else joined([cohort.at_first() for cohort in cohorts])
    return Cohort(
        torch.cat([cohort.clients for cohort in cohorts]),
        tuple(name for cohort in cohorts for name in cohort.names),
        joined([cohort.params for cohort in cohorts]),
        joined([cohort.memory for cohort in cohorts]),
        joined([cohort.inbox for cohort in cohorts]),
        torch.cat([cohort.counts for cohort in cohorts]),
        at_first,
    )


def joined_order(orders: Sequence[Order]) -> Order:
    """Return the batches of several cohorts as those of one."""
    steps, _, width = (max(order.index.shape[axis] for order in orders) for axis in (1, 2, 3))

    def padded(numbers: np.ndarray) -> np.ndarray:
        missing = [(0, 0), (0, steps - numbers.shape[1]), (0, 0), (0, width - numbers.shape[-1])]
        return np.pad(numbers, missing[: numbers.ndim])

    return Order(
        np.concatenate([padded(order.index) for order in orders]),
        np.concatenate([padded(order.sizes) for order in orders]),
        np.concatenate([order.steps for order in orders]),
    )


def _same_names(cohorts: Sequence[Cohort]) -> bool:
    def names(cohort: Cohort) -> list[Any]:
        groups = (cohort.params, cohort.memory, cohort.inbox)
        return [cohort.received is None, *({name: value.shape[0 if name in group.common else 1 :]
                for name, value in group.merged().items()} for group in groups)]  # fmt: skip

    return all(names(cohort) == names(cohorts[0]) for cohort in cohorts)


def _apart(tensors: Tensors, sizes: list[int]) -> list[Tensors]:
    parts = {name: torch.split(value, sizes) for name, value in tensors.items()}
    return [{name: part[number] for name, part in parts.items()} for number in range(len(sizes))]
