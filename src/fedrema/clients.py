"""What clients do: prepare, train, close a round, adapt, answer. Simulated here, or one of them on a real node."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedrema.core import Batch, Client, LocalTraining, Method, Moment, Phase, Role, overrides
from fedrema.data.federation import Federation, Split, to_float
from fedrema.engine import (
    Backend,
    Crowd,
    Job,
    Order,
    Precision,
    Samples,
    Stacked,
    choose_device,
    choose_precision,
    draw_order,
    make_engine,
    places,
)
from fedrema.errors import BadInput
from fedrema.hooks import calling, check_client, check_end, check_phases, check_role
from fedrema.net import Net, Tensors
from fedrema.score import tally

_SAMPLES: weakref.WeakKeyDictionary[Federation, dict[object, tuple[Samples, Samples]]] = weakref.WeakKeyDictionary()


def samples_of(federation: Federation, device: torch.device, dtype: torch.dtype) -> tuple[Samples, Samples]:
    """Return the samples to train on and to test with; every simulation of a federation uses the same."""
    known = _SAMPLES.setdefault(federation, {})
    if (device, dtype) not in known:

        def placed(split: Split) -> Samples:
            x = to_float(torch.from_numpy(split.x).to(device), dtype)
            return Samples(x, torch.from_numpy(split.y).to(device), torch.from_numpy(split.count))

        known[device, dtype] = placed(federation.split("train")), placed(federation.split("test"))
    return known[device, dtype]


class Clients:
    """The clients of a federation with their samples, and the engine that trains some of them at once.

    Everything random is keyed by the seed, the round, a client's name and the purpose: the order of clients, the
    backend, or a stop in between change nothing.
    """

    def __init__(
        self,
        method: Method,
        net: Net,
        federation: Federation,
        local: LocalTraining,
        rounds: int,
        seed: int,
        device: str = "auto",
        precision: Precision = "auto",
        backend: Backend = "auto",
    ) -> None:
        self.method, self.federation, self.local, self.rounds, self.seed = method, federation, local, rounds, seed
        self.device = choose_device(device)
        arithmetic = choose_precision(precision, self.device)
        self.dtype, self.products = arithmetic.dtype, arithmetic.products
        self.net = net.to(self.device, self.dtype)
        self.train, self.test = samples_of(federation, self.device, self.dtype)
        self.engine = make_engine(backend, self.net, self.train.x[:1, 0], arithmetic, len(federation))
        self._orders: dict[object, list[Order]] = {}
        self.counts = self.train.counts.to(self.device, self.dtype)
        if net.classes < federation.classes:
            raise BadInput(f"The network tells {net.classes} classes apart, but the data has {federation.classes}.")

    def roles(self, params: Stacked) -> dict[str, Role]:
        """Return what becomes of each parameter."""
        with calling(self.method, "role"):
            found = {name: self.method.role(self.net, name) for name in params.merged()}
        return {name: check_role(self.method, name, role) for name, role in found.items()}

    def trains(self, name: str) -> bool:
        """Tell whether a tensor is ever descended along."""
        return self.method.trains(self.net, name)

    def moment(self, number: int) -> Moment:
        """Return a round's moment."""
        return Moment(number, self.rounds, self.seed)

    def gathered(self, clients: Tensor, params: Stacked, memory: Stacked, inbox: Stacked) -> Crowd:
        """Return some clients with what everyone has."""
        names = tuple(self.federation.names[row] for row in clients.tolist())
        params, memory, inbox = (self.rows(group, clients) for group in (params, memory, inbox))
        counts = self.counts[places(clients, len(self.federation), self.device)]
        return Crowd(clients, names, params, memory, inbox, counts)

    def rows(self, everyone: Stacked, clients: Tensor) -> Stacked:
        """Return what some clients have, on the device."""
        where = next(iter(everyone.own.values())).device if everyone.own else self.device
        return everyone.rows(places(clients, len(self.federation), where)).to(self.device)

    def begin(self, crowd: Crowd, moment: Moment) -> Crowd:
        """Let clients prepare a round."""
        if not overrides(self.method, "begin") or _idle(
            lambda client, data: (self.method.begin(self.net, client, data, moment), {})
        ):
            return crowd

        def begun(client: Client, data: Batch) -> dict[str, Tensors]:
            ready = self.method.begin(self.net, client, data, moment)
            return _changes(client, check_client(self.method, "begin", ready))

        with calling(self.method, "begin"):
            made = self.engine.each(begun, crowd, self.train)
        return _changed(crowd, made)

    def end(self, crowd: Crowd, moment: Moment) -> tuple[Crowd, Tensors]:
        """Let clients close a round; returns what they send beside their parameters."""
        if not overrides(self.method, "end") or _idle(
            lambda client, data: self.method.end(self.net, client, data, moment)
        ):
            return crowd, {}

        def ended(client: Client, data: Batch) -> dict[str, Tensors]:
            closed, extras = check_end(self.method, self.method.end(self.net, client, data, moment))
            return {**_changes(client, closed), "extras": extras}

        with calling(self.method, "end"):
            made = self.engine.each(ended, crowd, self.train)
        return _changed(crowd, made), made["extras"]

    def adapted(self, method: Method, crowd: Crowd, moment: Moment) -> Crowd:
        """Return clients as they are used: copies that trained a little more, where the method does so."""
        with calling(method, "adapt"):
            phases = check_phases(method, "adapt", method.adapt(self.local, moment))
        if not phases:
            return crowd
        params, _, _ = self._descend(method, phases, "adapt", crowd, {}, moment)
        return replace(crowd, params=Stacked(params))

    def local_training(self, crowd: Crowd, velocity: Tensors, moment: Moment) -> tuple[Tensors, Tensors, Tensor]:
        """Train clients as the method plans it; returns parameters, momentum and mean losses, each [k, ...]."""
        return self._descend(self.method, self._phases(moment), "train", crowd, velocity, moment)

    def _phases(self, moment: Moment) -> Sequence[Phase]:
        with calling(self.method, "phases"):
            return check_phases(self.method, "phases", self.method.phases(self.local, moment))

    def _descend(
        self, method: Method, phases: Sequence[Phase], purpose: str, crowd: Crowd, velocity: Tensors, moment: Moment
    ) -> tuple[Tensors, Tensors, Tensor]:
        key = (self.seed, moment.round, purpose)
        orders = self._orders.pop((key, crowd.names), None) or self._draw(crowd.names, crowd.clients, phases, key)
        plan = list(zip(phases, orders, strict=True))
        velocity = velocity or crowd.params.zeros(len(crowd), self.trains)
        with calling(method, "loss"):
            return self.engine.train(Job(method, crowd, self.train, plan, self.local, velocity, key))

    def draw_ahead(self, clients: Tensor, moment: Moment) -> None:
        """Draw the batches of a round to come, while a GPU is busy with the present one."""
        names = tuple(self.federation.names[row] for row in clients.tolist())
        key = (self.seed, moment.round, "train")
        phases = self._phases(moment)
        self._orders = {(key, names): self._draw(names, clients, phases, key)}

    def _draw(
        self, names: tuple[str, ...], clients: Tensor, phases: Sequence[Phase], key: tuple[int | str, ...]
    ) -> list[Order]:
        counts = self.train.counts[clients].tolist()
        return [draw_order(names, counts, phase, self.local, (*key, number)) for number, phase in enumerate(phases)]

    def tally_of(self, method: Method, crowd: Crowd, moment: Moment) -> tuple[np.ndarray, np.ndarray]:
        """Count right answers of clients as one method would use them: after adapting, where it adapts."""
        return self.tally_as_is(method, self.adapted(method, crowd, moment))

    def tally_as_is(self, method: Method, crowd: Crowd) -> tuple[np.ndarray, np.ndarray]:
        """Count right answers of clients with the parameters they have."""
        rows = places(crowd.clients, len(self.test.y), self.device)
        with calling(method, "predict"):
            predicted = self.engine.scores(method, crowd, self.test)
        return tally(predicted, self.test.y[rows])


class _Unseen:
    """Stands for a client or its samples; whoever looks at it gives away that it has something to do."""

    def __getattr__(self, name: str) -> Any:
        raise LookupError(name)


def _idle(hook: Callable[[Any, Any], Any]) -> bool:
    """Tell whether a hook hands on any client as it is, without a look, and sends nothing: it need not be called."""
    client = _Unseen()
    try:
        found = hook(client, _Unseen())
    except (Exception, SystemExit):  # it did look, and with a real client it may well succeed
        return False
    return isinstance(found, tuple) and len(found) == 2 and found[0] is client and found[1] == {}


def _changes(before: Client, after: Client) -> dict[str, Tensors]:
    """Return what a hook put in place of what a client had: the rest need not be copied."""
    groups = ("params", "memory", "inbox")
    return {group: getattr(after, group) for group in groups if getattr(after, group) is not getattr(before, group)}


def _changed(crowd: Crowd, made: dict[str, Tensors]) -> Crowd:
    groups: dict[str, Any] = {group: Stacked(value) for group, value in made.items() if group != "extras"}
    return replace(crowd, **groups)
