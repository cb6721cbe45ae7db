"""Steps on a GPU that are recorded once and replayed: what costs time is launching, not computing."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from fedrema.core import Batch
from fedrema.engine.cohort import Cohort, Job, Stacked
from fedrema.engine.sgd import Descent, Losses
from fedrema.models.body_and_head import Tensors

MOST_STAGES = 8
"""Shapes of cohorts that are remembered; each keeps a copy of what the cohort has."""
MOST_SEEN = 256
GROUPS = ("received", "memory", "inbox")


class Stage:
    """What a cohort has, in tensors that keep their place in memory from round to round."""

    def __init__(self, cohort: Cohort, params: Tensors, velocity: Tensors) -> None:
        self.client = cohort.all().having(params=params)
        self.velocity = velocity
        self.losses = Losses(torch.zeros_like(cohort.counts), torch.zeros_like(cohort.counts))
        self.rows = cohort.clients.to(cohort.counts.device)
        self.rate = torch.zeros((), device=cohort.counts.device)

    @classmethod
    def training(cls, job: Job) -> "Stage":
        """Return a stage on which every client trains parameters and momentum of its own."""
        params = {name: laid_out(value) for name, value in job.cohort.params.copied(len(job.cohort)).items()}
        return cls(job.cohort, params, {name: laid_out(value.clone()) for name, value in job.velocity.items()})

    @classmethod
    def scoring(cls, cohort: Cohort) -> "Stage":
        """Return a stage on which nothing changes."""
        return cls(cohort, {name: value.clone() for name, value in cohort.params.merged().items()}, {})

    def kept(self) -> "Stage":
        """Make everything this stage's own, so that later rounds can be copied into it."""
        client = self.client
        groups = {group: {name: value.clone() for name, value in getattr(client, group).items()} for group in GROUPS}
        self.client = client.having(**groups, count=client.count.clone())
        return self

    def load(self, cohort: Cohort, velocity: Tensors) -> None:
        """Take over another round of a cohort of the same shape."""
        client, new = self.client, cohort.all()
        pairs = [(self.velocity[name], value) for name, value in velocity.items()]
        for group in GROUPS:
            held = getattr(client, group)
            pairs += [(held[name], value) for name, value in getattr(new, group).items()]
        for name, value in cohort.params.merged().items():
            # Where each trains its own, what is common is spread over them.
            pairs.append((client.params[name], value.expand(client.params[name].shape)))
        if pairs:
            torch._foreach_copy_([place for place, _ in pairs], [value for _, value in pairs])
        client.count.copy_(new.count)
        self.rows.copy_(cohort.clients, non_blocking=True)
        self.losses.total.zero_()
        self.losses.steps.zero_()

    def set_rate(self, rate: float) -> None:
        """Set the learning rate."""
        self.rate.fill_(rate)

    def take(self, descent: Descent, batches: tuple[Batch, ...], active: Tensor | None) -> None:
        """Descend once, in place."""
        descent.step(self.client, self.velocity, self.losses, batches, active, self.rate)

    def result(self, copy: bool) -> tuple[Tensors, Tensors, Tensor]:
        """Return parameters, momentum and mean losses."""
        if not copy:
            return self.client.params, self.velocity, self.losses.mean()
        params, velocity = (
            {name: value.clone(memory_format=torch.contiguous_format) for name, value in group.items()}
            for group in (self.client.params, self.velocity)
        )
        return params, velocity, self.losses.mean()


class Recorder:
    """Runs work on stages; whatever comes a second time is recorded as a CUDA graph."""

    def __init__(self) -> None:
        self.stages: OrderedDict[Hashable, Stage] = OrderedDict()
        self.graphs: dict[tuple[Hashable, ...], tuple[torch.cuda.CUDAGraph, Tensor, Any]] = {}
        self.seen: OrderedDict[Hashable, bool] = OrderedDict()
        """What has been run, and whether it may be recorded."""
        self.pool: Any = None

    def training(self, job: Job) -> Stage:
        """Return a stage with this job's tensors: the same as last time where the shapes are the same."""
        return self._stage(("train", _shapes(job.cohort, job.velocity)), job, job.cohort, job.velocity)

    def scoring(self, cohort: Cohort) -> Stage:
        """Return a stage with this cohort's tensors."""
        return self._stage(("score", _shapes(cohort, {})), None, cohort, {})

    def _stage(self, key: Hashable, job: Job | None, cohort: Cohort, velocity: Tensors) -> Stage:
        if key in self.stages:
            self.stages.move_to_end(key)
            self.stages[key].load(cohort, velocity)
        else:
            self.stages[key] = (Stage.training(job) if job else Stage.scoring(cohort)).kept()
            if len(self.stages) > MOST_STAGES:
                _, old = self.stages.popitem(last=False)
                self.graphs = {what: graph for what, graph in self.graphs.items() if what[0] != id(old)}
        return self.stages[key]

    def run(self, stage: Stage, what: Hashable, given: Tensor, work: Callable[[Tensor], Any]) -> Any:
        """Do some work on a stage with the numbers given; what it returns holds until the next time."""
        key = (id(stage), what, given.shape)
        if key in self.graphs or (self.seen.get(key) and self._record(key, given, work)):
            graph, told, result = self.graphs[key]
            told.copy_(given)
            graph.replay()
            return result
        self.seen.setdefault(key, True)
        if len(self.seen) > MOST_SEEN:
            self.seen.popitem(last=False)
        return work(given)

    def _record(self, key: tuple[Hashable, ...], given: Tensor, work: Callable[[Tensor], Any]) -> bool:
        """Record some work; False where a method does what cannot be recorded, such as looking at a number."""
        told = given.clone()
        graph = torch.cuda.CUDAGraph()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        try:
            # Other threads may go on with their own work meanwhile.
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                result = work(told)
        except RuntimeError:
            self.seen[key] = False
            return False
        self.graphs[key] = (graph, told, result)
        return True


def _shapes(cohort: Cohort, velocity: Tensors) -> Hashable:
    def shapes(stacked: Stacked) -> Hashable:
        return tuple((name, axis, stacked.merged()[name].shape) for name, axis in stacked.axes().items())

    groups = (cohort.params, cohort.at_first(), cohort.memory, cohort.inbox, Stacked(velocity))
    return len(cohort), tuple(map(shapes, groups))


def laid_out(value: Tensor) -> Tensor:
    """Return stacked convolution weights [k, O, I, h, w] with their input channels last, as our programs read them."""
    if value.dim() != 5 or not value.is_cuda:
        return value
    return value.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
