"""What changes from round to round, and what a round leaves behind."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedrema.core import Answer, Role, State
from fedrema.engine import Stacked
from fedrema.errors import Diverged
from fedrema.net import Tensors


@dataclass
class World:
    """Everything that changes from round to round; a checkpoint holds exactly this."""

    clients: int
    """How many there are."""
    round: int
    params: Stacked
    """Shared parameters once, personal and private ones for every client."""
    memory: Tensors
    """[K, ...] what clients keep for themselves."""
    inbox: Stacked
    """What the server sent beside parameters."""
    velocity: Tensors
    """[K, ...] momentum, where it is kept between rounds."""
    server: State

    def check(self, answer: Answer, roles: Mapping[str, Role], memory: Tensors, method: str) -> None:
        """Refuse an answer that cannot be handed out, before anything changes: no half a round is left behind."""
        for name, role in roles.items():
            if role is Role.SHARED and name not in answer.shared:
                raise TypeError(f"{method}.aggregate must return {name!r} as shared.")
        for name in memory:
            if name not in self.memory:
                raise TypeError(f"{method}.start must add {name!r} to the memory.")
        for name, value in (*answer.shared.items(), *answer.personal.items()):
            if not torch.isfinite(value).all():
                raise Diverged(
                    f"Training diverged in round {self.round + 1}: {method}.aggregate made {name} not finite."
                )

    def hand_out(
        self,
        rows: Tensor,
        trained: Tensors,
        memory: Tensors,
        velocity: Tensors,
        roles: Mapping[str, Role],
        answer: Answer,
    ) -> None:
        """Put in place what came back from the server, and what the clients in `rows` keep for themselves."""
        for name, value in trained.items():
            if roles[name] is Role.SHARED:
                self.params.common[name] = answer.shared[name]
            else:
                self.params.own[name][rows] = answer.personal.get(name, value).to(value.dtype)
        for name, value in memory.items():
            self.memory[name][rows] = value
        for name, value in self.velocity.items():
            if len(rows) == self.clients:  # rows ascend; no method ever sees momentum, so nobody else holds it
                self.velocity[name] = velocity[name]
            else:
                value[rows] = velocity[name]
        self.inbox.common.update({name: value for name, value in answer.shared.items() if name not in roles})
        for name, value in answer.personal.items():
            if name not in roles:
                everyone = value.new_zeros(self.clients, *value.shape[1:])
                self.inbox.own.setdefault(name, everyone)[rows] = value
        self.server = answer.state

    def download(self, roles: Mapping[str, Role], rows: Tensor) -> int:
        """Return the bytes that clients fetch at the start of a round."""
        common = {name: value for name, value in self.params.common.items() if roles[name] is Role.SHARED}
        own = {name: value[rows] for name, value in self.params.own.items() if roles[name] is Role.PERSONAL}
        # Nothing but zeros: this client has not had mail of its own yet.
        mail = {name: value[rows] for name, value in self.inbox.own.items()}
        came = {name: value[value.reshape(len(value), -1).any(dim=1)] for name, value in mail.items()}
        return (size(common) + size(self.inbox.common)) * len(rows) + size(own) + size(came)


@dataclass(frozen=True)
class Round:
    """What a round leaves behind: a record of plain numbers and, on request, matrices between clients."""

    record: dict[str, Any]
    relations: dict[str, np.ndarray] = field(default_factory=dict)


class Clock:
    """Seconds by part of a round."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.laps = dict.fromkeys(("train", "aggregate", "evaluate", "other"), 0.0)
        self.last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Add the time since the last lap to a part."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.laps[part] += now - self.last
        self.last = now


def size(tensors: Tensors) -> int:
    """Return the bytes that tensors take on the wire."""
    return sum(value.numel() * value.element_size() for value in tensors.values())
