"""What clients do: prepare, train, close a round, adapt, answer. Simulated here, or one of them on a real node."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedrema.core import Batch, Client, LocalTraining, Method, Moment, Phase, Role, overrides
from fedrema.core.checks import calling, check_client, check_end, check_phases, check_role
from fedrema.data.federation import Federation, Split, to_float
from fedrema.engine import (
    Backend,
    Cohort,
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
from fedrema.engine.threads import with_its_threads
from fedrema.errors import BadInput, at_least
from fedrema.models.body_and_head import Net, Tensors
from fedrema.simulation.scoring import count_correct

_SAMPLES: weakref.WeakKeyDictionary[Federation, dict[object, tuple[Samples, Samples]]] = weakref.WeakKeyDictionary()


def samples_of(
    federation: Federation, device: torch.device, dtype: torch.dtype, integers: bool = False
) -> tuple[Samples, Samples]:
    """Return the samples to train on and to test with; every simulation of a federation uses the same.

    They are floats, or the integers of the data for a network that looks them up.
    """
    known = _SAMPLES.setdefault(federation, {})
    key = (device, dtype, integers)
    if key not in known:

        def placed(split: Split) -> Samples:
            x = torch.from_numpy(split.x).to(device)
            x = x.long() if integers else to_float(x, dtype)
            return Samples(x, torch.from_numpy(split.y).to(device), torch.from_numpy(split.count), dtype)

        known[key] = placed(federation.split("train")), placed(federation.split("test"))
    return known[key]


def _check_lookup(net: Net, federation: Federation) -> None:
    """Refuse samples that a network which begins with an embedding cannot look up."""
    x = federation.x
    if x.dtype.kind == "f" and not (np.mod(x, 1) == 0).all():
        raise BadInput("The network takes integers, as for an embedding, but x holds fractions: save x as integers.")
    tables = [layer for _, layer in net.layers() if isinstance(layer, (nn.Embedding, nn.EmbeddingBag))]
    if len(tables) == 1:  # with several, which part of a sample goes to which is not known
        outside = (x < 0) | (x >= tables[0].num_embeddings)
        if outside.any():
            place = tuple(np.argwhere(outside)[0])
            raise BadInput(
                f"x of client {federation.names[federation.client[place[0]]]!r} has {int(x[place])}; the network's "
                f"embedding takes 0 to {tables[0].num_embeddings - 1}."
            )


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
        threads: int = 0,
    ) -> None:
        at_least(1, local, "batch")  # 0, chosen from the data, is a number by now
        self.method, self.federation, self.local, self.rounds, self.seed = method, federation, local, rounds, seed
        self.device = choose_device(device)
        arithmetic = choose_precision(precision, self.device)
        self.dtype, self.products = arithmetic.dtype, arithmetic.products
        self.net = net.to(self.device, self.dtype)
        if net.integers:
            _check_lookup(net, federation)
        self.train, self.test = samples_of(federation, self.device, self.dtype, net.integers)
        example = self.train.x[:1, 0]
        self.engine = make_engine(backend, self.net, example, arithmetic, len(federation), local.batch, threads)
        self.threads = self.engine.threads
        """How many share an operation; None: as torch is set."""
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

    def gathered(self, clients: Tensor, params: Stacked, memory: Stacked, inbox: Stacked) -> Cohort:
        """Return some clients with what everyone has."""
        names = tuple(self.federation.names[row] for row in clients.tolist())
        params, memory, inbox = (self.rows(group, clients) for group in (params, memory, inbox))
        counts = self.counts[places(clients, len(self.federation), self.device)]
        return Cohort(clients, names, params, memory, inbox, counts)

    def rows(self, everyone: Stacked, clients: Tensor) -> Stacked:
        """Return what some clients have, on the device."""
        where = next(iter(everyone.own.values())).device if everyone.own else self.device
        return everyone.rows(places(clients, len(self.federation), where)).to(self.device)

    def begin(self, cohort: Cohort, moment: Moment) -> Cohort:
        """Let clients prepare a round."""
        if not overrides(self.method, "begin") or _idle(
            lambda client, data: (self.method.begin(self.net, client, data, moment), {})
        ):
            return cohort

        def begun(client: Client, data: Batch) -> dict[str, Tensors]:
            ready = self.method.begin(self.net, client, data, moment)
            return _changes(client, check_client(self.method, "begin", ready))

        with calling(self.method, "begin"):
            made = self.engine.each(begun, cohort, self.train)
        return _changed(cohort, made)

    def end(self, cohort: Cohort, moment: Moment) -> tuple[Cohort, Tensors]:
        """Let clients close a round; returns what they send beside their parameters."""
        if not overrides(self.method, "end") or _idle(
            lambda client, data: self.method.end(self.net, client, data, moment)
        ):
            return cohort, {}

        def ended(client: Client, data: Batch) -> dict[str, Tensors]:
            closed, extras = check_end(self.method, self.method.end(self.net, client, data, moment))
            return {**_changes(client, closed), "extras": extras}

        with calling(self.method, "end"):
            made = self.engine.each(ended, cohort, self.train)
        return _changed(cohort, made), made["extras"]

    def adapted(self, method: Method, cohort: Cohort, moment: Moment) -> Cohort:
        """Return clients as they are used: copies that trained a little more, where the method does so."""
        with calling(method, "adapt"):
            phases = check_phases(method, "adapt", method.adapt(self.local, moment))
        if not phases:
            return cohort
        params, _, _ = self._descend(method, phases, "adapt", cohort, {}, moment)
        return replace(cohort, params=Stacked(params))

    @with_its_threads
    def local_training(self, cohort: Cohort, velocity: Tensors, moment: Moment) -> tuple[Tensors, Tensors, Tensor]:
        """Train clients as the method plans it; returns parameters, momentum and mean losses, each [k, ...]."""
        return self._descend(self.method, self._phases(moment), "train", cohort, velocity, moment)

    def _phases(self, moment: Moment) -> Sequence[Phase]:
        with calling(self.method, "phases"):
            return check_phases(self.method, "phases", self.method.phases(self.local, moment))

    def _descend(
        self, method: Method, phases: Sequence[Phase], purpose: str, cohort: Cohort, velocity: Tensors, moment: Moment
    ) -> tuple[Tensors, Tensors, Tensor]:
        key = (self.seed, moment.round, purpose)
        orders = self._orders.pop((key, cohort.names), None) or self._draw(
            cohort.names, cohort.clients, phases, key, [self._epochs(phase, cohort) for phase in phases]
        )
        plan = list(zip(phases, orders, strict=True))
        velocity = velocity or cohort.params.zeros(len(cohort), self.trains)
        with calling(method, "loss"):
            return self.engine.train(Job(method, cohort, self.train, plan, self.local, velocity, key))

    def draw_ahead(self, clients: Tensor, moment: Moment) -> None:
        """Draw the batches of a round to come, while a GPU is busy with the present one."""
        names = tuple(self.federation.names[row] for row in clients.tolist())
        key = (self.seed, moment.round, "train")
        phases = self._phases(moment)
        if not any(phase.epochs_of for phase in phases):
            self._orders = {(key, names): self._draw(names, clients, phases, key, [None] * len(phases))}

    def _epochs(self, phase: Phase, cohort: Cohort) -> list[int] | None:
        """Return how many epochs of a phase each client takes, where that depends on the client."""
        if (epochs_of := phase.epochs_of) is None:
            return None
        found = self.engine.each(lambda client, _: {"phase": {"epochs": epochs_of(client)}}, cohort, None)
        epochs: list[int] = found["phase"]["epochs"].tolist()
        return epochs

    def _draw(
        self,
        names: tuple[str, ...],
        clients: Tensor,
        phases: Sequence[Phase],
        key: tuple[int | str, ...],
        epochs: Sequence[list[int] | None],
    ) -> list[Order]:
        counts = self.train.counts[clients].tolist()
        return [
            draw_order(names, counts, phase, self.local, (*key, number), each)
            for number, (phase, each) in enumerate(zip(phases, epochs, strict=True))
        ]

    @with_its_threads
    def tally_of(self, method: Method, cohort: Cohort, moment: Moment) -> tuple[np.ndarray, np.ndarray]:
        """Count right answers of clients as one method would use them: after adapting, where it adapts."""
        return self.tally_as_is(method, self.adapted(method, cohort, moment))

    def tally_as_is(self, method: Method, cohort: Cohort) -> tuple[np.ndarray, np.ndarray]:
        """Count right answers of clients with the parameters they have."""
        rows = places(cohort.clients, len(self.test.y), self.device)
        with calling(method, "predict"):
            predicted = self.engine.scores(method, cohort, self.test)
        return count_correct(predicted, self.test.y[rows])


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


def _changed(cohort: Cohort, made: dict[str, Tensors]) -> Cohort:
    groups: dict[str, Any] = {group: Stacked(value) for group, value in made.items() if group != "extras"}
    return replace(cohort, **groups)
