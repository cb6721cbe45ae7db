"""What changes from round to round, and what a round leaves behind."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedrema.core import Answer, Role, State
from fedrema.core.checks import BadMethod
from fedrema.engine import Stacked, places
from fedrema.errors import Diverged
from fedrema.models.body_and_head import Tensors, size
from fedrema.simulation.records import RoundRecord
from fedrema.simulation.row_storage import RowStorage, assign
from fedrema.simulation.uploads import RoundUploads

COMMON = (Role.SHARED, Role.COLLECTED)
"""Roles of which one copy serves everybody."""


@dataclass
class SimulationState:
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
            if role in COMMON and name not in answer.shared:
                raise BadMethod(f"{method}.aggregate must return {name!r} as shared.")
        for name in memory:
            if name not in self.memory:
                raise BadMethod(f"{method}.start must add {name!r} to the memory.")
        made = [*answer.shared.items(), *answer.personal.items()]
        # One question for all: on a GPU every answer is waited for.
        if made and not torch.isfinite(torch.stack([value.sum().to(made[0][1]) for _, value in made])).all():
            name = next(name for name, value in made if not torch.isfinite(value).all())
            raise Diverged(f"Training diverged in round {self.round + 1}: {method}.aggregate made {name} not finite.")

    def hand_out(self, collected: RoundUploads, roles: Mapping[str, Role], answer: Answer) -> None:
        """Put in place what came back from the server, and what the clients keep for themselves."""
        clients = collected.clients
        trained = {**collected.seen.tensors, **collected.kept.tensors}
        for name, role in roles.items():
            if role in COMMON:
                self.params.common[name] = answer.shared[name]
            else:
                self._put(self.params.own[name], clients, answer.personal.get(name, trained.get(name)))
        for name, value in collected.memory.tensors.items():
            self._put(self.memory[name], clients, value)
        for name, value in self.velocity.items():
            if len(clients) == self.clients:  # rows ascend; no method ever sees momentum, so nobody else holds it
                self.velocity[name] = collected.velocity.tensors[name]
            else:
                self._put(value, clients, collected.velocity.tensors[name])
        self.inbox.common.update({name: value for name, value in answer.shared.items() if name not in roles})
        for name, value in answer.personal.items():
            if name not in roles:
                everyone = value.new_zeros(self.clients, *value.shape[1:])
                self._put(self.inbox.own.setdefault(name, everyone), clients, value)
        self.server = answer.state

    def _put(self, everyone: Tensor, clients: Tensor, values: Tensor | None) -> None:
        assert values is not None
        assign(everyone, places(clients, self.clients, everyone.device), values)

    def download(self, roles: Mapping[str, Role], clients: list[int]) -> int:
        """Return the bytes that clients fetch at the start of a round."""
        common = {name: value for name, value in self.params.common.items() if roles[name] in COMMON}
        own = {name: value[0] for name, value in self.params.own.items() if roles[name] is Role.PERSONAL}
        # Nothing but zeros: this client has not had mail of its own yet.
        mail = {name: value[torch.tensor(clients)] for name, value in self.inbox.own.items()}
        came = {name: value[value.reshape(len(value), -1).any(dim=1)] for name, value in mail.items()}
        return (size(common) + size(self.inbox.common) + size(own)) * len(clients) + size(came)

    def placed(self, storage: RowStorage, device: torch.device) -> "SimulationState":
        """Return the same with what every client holds on a storage, and all else on a device."""

        def moved(tensors: Tensors) -> Tensors:
            return {name: value.to(device) for name, value in tensors.items()}

        def shelved(tensors: Tensors) -> Tensors:
            return {name: storage.keep(tensors.pop(name)) for name in list(tensors)}

        self.params = Stacked(shelved(self.params.own), moved(self.params.common))
        self.memory, self.velocity = shelved(self.memory), shelved(self.velocity)
        self.inbox = Stacked(moved(self.inbox.own), moved(self.inbox.common))
        self.server = on_device(self.server, device)
        return self


@dataclass(frozen=True)
class Round:
    """The result of a round: its record and, on request, matrices between clients."""

    record: RoundRecord
    relations: dict[str, np.ndarray] = field(default_factory=dict)


class Clock:
    """Seconds by part of a round; where several simulations train together, each counts its share."""

    def __init__(self, device: torch.device, company: int = 1) -> None:
        self.device = device
        self.company = company
        self.laps = dict.fromkeys(("train", "aggregate", "evaluate", "other"), 0.0)
        self.last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Add the time since the last lap to a part."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.laps[part] += (now - self.last) / self.company
        self.last = now


def on_device(state: State, device: torch.device) -> State:
    """Return a server's state with its tensors on a device."""
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in state.items()}
