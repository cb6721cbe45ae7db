"""The state of a simulated federation, which every round updates, and the result of a round."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from fedrema.core import Answer, Role, State
from fedrema.core.checks import BadMethod
from fedrema.engine import ClientTensors, row_index
from fedrema.engine.cohort import RowIndex
from fedrema.errors import Diverged
from fedrema.models.body_and_head import Tensors, size
from fedrema.simulation.records import RoundRecord
from fedrema.simulation.row_storage import RowStorage, assign
from fedrema.simulation.uploads import RoundUploads

COMMON_ROLES = (Role.SHARED, Role.COLLECTED)
"""Roles of parameters of which all clients have the same copy."""


@dataclass
class SimulationState:
    """Everything that changes from round to round; the content of a checkpoint."""

    clients: int
    """Number of clients K."""
    round: int
    params: ClientTensors
    """Shared and collected parameters once, personal and private ones for every client."""
    memory: Tensors
    """[K, ...] private tensors of the clients."""
    inbox: ClientTensors
    """Tensors that the server sent in addition to parameters."""
    velocity: Tensors
    """[K, ...] momentum, if it is kept between rounds."""
    server: State

    def check(self, answer: Answer, roles: Mapping[str, Role], memory: Tensors, method: str) -> None:
        """Raise an error for an answer that cannot be applied, before anything changes."""
        for name, role in roles.items():
            if role in COMMON_ROLES and name not in answer.shared:
                raise BadMethod(f"{method}.aggregate must return {name!r} as shared.")
        for name in memory:
            if name not in self.memory:
                raise BadMethod(f"{method}.start must add {name!r} to the memory.")
        made = [*answer.shared.items(), *answer.personal.items()]
        # A single check of all tensors: each one synchronises with the GPU.
        if made and not torch.isfinite(torch.stack([value.sum().to(made[0][1]) for _, value in made])).all():
            name = next(name for name, value in made if not torch.isfinite(value).all())
            raise Diverged(f"Training diverged in round {self.round + 1}: {method}.aggregate made {name} not finite.")

    def apply(self, uploads: RoundUploads, roles: Mapping[str, Role], answer: Answer) -> None:
        """Store the server's answer, and the clients' private parameters, memory and momentum."""
        indices: dict[torch.device, RowIndex] = {}

        def put(stored: Tensor, values: Tensor | None) -> None:
            assert values is not None
            if stored.device not in indices:
                indices[stored.device] = row_index(uploads.clients, stored.device)
            assign(stored, indices[stored.device], values)

        trained = {**uploads.seen.tensors, **uploads.kept.tensors}
        for name, role in roles.items():
            if role in COMMON_ROLES:
                self.params.common[name] = answer.shared[name]
            else:
                put(self.params.own[name], answer.personal.get(name, trained.get(name)))
        for name, value in uploads.memory.tensors.items():
            put(self.memory[name], value)
        for name, value in self.velocity.items():
            if len(uploads.clients) == self.clients:  # no copy: methods cannot hold references to momentum
                self.velocity[name] = uploads.velocity.tensors[name]
            else:
                put(value, uploads.velocity.tensors[name])
        self.inbox.common.update({name: value for name, value in answer.shared.items() if name not in roles})
        for name, value in answer.personal.items():
            if name not in roles:
                zeros = value.new_zeros(self.clients, *value.shape[1:])
                put(self.inbox.own.setdefault(name, zeros), value)
        self.server = answer.state

    def download(self, roles: Mapping[str, Role], clients: list[int]) -> int:
        """Return the bytes that clients download at the start of a round."""
        common = {name: value for name, value in self.params.common.items() if roles[name] in COMMON_ROLES}
        own = {name: value[0] for name, value in self.params.own.items() if roles[name] is Role.PERSONAL}
        # A row of zeros belongs to a client that has not received this tensor yet.
        inboxes = {name: value[torch.tensor(clients)] for name, value in self.inbox.own.items()}
        sent = {name: value[value.reshape(len(value), -1).any(dim=1)] for name, value in inboxes.items()}
        return (size(common) + size(self.inbox.common) + size(own)) * len(clients) + size(sent)

    def placed(self, storage: RowStorage, device: torch.device) -> "SimulationState":
        """Move the rows of the clients to a storage and everything else to a device; returns this state."""

        def moved(tensors: Tensors) -> Tensors:
            return {name: value.to(device) for name, value in tensors.items()}

        def stored(tensors: Tensors) -> Tensors:
            return {name: storage.keep(tensors.pop(name)) for name in list(tensors)}

        self.params = ClientTensors(stored(self.params.own), moved(self.params.common))
        self.memory, self.velocity = stored(self.memory), stored(self.velocity)
        self.inbox = ClientTensors(moved(self.inbox.own), moved(self.inbox.common))
        self.server = on_device(self.server, device)
        return self


@dataclass(frozen=True)
class Round:
    """The result of a round: its record and, if requested, matrices between clients."""

    record: RoundRecord
    relations: dict[str, np.ndarray] = field(default_factory=dict)


class Clock:
    """Measures seconds by part of a round; each of several jointly trained simulations records its share."""

    def __init__(self, device: torch.device, joint_runs: int = 1) -> None:
        self.device = device
        self.joint_runs = joint_runs
        self.seconds = dict.fromkeys(("train", "aggregate", "evaluate", "other"), 0.0)
        self.last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Add the time since the last lap to a part."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds[part] += (now - self.last) / self.joint_runs
        self.last = now


def on_device(state: State, device: torch.device) -> State:
    """Return a server's state with its tensors on a device."""
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in state.items()}
