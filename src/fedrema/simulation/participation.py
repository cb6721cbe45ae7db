"""Draws which clients participate in which round, by seed, round and client name."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedrema.core import Simulation
from fedrema.simulation.keyed_draws import KeyedDraws

NEVER = np.iinfo(np.int64).max


class Participation:
    """The clients that have joined, participate or fail, round by round."""

    def __init__(self, names: Sequence[str], settings: Simulation) -> None:
        self.settings = settings
        joins = np.ones(len(names), np.int64)
        if settings.late:
            draws = KeyedDraws(names, "late").uniform(settings.seed)[:, 0]
            late = np.argsort(draws, kind="stable")[: math.floor(settings.late * len(names))]
            joins[late] = settings.late_round
        self.joins: list[int] = joins.tolist()
        """The round in which each client joins."""
        self._late = np.flatnonzero(joins > 1)
        self._joined = {number: np.flatnonzero(joins <= number) for number in (1, settings.late_round)}
        self._by_name = np.array(sorted(range(len(names)), key=names.__getitem__), np.int64)
        self._draws = KeyedDraws([names[row] for row in self._by_name], "participation")
        self._chosen: dict[int, tuple[list[int], list[int]]] = {}
        """The participants of the most recently drawn rounds."""
        self._first_rounds = np.full(len(names), NEVER)
        """The round in which each client first participated, up to `_counted_rounds`."""
        self._counted_rounds = 0

    def joined(self, number: int) -> list[int]:
        """Return the clients that have joined by a round."""
        rows: list[int] = self._joined_rows(number).tolist()
        return rows

    def joined_count(self, number: int) -> int:
        """Return how many clients have joined by a round."""
        return len(self._joined_rows(number))

    def _joined_rows(self, number: int) -> np.ndarray:
        return self._joined[self.settings.late_round if number >= self.settings.late_round else 1]

    def choose(self, number: int) -> tuple[list[int], list[int]]:
        """Return the clients whose uploads arrive in a round, and those that were chosen but fail."""
        if number not in self._chosen:
            if len(self._chosen) == 4:  # rounds are drawn ahead, and looked up again shortly afterwards
                del self._chosen[min(self._chosen)]
            self._chosen[number] = self._choose(number)
        chosen, failed = self._chosen[number]
        return list(chosen), list(failed)

    def _choose(self, number: int) -> tuple[list[int], list[int]]:
        joined, share, dropout = self._joined_rows(number), self.settings.participation, self.settings.dropout
        wanted = _wanted(len(joined), share)
        if wanted == len(joined) and not dropout:
            return joined.tolist(), []
        draws = self._draws.uniform(self.settings.seed, number)
        is_joined = np.zeros(len(self.joins), bool)
        is_joined[joined] = True
        candidates = np.flatnonzero(is_joined[self._by_name])  # in the order of names, which decides between equals
        chosen = candidates[np.argsort(draws[candidates, 0], kind="stable")[:wanted]]
        fails = draws[chosen, 1] < dropout
        present, failed = (np.sort(self._by_name[chosen[rows]]).tolist() for rows in (~fails, fails))
        return present, failed

    def waiting_clients(self, number: int) -> Tensor:
        """Return the late clients that have joined by a round and have not participated before it."""
        if not len(self._late) or number < self.settings.late_round:
            return torch.empty(0, dtype=torch.long)
        self._count_rounds_before(number)
        return torch.from_numpy(self._late[self._first_rounds[self._late] >= number])

    def untrained_clients(self, number: int) -> Tensor:
        """Return the clients that have not participated before a round, whether or not they have joined."""
        self._count_rounds_before(number)
        return torch.from_numpy(np.flatnonzero(self._first_rounds >= number))

    def _count_rounds_before(self, number: int) -> None:
        for earlier in range(self._counted_rounds + 1, number):
            rows = self.choose(earlier)[0]
            self._first_rounds[rows] = np.minimum(self._first_rounds[rows], earlier)
            self._counted_rounds = earlier


def draw_participants(seed: int, number: int, names: Sequence[str], share: float, least: int = 1) -> list[str]:
    """Draw the participants of a round from the clients that have joined: a share of them, but at least `least`."""
    wanted = _wanted(len(names), share, least)
    if wanted == len(names):
        return list(names)
    by_name = sorted(names)  # the order of names decides between equal draws
    draws = KeyedDraws(by_name, "participation").uniform(seed, number)[:, 0]
    return [by_name[place] for place in np.argsort(draws, kind="stable")[:wanted]]


def _wanted(joined: int, share: float, least: int = 1) -> int:
    return min(max(1, least, round(share * joined)), joined)
