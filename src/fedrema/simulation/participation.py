"""Draws which clients participate in which round, by seed, round and client name."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedrema.base.random import numpy_generator
from fedrema.core import Simulation


class Participation:
    """The clients that have joined, participate or fail, round by round."""

    def __init__(self, names: Sequence[str], settings: Simulation) -> None:
        self.names, self.settings = names, settings
        draws = [numpy_generator(settings.seed, name, "late").random() for name in names]
        late = np.argsort(draws, kind="stable")[: math.floor(settings.late * len(draws))]
        self.joins = [settings.late_round if row in late else 1 for row in range(len(draws))]
        """The round in which each client joins."""
        self._first_rounds: dict[int, int] = {}
        """The round in which each client first participated, up to `_counted_rounds`."""
        self._counted_rounds = 0

    def joined(self, number: int) -> list[int]:
        """Return the clients that have joined by a round."""
        return [row for row, joins in enumerate(self.joins) if joins <= number]

    def choose(self, number: int) -> tuple[list[int], list[int]]:
        """Return the clients whose uploads arrive in a round, and those that were chosen but fail."""
        seed, dropout = self.settings.seed, self.settings.dropout
        rows = {self.names[row]: row for row in self.joined(number)}
        chosen = sorted(rows[name] for name in draw_participants(seed, number, list(rows), self.settings.participation))
        if not dropout:
            return chosen, []
        failed = [row for row in chosen if participation_draws(seed, number, self.names[row])[1] < dropout]
        return [row for row in chosen if row not in failed], failed

    def waiting_clients(self, number: int) -> Tensor:
        """Return the late clients that have joined by a round and have not participated before it."""
        late = [row for row, joins in enumerate(self.joins) if 1 < joins <= number]
        if late:
            for earlier in range(self._counted_rounds + 1, number):
                for row in self.choose(earlier)[0]:
                    self._first_rounds.setdefault(row, earlier)
                self._counted_rounds = earlier
        return torch.tensor([row for row in late if self._first_rounds.get(row, number) >= number], dtype=torch.long)


def draw_participants(seed: int, number: int, names: Sequence[str], share: float, least: int = 1) -> list[str]:
    """Draw the participants of a round from the clients that have joined: a share of them, but at least `least`."""
    wanted = max(1, least, round(share * len(names)))
    if wanted >= len(names):
        return list(names)
    return sorted(names, key=lambda name: (participation_draws(seed, number, name)[0], name))[:wanted]


def participation_draws(seed: int, number: int, name: str) -> tuple[float, float]:
    """Return the random numbers that decide whether a client takes part in a round, and whether it fails."""
    first, second = numpy_generator(seed, number, name, "participation").random(2)
    return float(first), float(second)
