"""Joint training: several simulations, for example replicates of one cell, are trained as one stacked cohort.

They may differ in their seed, in their federation if its tensors have the same shapes, and in settings of the method
that are declared as `joint`.
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedrema.core import Method, Phase, gradient_step
from fedrema.engine.backends import Engine
from fedrema.engine.batches import Order, Samples, TrainingPlan
from fedrema.engine.cohort import ClientTensors, Cohort, Hook, MomentWasRead, RoundHook, row_index
from fedrema.engine.joint_settings import LossOfRuns, MethodOfRuns, join_methods
from fedrema.engine.turns import run_threads
from fedrema.models.body_and_head import Tensors


@dataclass(frozen=True, eq=False)
class EngineCall:
    """Training, predictions or a hook that a simulation waits for."""

    method: Method | None
    """The method that predicts or trains; None calls the hook."""
    cohort: Cohort
    samples: Samples
    plan: TrainingPlan | None = None
    """What to train; None calls predictions."""
    hook: RoundHook | None = None
    outputs: bool = False
    """Whether predictions are the outputs of the networks instead of classes."""


class JointTraining:
    """Runs several simulations, each in its own thread, and executes their calls to the engine together.

    Only one thread runs at a time: a simulation that calls training or predictions waits until all the others do
    too; then the calls are executed as one. The order of computations is therefore always the same.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.turn = threading.Condition()
        """Held by the one thread that runs."""
        self.running: list[JointEngine] = []
        self.calls: dict[JointEngine, EngineCall] = {}
        self.results: dict[JointEngine, Any] = {}
        self.samples: dict[tuple[int, ...], tuple[Sequence[Samples], Samples]] = {}
        """By the identities of several federations' samples: these, and all of them as one."""
        self.separate_hooks: set[Hashable] = set()
        """Rules of hooks that read the moment, which contains the seed of one simulation."""

    def run(self, jobs: Sequence[Callable[["JointEngine"], Any]]) -> list[Any]:
        """Call several functions, each with its own engine; returns their results, or the errors they raised."""
        results: list[Any] = [None] * len(jobs)
        self.running = [JointEngine(self) for _ in jobs]

        def run_job(number: int, engine: JointEngine) -> None:
            with self.turn:
                try:
                    results[number] = jobs[number](engine)
                except BaseException as error:  # raised again in the caller's thread
                    results[number] = error
                finally:
                    self.running.remove(engine)
                    self._execute_if_all_wait()  # the others may have been waiting for this one

        run_threads([partial(run_job, number, engine) for number, engine in enumerate(list(self.running))])
        return results

    def execute(self, engine: "JointEngine", call: EngineCall) -> Any:
        """Wait until all simulations wait, then return the result of the call."""
        self.calls[engine] = call
        self._execute_if_all_wait()
        while engine not in self.results:
            self.turn.wait()
        result = self.results.pop(engine)
        if isinstance(result, BaseException):
            raise result
        return result

    def _execute_if_all_wait(self) -> None:
        if not self.running or len(self.calls) < len(self.running):
            return
        engines = [engine for engine in self.running if engine in self.calls]
        calls = [self.calls.pop(engine) for engine in engines]
        try:
            results = self._execute_all(calls)
        except Exception as error:  # every simulation waits for a result, so each gets the error
            results = [error] * len(engines)
        self.results.update(zip(engines, results, strict=True))
        self.turn.notify_all()

    def _execute_all(self, calls: list[EngineCall]) -> list[Any]:
        joint = join_calls(calls, self._join_samples)
        if joint is None:
            return [self._execute_one(call) for call in calls]
        sizes = [len(call.cohort) for call in calls]
        if joint.hook is not None:
            return self._execute_hooks(calls, joint, joint.hook, sizes)
        found = self._execute_one(joint)
        if joint.plan is None:
            return list(torch.split(found, sizes))
        params, velocity, losses = found
        return list(zip(_split(params, sizes), _split(velocity, sizes), torch.split(losses, sizes), strict=True))

    def _execute_hooks(
        self, calls: list[EngineCall], joint: EngineCall, hook: RoundHook, sizes: list[int]
    ) -> list[dict[str, Tensors]]:
        """Apply a hook to all clients at once, unless it reads the moment."""
        if hook.rule not in self.separate_hooks:
            try:
                found = self.engine.apply_hook(hook.without_moment(), joint.cohort, joint.samples)
            except MomentWasRead:
                self.separate_hooks.add(hook.rule)
            else:
                groups = {group: _split(named, sizes) for group, named in found.items()}
                return [{group: parts[number] for group, parts in groups.items()} for number in range(len(sizes))]
        return [self._execute_one(call) for call in calls]

    def _execute_one(self, call: EngineCall) -> Any:
        if call.hook is not None:
            return self.engine.apply_hook(call.hook, call.cohort, call.samples)
        assert call.method is not None
        if call.plan is None:
            return self.engine.predictions(call.method, call.cohort, call.samples, call.outputs)
        return self.engine.train(call.cohort, call.samples, call.plan)

    def _join_samples(self, several: Sequence[Samples]) -> Samples:
        """Return the samples of several federations as one; kept, because every round needs them."""
        key = tuple(map(id, several))
        if key not in self.samples:
            x, y, counts = (torch.cat([getattr(each, name) for each in several]) for name in ("x", "y", "counts"))
            self.samples[key] = several, Samples(x, y, counts, several[0].precision)
        return self.samples[key][1]


class JointEngine:
    """The engine of one simulation in joint training."""

    def __init__(self, joint: JointTraining) -> None:
        self.joint = joint
        self.name = joint.engine.name
        self.net = joint.engine.net
        self.threads = joint.engine.threads
        self.parallel = joint.engine.parallel

    def apply_hook(self, hook: Hook, cohort: Cohort, samples: Samples | None) -> dict[str, Tensors]:
        """Apply a hook to every client; jointly if it is one of a round."""
        if samples is None or not isinstance(hook, RoundHook):
            return self.joint.engine.apply_hook(hook, cohort, samples)
        call = EngineCall(None, replace(cohort, velocity={}), samples, hook=hook)
        found: dict[str, Tensors] = self.joint.execute(self, call)
        return found

    def predictions(self, method: Method, cohort: Cohort, samples: Samples, outputs: bool = False) -> Tensor:
        """Return the class that each client predicts for each of its samples, or with `outputs` the outputs."""
        call = EngineCall(method, replace(cohort, velocity={}), samples, outputs=outputs)
        found: Tensor = self.joint.execute(self, call)
        return found

    def train(self, cohort: Cohort, samples: Samples, plan: TrainingPlan) -> tuple[Tensors, Tensors, Tensor]:
        """Return trained parameters, momentum and mean losses."""
        found: tuple[Tensors, Tensors, Tensor] = self.joint.execute(
            self, EngineCall(plan.method, cohort, samples, plan)
        )
        return found


def join_calls(calls: Sequence[EngineCall], join_samples: Callable[[Sequence[Samples]], Samples]) -> EngineCall | None:
    """Return several calls as one; None for a single one, or if they differ in what cannot be joined."""
    first, cohorts, samples = calls[0], [call.cohort for call in calls], [call.samples for call in calls]
    if len(calls) < 2 or any(_kind(call) != _kind(first) for call in calls) or not _same_shapes(cohorts):
        return None
    if any(_sample_shapes(each) != _sample_shapes(samples[0]) for each in samples):
        return None
    methods = [call.method for call in calls if call.method is not None]
    joined = join_methods(methods, cohorts) if methods else (None, {})
    if joined is None:
        return None
    method, settings = joined
    plans = [call.plan for call in calls if call.plan is not None]
    plan = join_plans(plans, method) if plans and method is not None else None
    if plans and plan is None:
        return None
    distinct = list({id(each): each for each in samples}.values())
    if len(distinct) == 1:
        common, offsets = distinct[0], [0] * len(calls)
    else:
        common = join_samples(distinct)
        starts = np.cumsum([0, *(len(each.counts) for each in distinct)])
        places = {id(each): int(start) for each, start in zip(distinct, starts, strict=False)}
        offsets = [places[id(each)] for each in samples]
    cohort = join_cohorts(cohorts, offsets, settings)
    return replace(first, method=method, cohort=cohort, samples=common, plan=plan)


def _kind(call: EngineCall) -> tuple[Any, ...]:
    """Return what must be the same: training, predictions, outputs, or one hook."""
    return call.plan is None, call.outputs, None if call.hook is None else call.hook.rule


def _sample_shapes(samples: Samples) -> tuple[Any, ...]:
    return samples.x.shape[1:], samples.x.dtype, samples.y.shape[1:], samples.y.dtype, samples.precision


def join_plans(plans: Sequence[TrainingPlan], method: Method) -> TrainingPlan | None:
    """Return several plans as one for a joint method; None if their phases or settings differ."""
    first = plans[0]
    phases = [[_without_loss(phase, plan.method) for phase, _ in plan.phases] for plan in plans]
    settings = [(plan.local, plan.noise) for plan in plans]
    if any(each != phases[0] for each in phases) or any(each != settings[0] for each in settings):
        return None
    shared = [phase for phase, _ in first.phases]
    if isinstance(method, MethodOfRuns):
        # A step or a loss that is no function of the method may use its settings in a way that is unknown here.
        if any(phase.step is not gradient_step or loss is UNKNOWN for phase, loss in phases[0]):
            return None
        shared = [replace(phase, loss=loss and LossOfRuns(method, loss)) for phase, loss in phases[0]]
    orders = zip(*([order for _, order in plan.phases] for plan in plans), strict=True)
    joined = [(phase, join_orders(order)) for phase, order in zip(shared, orders, strict=True)]
    return replace(first, method=method, phases=joined)


UNKNOWN = object()
"""In place of a loss that is no function of the method's class."""


def _without_loss(phase: Phase, method: Method) -> tuple[Phase, Any]:
    """Return a phase, without its loss if that is a function of the method's class, and this function."""
    if phase.loss is None:
        return phase, None
    function = getattr(phase.loss, "__func__", None)
    if function is None or getattr(phase.loss, "__self__", None) is not method:
        return phase, UNKNOWN
    return replace(phase, loss=None), function


def join_cohorts(cohorts: Sequence[Cohort], offsets: Sequence[int], settings: Tensors) -> Cohort:
    """Return several cohorts as one; tensors that were common to a cohort get a client axis.

    Parameters
    ----------
    cohorts
        The cohorts.
    offsets
        What to add to the rows of each, which then select samples of all federations.
    settings
        Tensors [k] that are added to the clients' inboxes.
    """

    def joined(groups: Sequence[ClientTensors]) -> ClientTensors:
        names = groups[0].merged()
        expanded = [
            {name: value.expand(len(cohort), *value.shape) for name, value in group.common.items()} | group.own
            for group, cohort in zip(groups, cohorts, strict=True)
        ]
        return ClientTensors({name: torch.cat([each[name] for each in expanded]) for name in names})

    received = None if cohorts[0].received is None else joined([cohort.at_start() for cohort in cohorts])
    clients = torch.cat([cohort.clients + offset for cohort, offset in zip(cohorts, offsets, strict=True)])
    inbox = joined([cohort.inbox for cohort in cohorts])
    return Cohort(
        clients,
        row_index(clients, cohorts[0].counts.device),
        tuple(name for cohort in cohorts for name in cohort.names),
        joined([cohort.params for cohort in cohorts]),
        joined([cohort.memory for cohort in cohorts]),
        inbox.having(settings),
        torch.cat([cohort.counts for cohort in cohorts]),
        {name: torch.cat([cohort.velocity[name] for cohort in cohorts]) for name in cohorts[0].velocity},
        received,
    )


def join_orders(orders: Sequence[Order]) -> Order:
    """Return the batches of several cohorts as those of one cohort."""
    steps, _, width = (max(order.index.shape[axis] for order in orders) for axis in (1, 2, 3))

    def padded(numbers: np.ndarray) -> np.ndarray:
        missing = [(0, 0), (0, steps - numbers.shape[1]), (0, 0), (0, width - numbers.shape[-1])]
        return np.pad(numbers, missing[: numbers.ndim])

    return Order(
        np.concatenate([padded(order.index) for order in orders]),
        np.concatenate([padded(order.sizes) for order in orders]),
        np.concatenate([order.steps for order in orders]),
        np.concatenate([padded(order.keys) for order in orders]),
    )


def _same_shapes(cohorts: Sequence[Cohort]) -> bool:
    def client_shapes(tensors: ClientTensors) -> dict[str, torch.Size]:
        common = {name: value.shape for name, value in tensors.common.items()}
        return {**common, **{name: value.shape[1:] for name, value in tensors.own.items()}}

    def shapes(cohort: Cohort) -> list[Any]:
        tensors = (cohort.params, cohort.memory, cohort.inbox)
        return [cohort.received is None, cohort.velocity.keys(), *map(client_shapes, tensors)]

    return all(shapes(cohort) == shapes(cohorts[0]) for cohort in cohorts)


def _split(tensors: Tensors, sizes: list[int]) -> list[Tensors]:
    parts = {name: torch.split(value, sizes) for name, value in tensors.items()}
    return [{name: part[number] for name, part in parts.items()} for number in range(len(sizes))]
