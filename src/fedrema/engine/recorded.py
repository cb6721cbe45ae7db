"""Steps on a GPU that are recorded once and replayed: what costs time is launching, not computing."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from fedrema.core import Batch
from fedrema.engine.crowd import Job, Stacked
from fedrema.engine.descent import Descent, Losses
from fedrema.net import Tensors

MOST_STAGES = 4
"""Sizes of crowds that are remembered; each keeps a copy of what the crowd trains."""
MOST_SEEN = 256


class Stage:
    """What a crowd trains with, in tensors that keep their place in memory from round to round."""

    def __init__(self, job: Job) -> None:
        crowd = job.crowd
        params = {name: laid_out(value) for name, value in crowd.params.copied(len(crowd)).items()}
        velocity = {name: laid_out(value.clone()) for name, value in job.velocity.items()}
        self.client = crowd.all().having(params=params)
        self.velocity = velocity
        self.losses = Losses(torch.zeros_like(crowd.counts), torch.zeros_like(crowd.counts))
        self.rows = crowd.clients.to(crowd.counts.device)
        self.rate = torch.zeros((), device=crowd.counts.device)

    def own(self) -> "Stage":
        """Make everything this stage's own, so that later rounds can be copied into it."""
        client = self.client
        groups = {
            group: {name: value.clone() for name, value in getattr(client, group).items()}
            for group in ("received", "memory", "inbox")
        }
        self.client = client.having(**groups, count=client.count.clone())
        return self

    def load(self, job: Job) -> None:
        """Take over another round of a crowd of the same shape."""
        crowd, client = job.crowd, self.client
        for name, value in crowd.params.merged().items():
            client.params[name].copy_(value)  # what is common is spread over the clients
        for name, value in job.velocity.items():
            self.velocity[name].copy_(value)
        new = crowd.all()
        for group in ("received", "memory", "inbox"):
            held = getattr(client, group)
            for name, value in getattr(new, group).items():
                held[name].copy_(value)
        client.count.copy_(new.count)
        self.rows.copy_(crowd.clients, non_blocking=True)
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
        groups = (self.client.params, self.velocity)
        params, velocity = ({name: value.clone() if copy else value for name, value in each.items()} for each in groups)
        return params, velocity, self.losses.mean()


class Recorder:
    """Runs steps; whatever comes a second time is recorded as a CUDA graph."""

    def __init__(self) -> None:
        self.stages: OrderedDict[Hashable, Stage] = OrderedDict()
        self.graphs: dict[tuple[Hashable, ...], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.seen: OrderedDict[Hashable, bool] = OrderedDict()
        """What has been run, and whether it may be recorded."""
        self.pool: Any = None

    def stage(self, job: Job) -> Stage:
        """Return a stage with this job's tensors: the same as last time where the shapes are the same."""
        key = _shapes(job)
        if key in self.stages:
            self.stages.move_to_end(key)
            self.stages[key].load(job)
        else:
            self.stages[key] = Stage(job).own()
            if len(self.stages) > MOST_STAGES:
                _, old = self.stages.popitem(last=False)
                self.graphs = {what: graph for what, graph in self.graphs.items() if what[0] != id(old)}
        return self.stages[key]

    def run(self, stage: Stage, what: Hashable, plan: Tensor, step: Callable[[Tensor], None]) -> None:
        """Take a step for each row of a plan."""
        key = (id(stage), what, plan.shape[1:])
        for now in plan:
            if key in self.graphs:
                graph, given = self.graphs[key]
                given.copy_(now)
                graph.replay()
            elif self.seen.get(key) and self._record(key, now, step):
                self.graphs[key][0].replay()
            else:
                step(now)
                self.seen.setdefault(key, True)
                if len(self.seen) > MOST_SEEN:
                    self.seen.popitem(last=False)

    def _record(self, key: tuple[Hashable, ...], now: Tensor, step: Callable[[Tensor], None]) -> bool:
        """Record a step; False where a method does what cannot be recorded, such as looking at a number."""
        given = now.clone()
        graph = torch.cuda.CUDAGraph()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        try:
            # Other threads may go on with their own work meanwhile.
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                step(given)
        except RuntimeError:
            self.seen[key] = False
            return False
        self.graphs[key] = (graph, given)
        return True


def _shapes(job: Job) -> Hashable:
    crowd = job.crowd

    def shapes(stacked: Stacked) -> Hashable:
        return tuple((name, axis, stacked.merged()[name].shape) for name, axis in stacked.axes().items())

    groups = (crowd.params, crowd.at_first(), crowd.memory, crowd.inbox, Stacked(job.velocity))
    return len(crowd), tuple(map(shapes, groups))


def laid_out(value: Tensor) -> Tensor:
    """Return stacked convolution weights [k, O, I, h, w] with their input channels last, as our programs read them."""
    if value.dim() != 5 or not value.is_cuda:
        return value
    return value.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
