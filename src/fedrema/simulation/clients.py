"""The client side of a round: prepare, train, finish, adapt, predict; for all simulated clients, or one on a node."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from fedrema.core import Batch, Client, LocalTraining, Method, Moment, Phase, Role, overrides
from fedrema.core.checks import calling, check_client, check_end, check_phases, check_role
from fedrema.data.federation import Federation
from fedrema.data.targets import trained_task
from fedrema.engine import (
    Backend,
    ClientTensors,
    Cohort,
    Order,
    Precision,
    RoundHook,
    TrainingPlan,
    choose_device,
    choose_precision,
    draw_order,
    make_engine,
    row_index,
)
from fedrema.engine.batches import samples_on_device
from fedrema.engine.costs import client_bytes, operations_per_step
from fedrema.engine.devices import with_own_threads
from fedrema.engine.private_steps import SampleNoise
from fedrema.errors import BadInput, at_least
from fedrema.models.body_and_head import Net, Tensors, size
from fedrema.simulation.scoring import MetricSums, measure, measure_accuracy
from fedrema.tasks import Predictions
from fedrema.tasks.metrics import metrics_of

GROUPS = ("params", "memory", "inbox")
"""The tensors of a client that a hook may replace."""
TRAIN = "train"
"""Purpose of the random numbers of local training."""
ADDED = "added to the inbox"
"""Group of the tensors that a hook added to the inbox, or replaced in it."""


class Clients:
    """The clients of a federation with their samples, and the engine that trains cohorts of them.

    All random numbers are keyed by the seed, the round, a client's name and the purpose, so that results depend
    neither on the order of clients nor on the backend, and a resumed run equals an uninterrupted one.
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
        metrics: tuple[str, ...] = (),
        noise: SampleNoise | None = None,
    ) -> None:
        at_least(1, local, "batch")  # 0 means: chosen from the data, which has been done by now
        self.method, self.federation, self.local, self.rounds, self.seed = method, federation, local, rounds, seed
        self.device = choose_device(device)
        arithmetic = choose_precision(precision, self.device)
        self.dtype, self.products = arithmetic.dtype, arithmetic.products
        self.task = trained_task(federation, local)
        if "accuracy" in metrics:  # the user's choice of it as the primary metric, in spite of a rare class
            self.task = replace(self.task, rare=False)
        if not method.supports(self.task):
            raise BadInput(
                f"{method.called()} does not support the task {self.task.name}; fedrema methods lists the tasks of each"
                " method."
            )
        if method.needs_head() and not net.head_name:
            raise BadInput(
                f"{method.called()} needs the network's classifier, which was not found: {net.no_head}. Name it with"
                " --head, or choose a method that treats all parameters alike, such as FedAvg."
            )
        self.metrics = metrics_of(self.task, metrics)
        self.net = net.to(self.device, self.dtype).for_task(self.task)
        if net.integers:
            _check_embedding_inputs(net, federation)
        if local.augment and (net.integers or len(federation.sample_shape) != 3):
            raise BadInput(
                f"--augment {local.augment} needs images [channels, height, width], but a sample has the shape"
                f" {tuple(federation.sample_shape)}."
            )
        self.train, self.test = samples_on_device(federation, self.device, self.dtype, net.integers)
        example = self.train.x[:1, 0]
        self.engine = make_engine(backend, self.net, example, arithmetic, len(federation), local.batch, threads)
        self.threads = self.engine.threads
        """Threads per operation; None: torch's setting."""
        self._orders: dict[object, list[Order]] = {}
        """Batches that were drawn before their round, by `draw_ahead`."""
        self._roles: dict[str, Role] = {}
        self.counts = self.train.counts.to(self.device, self.dtype)
        self.noise = noise
        """Clipping and noise of the gradients of samples; None: ordinary SGD."""
        self.steps = torch.zeros(len(federation), dtype=torch.int64)
        """[K] how many steps each client took in its last local training."""

    def bytes_of_a_client(self) -> int:
        """Return the bytes of memory that one client needs while it trains."""
        samples = min(self.local.batch, self.train.x.shape[1])
        stacked, on_gpu = self.engine.name == "stacked", self.device.type == "cuda"
        each = client_bytes(self.net, self.train.x[0, :samples], stacked, on_gpu)
        if self.noise is not None:  # gradients of every sample, before and after clipping
            each += 2 * samples * size(self.net.initial)
        return each

    def operations_of_a_client(self) -> float:
        """Return the operations of one client's training step."""
        return operations_per_step(self.net, self.train.x[:1, 0], min(self.local.batch, self.train.x.shape[1]))

    def roles(self, params: ClientTensors) -> dict[str, Role]:
        """Return the role of each parameter; `Method.role` is called once per name."""
        names = params.merged()
        for name in names:
            if name not in self._roles:
                with calling(self.method, "role"):
                    role = self.method.role(self.net, name)
                self._roles[name] = check_role(self.method, name, role)
        return {name: self._roles[name] for name in names}

    def trains(self, name: str) -> bool:
        """Return whether a tensor is ever trained."""
        return self.method.trains(self.net, name)

    def moment(self, number: int) -> Moment:
        """Return the `Moment` of a round: its number, the number of rounds and the seed."""
        return Moment(number, self.rounds, self.seed)

    def gather(
        self,
        clients: Tensor,
        params: ClientTensors,
        memory: ClientTensors,
        inbox: ClientTensors,
        velocity: Tensors | None = None,
    ) -> Cohort:
        """Select some clients from the tensors of all clients; returns them as a cohort on the device."""
        index = row_index(clients, self.device)

        def rows(tensors: Tensors) -> Tensors:
            # Tensors that are stored on disk are on the CPU, even if clients train on a GPU.
            return {
                name: value[index if value.device.type == self.device.type else clients].to(self.device)
                for name, value in tensors.items()
            }

        def of_cohort(group: ClientTensors) -> ClientTensors:
            common = {name: value.to(self.device) for name, value in group.common.items()}
            return ClientTensors(rows(group.own), common)

        names = tuple(self.federation.names[row] for row in clients.tolist())
        groups = (of_cohort(params), of_cohort(memory), of_cohort(inbox))
        return Cohort(clients, index, names, *groups, self.counts[index], rows(velocity or {}))

    def begin(self, cohort: Cohort, moment: Moment) -> Cohort:
        """Apply the method's `begin` to each client."""
        if not overrides(self.method, "begin") or _does_nothing(
            lambda client, data: (self.method.begin(self.net, client, data, moment), {})
        ):
            return cohort

        def begin(client: Client, data: Batch, moment: Moment) -> dict[str, Tensors]:
            begun = self.method.begin(self.net, client, self._readable(data), moment)
            return _changed_groups(client, check_client(self.method, "begin", begun))

        hook = RoundHook(begin, moment, (self.method, type(self.method).begin), self.net)
        with calling(self.method, "begin"):
            return _with_groups(cohort, self.engine.apply_hook(hook, cohort, self.train))

    @with_own_threads
    def local_training(self, cohort: Cohort, moment: Moment) -> tuple[Cohort, Tensor]:
        """Train clients in the phases of the method; returns them and their mean losses [k]."""
        params, velocity, losses = self._train(self.method, self._phases(moment), TRAIN, cohort, moment)
        return replace(cohort, params=ClientTensors(params), velocity=velocity, received=cohort.params), losses

    def end(self, cohort: Cohort, moment: Moment) -> tuple[Cohort, Tensors]:
        """Apply the method's `end` to each client; returns the clients and what they send in addition to parameters."""
        if not overrides(self.method, "end") or _does_nothing(
            lambda client, data: self.method.end(self.net, client, data, moment)
        ):
            return cohort, {}

        def end(client: Client, data: Batch, moment: Moment) -> dict[str, Tensors]:
            ended, extras = check_end(self.method, self.method.end(self.net, client, self._readable(data), moment))
            return {**_changed_groups(client, ended), "extras": extras}

        hook = RoundHook(end, moment, (self.method, type(self.method).end), self.net)
        with calling(self.method, "end"):
            results = self.engine.apply_hook(hook, cohort, self.train)
        return _with_groups(cohort, results), results["extras"]

    def _readable(self, data: Batch) -> Batch:
        """Return what a hook may read of a client's samples: with noise on gradients, nothing else has any."""
        return data if self.noise is None else cast("Batch", _PrivateSamples())

    def adapted(self, method: Method, cohort: Cohort, moment: Moment) -> Cohort:
        """Return clients as they predict: copies after the method's `adapt` and `ready`."""
        with calling(method, "adapt"):
            phases = check_phases(method, "adapt", method.adapt(self.local, moment))
        if phases:
            params, _, _ = self._train(method, phases, "adapt", replace(cohort, velocity={}), moment)
            cohort = replace(cohort, params=ClientTensors(params))
        if not overrides(method, "ready"):
            return cohort

        def ready(client: Client, data: Batch, moment: Moment) -> dict[str, Tensors]:
            return _changed_groups(client, check_client(method, "ready", method.ready(self.net, client, data, moment)))

        hook = RoundHook(ready, moment, (method, type(method).ready), self.net)
        with calling(method, "ready"):
            return _with_groups(cohort, self.engine.apply_hook(hook, cohort, self.train))

    def _phases(self, moment: Moment) -> Sequence[Phase]:
        with calling(self.method, "phases"):
            return check_phases(self.method, "phases", self.method.phases(self.local, moment))

    def _train(
        self, method: Method, phases: Sequence[Phase], purpose: str, cohort: Cohort, moment: Moment
    ) -> tuple[Tensors, Tensors, Tensor]:
        key = (self.seed, moment.round, purpose)
        orders = self._orders.pop((key, cohort.names), None) or self._draw_orders(
            cohort.names, cohort.clients, phases, key, [self._epochs(phase, cohort) for phase in phases]
        )
        noise = None  # models that are adapted before use stay on their clients
        if purpose == TRAIN:
            noise = self.noise
            none = torch.zeros_like(cohort.clients)
            self.steps[cohort.clients] = sum((torch.from_numpy(order.steps) for order in orders), none)
        trained = tuple(name for name in cohort.params.merged() if self.trains(name))
        plan = TrainingPlan(method, list(zip(phases, orders, strict=True)), self.local, trained, key, noise)
        velocity = cohort.velocity or cohort.params.zeros(len(cohort), self._with_momentum(phases, trained))
        with calling(method, "loss"):
            return self.engine.train(replace(cohort, velocity=velocity), self.train, plan)

    def _with_momentum(self, phases: Sequence[Phase], trained: tuple[str, ...]) -> Callable[[str], bool]:
        """Return which parameters need memory for momentum; the kernels on a GPU use it for all."""
        if self.device.type == "cpu":
            trained = tuple(name for name in trained if any(each.momentum and each.trains(name) for each in phases))
        return frozenset(trained).__contains__

    def draw_ahead(self, clients: Tensor, moment: Moment) -> None:
        """Draw the batches of a later round while the GPU computes the current one."""
        names = tuple(self.federation.names[row] for row in clients.tolist())
        key = (self.seed, moment.round, TRAIN)
        phases = self._phases(moment)
        if not any(phase.epochs_of for phase in phases):
            self._orders = {(key, names): self._draw_orders(names, clients, phases, key, [None] * len(phases))}

    def example_extras(self, cohort: Cohort, moment: Moment) -> Tensors:
        """Return what clients send in addition to parameters, after one step of each phase."""
        phases = [replace(phase, epochs=1, steps=1, epochs_of=None) for phase in self._phases(moment)]
        begun = self.begin(cohort, moment)
        params, _, _ = self._train(self.method, phases, TRAIN, replace(begun, velocity={}), moment)
        return self.end(replace(begun, params=ClientTensors(params), received=begun.params), moment)[1]

    def check_independent_samples(self, cohort: Cohort, moment: Moment) -> None:
        """Raise `BadInput` unless the loss of a batch is the mean of the losses of its samples, in every phase."""
        client = self.begin(cohort, moment).one(0)
        data = self.train.of(int(cohort.clients[0])).rows(slice(4))
        for loss in [phase.loss or self.method.loss for phase in self._phases(moment)]:
            self.net.train(False)
            with torch.no_grad(), calling(self.method, "loss"):
                whole = loss(self.net, client, data)
                each = torch.stack([loss(self.net, client, data.rows(slice(at, at + 1))) for at in range(len(data.y))])
            if not torch.isclose(whole, each.mean(), rtol=1e-3, atol=1e-5):
                raise BadInput(
                    f"--dp sample needs a loss that is a mean over samples, but the loss of {self.method.called()} with"
                    " these settings couples the samples of a batch."
                )

    def _epochs(self, phase: Phase, cohort: Cohort) -> list[int] | None:
        """Return each client's number of epochs in a phase; None if it is the same for all."""
        if (epochs_of := phase.epochs_of) is None:
            return None
        found = self.engine.apply_hook(lambda client, _: {"phase": {"epochs": epochs_of(client)}}, cohort, None)
        epochs: list[int] = found["phase"]["epochs"].tolist()
        return epochs

    def _draw_orders(
        self,
        names: tuple[str, ...],
        clients: Tensor,
        phases: Sequence[Phase],
        key: tuple[int | str, ...],
        epochs: Sequence[list[int] | None],
    ) -> list[Order]:
        counts = self.train.counts[clients].tolist()
        poisson = self.noise is not None and key[-1] == TRAIN
        return [
            draw_order(names, counts, phase, self.local, (*key, number), each, poisson)
            for number, (phase, each) in enumerate(zip(phases, epochs, strict=True))
        ]

    @with_own_threads
    def score_adapted(self, method: Method, cohort: Cohort, moment: Moment) -> MetricSums:
        """Score clients after adapting, if the method adapts them."""
        return self.score_cohort(method, self.adapted(method, cohort, moment))

    def score_cohort(self, method: Method, cohort: Cohort) -> MetricSums:
        """Score clients with their current parameters on their test samples."""
        if self.task.has_softmax and [metric.name for metric in self.metrics] == ["accuracy"]:
            with calling(method, "predict"):
                predicted = self.engine.predictions(method, cohort, self.test)
            return measure_accuracy(predicted, self.test.y[cohort.index])
        return measure(self.metrics, self.predictions(method, cohort))

    def predictions(self, method: Method, cohort: Cohort) -> Predictions:
        """Return the outputs of clients' networks on their test samples, with the targets, on the CPU."""
        with calling(method, "predict"):
            outputs = self.engine.predictions(method, cohort, self.test, outputs=True)
        samples = torch.arange(outputs.shape[1]) < self.test.counts[cohort.clients][:, None]
        # Small compared to training. In float64, because sums of float32 would differ between devices.
        return Predictions(self.task, outputs.double().cpu(), self.test.y[cohort.index].cpu(), samples)


def _check_embedding_inputs(net: Net, federation: Federation) -> None:
    """Check that all samples are valid indices of the network's embedding."""
    x = federation.x
    if x.dtype.kind == "f" and not (np.mod(x, 1) == 0).all():
        raise BadInput("The network takes integers, as for an embedding, but x holds fractions: save x as integers.")
    tables = [layer for _, layer in net.layers() if isinstance(layer, (nn.Embedding, nn.EmbeddingBag))]
    if len(tables) == 1:  # with several embeddings it is not known which part of a sample each one reads
        outside = (x < 0) | (x >= tables[0].num_embeddings)
        if outside.any():
            place = tuple(np.argwhere(outside)[0])
            raise BadInput(
                f"x of client {federation.names[federation.client[place[0]]]!r} has {int(x[place])}; the network's "
                f"embedding takes 0 to {tables[0].num_embeddings - 1}."
            )


class _Untouchable:
    """Placeholder for a client or its samples that raises an error when a hook reads it."""

    def __getattr__(self, name: str) -> Any:
        raise LookupError(name)


class _PrivateSamples:
    """Takes the place of samples that a hook must not read, because what it computes would have no noise."""

    def __getattr__(self, name: str) -> Any:
        raise BadInput(
            "--dp sample adds noise to gradient steps only, but this method also reads the samples outside of them:"
            " choose another method, or --dp local."
        )


def _does_nothing(hook: Callable[[Any, Any], Any]) -> bool:
    """Return whether a hook can be skipped: it returns the client unchanged, without reading it, and sends nothing."""
    client = _Untouchable()
    try:
        found = hook(client, _Untouchable())
    except (Exception, SystemExit):  # it reads the client; with a real one it may succeed
        return False
    return isinstance(found, tuple) and len(found) == 2 and found[0] is client and found[1] == {}


def _changed_groups(before: Client, after: Client) -> dict[str, Tensors]:
    """Return the groups of tensors that a hook replaced; the others need not be copied.

    Of the inbox, only the tensors that a hook added or replaced are returned, unless it removed some: the server's
    messages, which may contain whole models, remain stored once for all clients.
    """
    changed = {group: getattr(after, group) for group in GROUPS if getattr(after, group) is not getattr(before, group)}
    if "inbox" in changed and before.inbox.keys() <= after.inbox.keys():
        inbox = changed.pop("inbox")
        changed[ADDED] = {name: value for name, value in inbox.items() if value is not before.inbox.get(name)}
    return changed


def _with_groups(cohort: Cohort, results: dict[str, Tensors]) -> Cohort:
    groups: dict[str, Any] = {group: ClientTensors(results[group]) for group in GROUPS if group in results}
    if ADDED in results:
        groups["inbox"] = cohort.inbox.having(results[ADDED])
    return replace(cohort, **groups)
