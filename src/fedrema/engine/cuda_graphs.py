"""Training steps and predictions as CUDA graphs: launching single kernels would take longer than computing them."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from fedrema.core import Batch
from fedrema.engine.cohort import ClientTensors, Cohort
from fedrema.engine.sgd import LossMean, PhaseSGD
from fedrema.models.body_and_head import Tensors

MAX_BUFFERS = 8
"""Cohort shapes whose buffers and graphs are kept."""
MAX_SEEN = 256
GROUPS = ("received", "memory", "inbox")


class StaticBuffers:
    """A cohort's tensors at memory addresses that stay the same from round to round, as CUDA graphs require."""

    def __init__(self, cohort: Cohort, params: Tensors, velocity: Tensors) -> None:
        self.client = cohort.all().having(params=params)
        self.velocity = velocity
        self.losses = LossMean(torch.zeros_like(cohort.counts), torch.zeros_like(cohort.counts))
        self.rows = cohort.clients.to(cohort.counts.device)
        self.rate = torch.zeros((), device=cohort.counts.device)

    @classmethod
    def for_training(cls, cohort: Cohort) -> "StaticBuffers":
        """Return buffers in which every client has a copy of all parameters and of its momentum."""
        params = {name: channels_last(value) for name, value in cohort.params.copied(len(cohort)).items()}
        return cls(cohort, params, {name: channels_last(value.clone()) for name, value in cohort.velocity.items()})

    @classmethod
    def for_predictions(cls, cohort: Cohort) -> "StaticBuffers":
        """Return buffers whose parameters do not change; common parameters are held once."""
        return cls(cohort, {name: value.clone() for name, value in cohort.params.merged().items()}, {})

    def copied(self) -> "StaticBuffers":
        """Copy the tensors that are still the cohort's, so that later cohorts can be loaded into these buffers."""
        client = self.client
        groups = {group: {name: value.clone() for name, value in getattr(client, group).items()} for group in GROUPS}
        self.client = client.having(**groups, count=client.count.clone())
        return self

    def load(self, cohort: Cohort, velocity: Tensors) -> None:
        """Copy another cohort of the same shape into the buffers."""
        client, new = self.client, cohort.all()
        pairs = [(self.velocity[name], value) for name, value in velocity.items()]
        for group in GROUPS:
            held = getattr(client, group)
            pairs += [(held[name], value) for name, value in getattr(new, group).items()]
        for name, value in cohort.params.merged().items():
            # In training buffers, common parameters are copied to every client.
            pairs.append((client.params[name], value.expand(client.params[name].shape)))
        if pairs:
            torch._foreach_copy_([target for target, _ in pairs], [value for _, value in pairs])
        client.count.copy_(new.count)
        self.rows.copy_(cohort.clients, non_blocking=True)
        self.losses.total.zero_()
        self.losses.steps.zero_()

    def set_rate(self, rate: float) -> None:
        """Set the learning rate."""
        self.rate.fill_(rate)

    def step(self, sgd: PhaseSGD, batches: tuple[Batch, ...], active: Tensor | None) -> None:
        """Take one step of SGD in place."""
        sgd.step(self.client, self.velocity, self.losses, batches, active, self.rate)

    def result(self, copy: bool) -> tuple[Tensors, Tensors, Tensor]:
        """Return parameters, momentum and mean losses."""
        if not copy:
            return self.client.params, self.velocity, self.losses.mean()
        params, velocity = (
            {name: value.clone(memory_format=torch.contiguous_format) for name, value in group.items()}
            for group in (self.client.params, self.velocity)
        )
        return params, velocity, self.losses.mean()


class CudaGraphs:
    """Runs functions on static buffers: the second call with the same key is captured, later calls are replayed."""

    def __init__(self) -> None:
        self.buffers: OrderedDict[Hashable, StaticBuffers] = OrderedDict()
        self.captured: dict[tuple[Hashable, ...], tuple[torch.cuda.CUDAGraph, Tensor, Any]] = {}
        """By key: the graph, its input and its result."""
        self.seen: OrderedDict[Hashable, bool] = OrderedDict()
        """Keys that have run before, and whether they can be captured."""
        self.pool: Any = None

    def training_buffers(self, cohort: Cohort) -> StaticBuffers:
        """Return training buffers with this cohort's tensors; cohorts of the same shape share them."""
        key = ("train", _shapes(cohort, cohort.velocity))
        return self._loaded(key, cohort, cohort.velocity, StaticBuffers.for_training)

    def prediction_buffers(self, cohort: Cohort) -> StaticBuffers:
        """Return prediction buffers with this cohort's tensors."""
        return self._loaded(("predict", _shapes(cohort, {})), cohort, {}, StaticBuffers.for_predictions)

    def _loaded(
        self, key: Hashable, cohort: Cohort, velocity: Tensors, make: Callable[[Cohort], StaticBuffers]
    ) -> StaticBuffers:
        if key in self.buffers:
            self.buffers.move_to_end(key)
            self.buffers[key].load(cohort, velocity)
        else:
            self.buffers[key] = make(cohort).copied()
            if len(self.buffers) > MAX_BUFFERS:
                _, old = self.buffers.popitem(last=False)
                self.captured = {key: graph for key, graph in self.captured.items() if key[0] != id(old)}
        return self.buffers[key]

    def run(self, buffers: StaticBuffers, what: Hashable, given: Tensor, work: Callable[[Tensor], Any]) -> Any:
        """Return `work(given)`; the result is valid until the next call.

        `what`, together with the buffers and the shape of the input, must determine everything else that `work`
        depends on.
        """
        key = (id(buffers), what, given.shape)
        if key in self.captured or (self.seen.get(key) and self._capture(key, given, work)):
            graph, static_input, result = self.captured[key]
            static_input.copy_(given)
            graph.replay()
            return result
        self.seen.setdefault(key, True)
        if len(self.seen) > MAX_SEEN:
            self.seen.popitem(last=False)
        return work(given)

    def _capture(self, key: tuple[Hashable, ...], given: Tensor, work: Callable[[Tensor], Any]) -> bool:
        """Capture a function; return False if a method does what cannot be captured, such as reading a value."""
        static_input = given.clone()
        graph = torch.cuda.CUDAGraph()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        try:
            # "thread_local": other threads may use the GPU during the capture.
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                result = work(static_input)
        except RuntimeError:
            self.seen[key] = False
            return False
        self.captured[key] = (graph, static_input, result)
        return True


def _shapes(cohort: Cohort, velocity: Tensors) -> Hashable:
    def shapes(tensors: ClientTensors) -> Hashable:
        return tuple((name, axis, tensors.merged()[name].shape) for name, axis in tensors.axes().items())

    groups = (cohort.params, cohort.at_start(), cohort.memory, cohort.inbox, ClientTensors(velocity))
    return len(cohort), tuple(map(shapes, groups))


def channels_last(value: Tensor) -> Tensor:
    """Return convolution weights [k, O, I, h, w] on a GPU with their input channels last, as our kernels read them."""
    if value.dim() != 5 or not value.is_cuda:
        return value
    return value.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
