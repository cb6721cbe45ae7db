"""The state of a simulated federation, the uploads of a round that update it, and the storage of their rows."""

import math
import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedrema.core import Answer, Mean, Role, State, Uploads, average
from fedrema.core.checks import BadMethod
from fedrema.core.fixed_point import QuantisedSum
from fedrema.engine import ClientTensors, Cohort, row_index
from fedrema.engine.cohort import RowIndex
from fedrema.engine.turns import wait
from fedrema.errors import BadInput, Diverged
from fedrema.models.body_and_head import Net, Tensors, size
from fedrema.simulation.records import RoundRecord
from fedrema.simulation.scoring import MetricSums

COMMON_ROLES = (Role.SHARED, Role.COLLECTED)
"""Roles of parameters of which all clients have the same copy."""


class RowStorage:
    """Allocates rows in memory or in memory-mapped files, which are ordinary tensors too.

    The files are temporary and have no names, so that none is left behind when the program ends.
    """

    def __init__(self, device: torch.device, on_disk: bool = False, folder: Path | None = None) -> None:
        self.device = torch.device("cpu") if on_disk else device
        self.on_disk = on_disk
        self.folder = folder
        self._maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    def zeros(self, rows: int, like: Tensor) -> Tensor:
        """Return zeros [rows, ...], each row in the shape of `like`."""
        shape = (rows, *like.shape)
        if not self.on_disk or not math.prod(shape):
            return torch.zeros(shape, dtype=like.dtype, device=self.device)
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                os.ftruncate(file.fileno(), math.prod(shape) * like.element_size())
                mapped = mmap.mmap(file.fileno(), 0)
        except OSError as error:
            where = self.folder or tempfile.gettempdir()
            raise BadInput(f"--scratch {where} cannot hold what does not fit into memory: {error}.") from error
        self._maps.add(mapped)
        return torch.frombuffer(mapped, dtype=like.dtype).view(shape)

    def keep(self, value: Tensor) -> Tensor:
        """Return rows in this storage; copies them if they are elsewhere."""
        if not self.on_disk:
            return value.to(self.device)
        stored = self.zeros(len(value), value[0]) if len(value) else value
        stored.copy_(value)
        return stored

    def release(self) -> None:
        """Release the memory that caches the files; their content is kept."""
        for mapped in list(self._maps):
            if hasattr(mapped, "madvise"):  # not on Windows
                mapped.madvise(mmap.MADV_DONTNEED)


class Rows:
    """Named tensors [count, ...] that are filled chunk by chunk."""

    def __init__(self, count: int, storage: RowStorage) -> None:
        self.count, self.storage = count, storage
        self.tensors: Tensors = {}

    def put(self, first: int, values: Tensors) -> None:
        """Write the rows of a chunk of clients, beginning with row `first`."""
        for name, value in values.items():
            if len(value) == self.count and not self.storage.on_disk:
                self.tensors[name] = value
                continue
            kept = self.tensors.get(name)
            if kept is None or kept.shape[1:] != value.shape[1:]:
                # Tensors with an entry per sample are as long as those of the largest client so far.
                kept = self._widened(kept, value)
            assign(kept, slice(first, first + len(value)), value)
            self.tensors[name] = kept

    def _widened(self, kept: Tensor | None, value: Tensor) -> Tensor:
        if kept is None:
            return self.storage.zeros(self.count, value[0])
        width = max(kept.shape[1], value.shape[1])
        wide = self.storage.zeros(self.count, value.new_empty(width, *value.shape[2:]))
        assign(wide, slice(None), kept)
        return wide


def assign(stored: Tensor, rows: RowIndex, values: Tensor) -> None:
    """Write some clients' rows in place; rows that are shorter (with an entry per sample) are padded with 0."""
    if stored.shape[1:] == values.shape[1:]:
        stored[rows] = values.to(stored)
    else:
        stored[rows] = 0
        stored[rows, : values.shape[1]] = values.to(stored)


class RoundUploads:
    """The results of all clients that trained in a round; shared parameters are added to a running mean at once."""

    def __init__(
        self,
        clients: Tensor,
        counts: Tensor,
        storage: RowStorage,
        keep_heads: bool,
        keep_shared: bool = False,
        summed: QuantisedSum | None = None,
    ) -> None:
        self.clients, self.counts = clients, counts
        self.weights = counts / counts.sum()
        memory = RowStorage(counts.device)
        self.mean = Mean()
        self.summed = summed
        """The sum of shared parameters as whole numbers, in place of their mean; with secure aggregation only."""
        self.shared = Rows(len(clients), memory) if keep_shared else None
        """Shared parameters of each client, where a defence needs them; None: only their mean is stored."""
        self.visible = Rows(len(clients), memory)
        """Parameters that the server sees for each client: personal and collected ones."""
        self.extras = Rows(len(clients), memory)
        self.heads = Rows(len(clients), memory) if keep_heads else None
        self.private = Rows(len(clients), storage)
        """Private parameters."""
        self.memory = Rows(len(clients), storage)
        self.velocity = Rows(len(clients), storage)
        self.losses: list[Tensor] = []
        self.names: list[str] = []
        self.scores: list[MetricSums] = []
        """Scores of each chunk right after local training."""
        self.norms: list[Tensor] = []
        """Norms of the updates of each chunk before clipping; with differential privacy only."""
        self.bytes_up = 0

    def add(self, cohort: Cohort, extras: Tensors, losses: Tensor, roles: Mapping[str, Role]) -> None:
        """Add the next chunk of clients after its training."""
        first, trained = len(self.names), cohort.params.own
        of = {role: {name: value for name, value in trained.items() if roles[name] is role} for role in Role}
        if self.summed is not None:
            self.summed.add(of[Role.SHARED], self.counts[first : first + len(cohort)])
        elif self.shared is None:
            self.mean.add(of[Role.SHARED], self.weights[first : first + len(cohort)])
        else:
            self.shared.put(first, of[Role.SHARED])
        self.visible.put(first, {**of[Role.COLLECTED], **of[Role.PERSONAL]})
        self.private.put(first, of[Role.PRIVATE])
        self.extras.put(first, extras)
        self.memory.put(first, cohort.memory.own)
        self.velocity.put(first, cohort.velocity)
        if self.heads is not None:
            self.heads.put(first, {name: value for name, value in trained.items() if Net.in_head(name)})
        self.losses.append(losses)
        self.names += cohort.names
        self.bytes_up += size(trained) - size(of[Role.PRIVATE]) + size(extras)
        if self.summed is not None:
            masked = self.summed.fixed_point.bytes_of(self.summed.length)
            self.bytes_up += len(cohort) * masked - size(of[Role.SHARED])

    def for_server(self) -> Uploads:
        """Return what the server receives."""
        rows = self.clients.to(self.counts.device)
        visible, extras = self.visible.tensors, self.extras.tensors
        mean = self.mean.total if self.summed is None else self.summed.mean()
        return Uploads(rows, visible, extras, self.counts, tuple(self.names), mean)

    def client_losses(self) -> Tensor:
        """Return the mean training loss of each client."""
        return torch.cat(self.losses)


def check_finite(cohort: Cohort, losses: Tensor, extras: Tensors, number: int) -> None:
    """Raise an error that names the clients whose training has diverged."""
    values = (*cohort.params.own.values(), *extras.values())
    sums = [value.sum(dim=tuple(range(1, value.dim()))) if value.dim() > 1 else value for value in values]
    finite = torch.isfinite(torch.stack([losses, *(total.to(losses) for total in sums)])).all(dim=0).tolist()
    if not all(finite):
        names = ", ".join(name for name, fine in zip(cohort.names, finite, strict=True) if not fine)
        raise Diverged(
            f"Training diverged in round {number}: the loss or weights of client {names} are not finite;"
            " a smaller --lr, or a smaller --clip above 0, may help."
        )


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
    privacy: Tensors = field(default_factory=dict)
    """With differential privacy: what has been spent, and the norm for clipping; on the CPU."""

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

        trained = {**uploads.visible.tensors, **uploads.private.tensors}
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
                if name not in self.inbox.own:
                    self.inbox.own[name] = value.new_zeros(self.clients, *value.shape[1:])
                put(self.inbox.own[name], value)
        self.server = answer.state

    def start_personal(self, untrained: Tensor, roles: Mapping[str, Role]) -> None:
        """Give clients that have not participated yet the mean of the other clients' personal parameters, in place."""
        if not 0 < len(untrained) < self.clients:
            return
        trained = torch.ones(self.clients)
        trained[untrained] = 0
        for name, rows in self.params.own.items():
            if roles[name] is Role.PERSONAL:
                rows[row_index(untrained, rows.device)] = average({name: rows}, trained.to(rows))[name]

    @contextmanager
    def unchanged_on_error(self, participants: Tensor, waiting: Tensor, storage: RowStorage) -> Iterator[None]:
        """Undo what the code in the context changes if it fails: `apply`, and the start of clients that wait."""

        def copied(tensors: Tensors) -> Tensors:
            copies: Tensors = {}
            for name, value in tensors.items():
                rows = value[row_index(clients, value.device)]
                copies[name] = storage.zeros(len(clients), value[0]).copy_(rows) if storage.on_disk else rows.clone()
            return copies

        clients = torch.cat([participants, waiting])
        groups = (self.params.own, self.memory, self.inbox.own, self.velocity)
        # Momentum is replaced instead of changed if all clients participate.
        replaced = len(participants) == self.clients
        kept = [{} if group is self.velocity and replaced else copied(group) for group in groups]
        entries = [(group, dict(group)) for group in (*groups, self.params.common, self.inbox.common)]
        number, server, privacy = self.round, self.server, self.privacy
        try:
            yield
        except BaseException:
            for group, before in entries:
                group.clear()
                group.update(before)
            for group, copies in zip(groups, kept, strict=True):
                for name, rows in copies.items():
                    group[name][row_index(clients, rows.device)] = rows
            self.round, self.server, self.privacy = number, server, privacy
            raise

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
    """Measures seconds by part of a round; each of several runs that are executed together records its share."""

    def __init__(self, device: torch.device, runs_together: int = 1) -> None:
        self.device = device
        self.runs_together = runs_together
        self.seconds = dict.fromkeys(("train", "aggregate", "evaluate", "other"), 0.0)
        self.last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Add the time since the last lap to a part."""
        wait(self.device)
        now = time.perf_counter()
        self.seconds[part] += (now - self.last) / self.runs_together
        self.last = now


def on_device(state: State, device: torch.device) -> State:
    """Return a server's state with its tensors on a device."""
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in state.items()}
