"""Clients that train together, as tensors with a client axis; tensors that are equal for all are stored once."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, Never, cast

import torch
from torch import Tensor

from fedrema.core import Batch, Client, Moment
from fedrema.models.body_and_head import Net, Tensors


@dataclass(frozen=True)
class ClientTensors:
    """Named tensors of k clients: `own` has a leading client axis, `common` is stored once for all."""

    own: Tensors = field(default_factory=dict)
    common: Tensors = field(default_factory=dict)

    def row(self, k: int) -> Tensors:
        """Return one client's tensors, as views."""
        return {**self.common, **{name: value[k] for name, value in self.own.items()}}

    def merged(self) -> Tensors:
        """Return all tensors; those of `common` have no client axis."""
        return {**self.common, **self.own}

    def axes(self) -> dict[str, int | None]:
        """Return the client axis of each tensor of `merged`; None for common tensors."""
        return {**dict.fromkeys(self.common, None), **dict.fromkeys(self.own, 0)}

    def having(self, own: Tensors) -> "ClientTensors":
        """Return these tensors with some of each client added or replaced."""
        common = {name: value for name, value in self.common.items() if name not in own}
        return ClientTensors({**self.own, **own}, common)

    def copied(self, k: int) -> Tensors:
        """Return a separate copy of every tensor for each of k clients."""
        copies = {name: value.expand(k, *value.shape).clone() for name, value in self.common.items()}
        return {**copies, **{name: value.clone() for name, value in self.own.items()}}

    def zeros(self, k: int, wanted: Callable[[str], bool]) -> Tensors:
        """Return zeros [k, ...] for each tensor that `wanted` selects by its name."""
        return {name: value.new_zeros(k, *value.shape) for name, value in self.row(0).items() if wanted(name)}


RowIndex = Tensor | slice
"""Selects some clients' rows from a tensor with a row per client."""


def row_index(clients: Tensor, device: torch.device) -> RowIndex:
    """Return an index of some clients' rows: a slice if they are consecutive, because slicing copies nothing."""
    if len(clients) and torch.equal(clients, torch.arange(int(clients[0]), int(clients[0]) + len(clients))):
        return slice(int(clients[0]), int(clients[-1]) + 1)
    return clients.to(device)


@dataclass(frozen=True)
class Cohort:
    """Clients that train together."""

    clients: Tensor
    """[k] their rows in the federation; on the CPU."""
    index: RowIndex
    """Selects the same rows on the training device."""
    names: tuple[str, ...]
    params: ClientTensors
    memory: ClientTensors
    inbox: ClientTensors
    counts: Tensor
    """[k] their numbers of training samples."""
    velocity: Tensors = field(default_factory=dict)
    """[k, ...] momentum of every trained tensor; empty: zero."""
    received: ClientTensors | None = None
    """Their parameters at the start of local training; None: `params`, because they have not trained yet."""

    def __len__(self) -> int:
        return len(self.names)

    def at_start(self) -> ClientTensors:
        """Return the parameters at the start of local training."""
        return self.params if self.received is None else self.received

    def one(self, k: int) -> Client:
        """Return the client in row k."""
        received = self.at_start().row(k)
        params = received if self.received is None else self.params.row(k)
        return Client(params, received, self.memory.row(k), self.inbox.row(k), self.counts[k])

    def all(self) -> Client:
        """Return all clients as one `Client` whose tensors have a client axis, except the common ones."""
        received = self.at_start().merged()
        params = received if self.received is None else self.params.merged()
        return Client(params, received, self.memory.merged(), self.inbox.merged(), self.counts)


Hook = Callable[[Client, Batch], dict[str, Tensors]]
"""A method's hook for one client and its samples; returns groups of named tensors."""


@dataclass(frozen=True)
class RoundHook:
    """A hook that is called in every round, which may be captured as a CUDA graph if it does not read the moment."""

    function: Callable[[Client, Batch, Moment], dict[str, Tensors]]
    moment: Moment
    rule: tuple[Hashable, ...]
    """The method and its hook: the same in all runs to which it is applied jointly."""
    net: Net
    """The network that the hook uses; in joint training, that of any of the runs."""

    @property
    def key(self) -> Hashable:
        """With the shapes of the tensors, it determines what `function` does, except what it reads from the moment."""
        return *self.rule, self.net

    def __call__(self, client: Client, batch: Batch) -> dict[str, Tensors]:
        """Apply the hook to one client."""
        return self.function(client, batch, self.moment)

    def without_moment(self) -> "RoundHook":
        """Return the same hook, which raises an error if it reads the moment."""
        return replace(self, moment=cast("Moment", _UnreadableMoment()))


class MomentWasRead(RuntimeError):
    """A hook has read the moment of a round, so that it can be neither captured nor applied to several runs."""


class _UnreadableMoment:
    """Takes the place of the moment, whose values would be those of another round in a capture, or of another run."""

    def __getattribute__(self, name: str) -> Never:
        raise MomentWasRead("A hook that reads the moment can be neither captured nor applied jointly.")

    def __eq__(self, other: object) -> Any:
        raise RuntimeError("A hook that compares the moment cannot be captured.")

    __hash__ = None  # type: ignore[assignment]
