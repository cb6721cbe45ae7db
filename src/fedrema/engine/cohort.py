"""Many clients as stacked tensors: what is the same for all is held once."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from fedrema.core import Batch, Client, LocalTraining, Method, Phase
from fedrema.engine.batches import Order
from fedrema.models.body_and_head import Net, Tensors


@dataclass(frozen=True)
class Stacked:
    """Named tensors of k clients: `own` has a leading client axis, `common` is one copy for all."""

    own: Tensors = field(default_factory=dict)
    common: Tensors = field(default_factory=dict)

    def row(self, k: int) -> Tensors:
        """Return one client's tensors, as views."""
        return {**self.common, **{name: value[k] for name, value in self.own.items()}}

    def rows(self, index: "Tensor | slice") -> "Stacked":
        """Return some of the clients."""
        return Stacked({name: value[index] for name, value in self.own.items()}, self.common)

    def merged(self) -> Tensors:
        """Return all tensors; those of `common` without a client axis."""
        return {**self.common, **self.own}

    def axes(self) -> dict[str, int | None]:
        """Return where each tensor of `merged` has its client axis."""
        return {**dict.fromkeys(self.common, None), **dict.fromkeys(self.own, 0)}

    def copied(self, k: int) -> Tensors:
        """Return a fresh copy of everything for each of k clients."""
        copies = {name: value.expand(k, *value.shape).clone() for name, value in self.common.items()}
        return {**copies, **{name: value.clone() for name, value in self.own.items()}}

    def zeros(self, k: int, wanted: Callable[[str], bool]) -> Tensors:
        """Return zeros in the shape of what k clients have of the wanted names."""
        return {name: value.new_zeros(k, *value.shape) for name, value in self.row(0).items() if wanted(name)}

    def to(self, device: torch.device) -> "Stacked":
        """Return the same on a device."""
        own, common = ({name: value.to(device) for name, value in group.items()} for group in (self.own, self.common))
        return Stacked(own, common)


def places(clients: Tensor, everyone: int, device: torch.device) -> Tensor | slice:
    """Return what picks these clients' rows out of everyone's: without a copy where they are neighbours."""
    if len(clients) and torch.equal(clients, torch.arange(int(clients[0]), int(clients[0]) + len(clients))):
        first, last = int(clients[0]), int(clients[-1])
        return slice(None) if len(clients) == everyone else slice(first, last + 1)
    return clients.to(device)


@dataclass(frozen=True)
class Samples:
    """One part of all clients' data on the device, padded to one length."""

    x: Tensor
    """[K, n, ...]"""
    y: Tensor
    """[K, n]"""
    counts: Tensor
    """[K] how many of the n are real; on the CPU."""
    precision: torch.dtype = torch.float32
    """In which masks are computed where `x` holds integers."""

    @property
    def mask_dtype(self) -> torch.dtype:
        """The type of masks: that of the samples, unless those are integers."""
        return self.x.dtype if self.x.is_floating_point() else self.precision

    def of(self, client: int) -> Batch:
        """Return all real samples of one client."""
        n = int(self.counts[client])
        x = self.x[client, :n]
        return Batch(x, self.y[client, :n], x.new_ones(n, dtype=self.mask_dtype), torch.arange(n, device=x.device))

    def stacked(self, clients: Tensor) -> Batch:
        """Return all samples of some clients, padding masked."""
        return self.gathered(places(clients, len(self.x), self.x.device), self.counts[clients].to(self.x.device))

    def gathered(self, rows: Tensor | slice, counts: Tensor) -> Batch:
        """Return all samples of some rows that have so many each; nothing waits for the device."""
        x = self.x[rows]
        order = torch.arange(x.shape[1], device=x.device)
        mask = order < counts[:, None]
        return Batch(x, self.y[rows], mask.to(self.mask_dtype), order.expand(len(counts), -1))


@dataclass(frozen=True)
class Cohort:
    """Clients that train together."""

    clients: Tensor
    """[k] their rows in the federation; on the CPU."""
    names: tuple[str, ...]
    params: Stacked
    memory: Stacked
    inbox: Stacked
    counts: Tensor
    """[k] their numbers of training samples."""
    received: Stacked | None = None
    """Their parameters when the round began, where those are not `params`: they have trained since."""

    def __len__(self) -> int:
        return len(self.names)

    def at_first(self) -> Stacked:
        """Return their parameters when the round began."""
        return self.params if self.received is None else self.received

    def one(self, k: int) -> Client:
        """Return the client in row k."""
        received = self.at_first().row(k)
        params = received if self.received is None else self.params.row(k)
        return Client(params, received, self.memory.row(k), self.inbox.row(k), self.counts[k])

    def all(self) -> Client:
        """Return all clients as one whose tensors have a client axis, except what is common."""
        received = self.at_first().merged()
        params = received if self.received is None else self.params.merged()
        return Client(params, received, self.memory.merged(), self.inbox.merged(), self.counts)


@dataclass(frozen=True)
class Job:
    """Local training that is to be done."""

    method: Method
    cohort: Cohort
    samples: Samples
    plan: list[tuple[Phase, Order]]
    """Phase by phase, with the batches of each client."""
    local: LocalTraining
    velocity: Tensors
    """[k, ...] momentum to begin with, of everything that is ever trained."""
    key: tuple[int | str, ...]
    """What randomness inside layers belongs to, beside the client's name."""


Hook = Callable[[Client, Batch], dict[str, Tensors]]
"""A method's hook for one client: groups of named tensors come out."""


class Engine(Protocol):
    """What both backends do; `fedrema.engine.loop` and `fedrema.engine.stacked` say how."""

    name: str
    net: Net
    threads: int | None

    def each(self, hook: Hook, cohort: Cohort, samples: Samples | None) -> dict[str, Tensors]: ...
    def scores(self, method: Method, cohort: Cohort, samples: Samples) -> Tensor: ...
    def train(self, job: Job) -> tuple[Tensors, Tensors, Tensor]: ...
