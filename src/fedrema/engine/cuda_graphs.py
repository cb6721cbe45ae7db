"""Steps, predictions and hooks as CUDA graphs, without which launching kernels would dominate the time of a step."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from fedrema.engine.buffers import StaticBuffers
from fedrema.engine.cohort import ClientTensors, Cohort
from fedrema.models.body_and_head import Tensors

MAX_BUFFERS = 8
"""Cohort shapes whose buffers and graphs are kept."""
MAX_SEEN = 256
"""Keys of calls without a graph that are remembered."""


class CudaGraphs:
    """Runs functions on static buffers: the second call with the same key is captured, later calls are replayed."""

    def __init__(self) -> None:
        self.buffers: OrderedDict[Hashable, StaticBuffers] = OrderedDict()
        self.captured: dict[tuple[Hashable, ...], tuple[torch.cuda.CUDAGraph, Tensor, Any]] = {}
        """By key: the graph, its input and its result."""
        self.seen: OrderedDict[Hashable, bool] = OrderedDict()
        """Keys that have run before, and whether they can be captured."""
        self.pool: Any = None
        self.capturing = False
        """Whether a function is being captured."""

    def training_buffers(self, cohort: Cohort) -> StaticBuffers:
        """Return training buffers with this cohort's tensors; cohorts of the same shape share them."""
        key = ("train", _shapes(cohort, cohort.velocity))
        return self._loaded(key, cohort, cohort.velocity, StaticBuffers.for_training)

    def prediction_buffers(self, cohort: Cohort) -> StaticBuffers:
        """Return the buffers of predictions and hooks with this cohort's tensors."""
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

    def run(self, buffers: StaticBuffers, what: Hashable, inputs: Tensor, function: Callable[[Tensor], Any]) -> Any:
        """Return `function(inputs)`; the result is valid until the next call.

        `what`, together with the buffers and the shape of the input, must determine everything else that `function`
        depends on.
        """
        key = (id(buffers), what, inputs.shape)
        if key in self.captured or (self.seen.get(key) and self._capture(key, inputs, function)):
            graph, static_input, result = self.captured[key]
            static_input.copy_(inputs)
            graph.replay()
            return result
        self.seen.setdefault(key, True)
        if len(self.seen) > MAX_SEEN:
            self.seen.popitem(last=False)
        return function(inputs)

    def _capture(self, key: tuple[Hashable, ...], inputs: Tensor, function: Callable[[Tensor], Any]) -> bool:
        """Capture a function; return False if a method does what cannot be captured, such as reading a value."""
        static_input = inputs.clone()
        graph = torch.cuda.CUDAGraph()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        self.capturing = True
        try:
            # "thread_local": other threads may use the GPU during the capture.
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                result = function(static_input)
        except Exception:  # an error that is not due to the capture occurs again without it
            self.seen[key] = False
            return False
        finally:
            self.capturing = False
        self.captured[key] = (graph, static_input, result)
        return True


def _shapes(cohort: Cohort, velocity: Tensors) -> Hashable:
    def shapes(tensors: ClientTensors) -> Hashable:
        return tuple((name, axis, tensors.merged()[name].shape) for name, axis in tensors.axes().items())

    groups = (cohort.params, cohort.at_start(), cohort.memory, cohort.inbox, ClientTensors(velocity))
    return len(cohort), tuple(map(shapes, groups))
