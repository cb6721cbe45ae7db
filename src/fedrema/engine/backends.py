"""The interface of the two backends, and the rules by which one is chosen with its number of threads.

More threads per operation can change how its sums are rounded. So the number follows from the amount of work, never
from the load of the machine; it is recorded with the run and used again when the run is resumed. How many clients
train in parallel does not change results.
"""

import math
from typing import Protocol

import torch
from torch import Tensor

from fedrema.core import Method
from fedrema.core.options import Backend
from fedrema.engine.batches import Samples, TrainingPlan
from fedrema.engine.cohort import Cohort, Hook
from fedrema.engine.costs import operations_per_step
from fedrema.engine.devices import Arithmetic
from fedrema.engine.loop import LoopEngine, can_use_channels_last, draws_without_key
from fedrema.engine.stackable import why_not_stackable
from fedrema.engine.stacked import StackedEngine
from fedrema.errors import BadInput
from fedrema.models.body_and_head import Net, Tensors

SMALL_STEP = 30e6
"""Operations of one client's step below which stacking clients is faster than a loop over them.

CPU time of one thread, 20 clients, loop relative to stacked: 2.7 to 6.2 with 0.4 to 5 million operations (also with
convolutions), 1.1 to 2.9 with 9 million, 1.8 with 17, 0.7 with 240, and 0.3 to 0.6 with more.
"""
SMALL_STACK = 500e6
"""Operations of a step of all clients below which more threads do not pay off: a few milliseconds on one core."""
MAX_PARALLEL_CLIENTS = 8
"""More Python threads would wait for each other between the operations of a step."""


class Engine(Protocol):
    """Trains and evaluates cohorts; `fedrema.engine.loop` and `fedrema.engine.stacked` implement it."""

    name: str
    net: Net
    threads: int | None
    """Threads per operation; None: torch's setting."""
    parallel: int
    """Clients that a loop trains at the same time."""

    def apply_hook(self, hook: Hook, cohort: Cohort, samples: Samples | None) -> dict[str, Tensors]:
        """Apply a hook to every client and stack the results [k, ...]."""

    def predictions(self, method: Method, cohort: Cohort, samples: Samples, outputs: bool = False) -> Tensor:
        """Return the class that each client predicts for each of its samples [k, n]; -1 in the padding.

        With `outputs`, return the outputs of its network [k, n, C]; they are undefined in the padding.
        """

    def train(self, cohort: Cohort, samples: Samples, plan: TrainingPlan) -> tuple[Tensors, Tensors, Tensor]:
        """Return trained parameters and momentum [k, ...] and the mean losses [k]; the inputs are not changed."""


def make_engine(
    backend: Backend,
    net: Net,
    sample: Tensor,
    arithmetic: Arithmetic,
    clients: int,
    batch: int,
    threads: int = 0,
) -> Engine:
    """Return the engine of a backend; `auto` stacks on a GPU, and on a CPU if a client's step is small.

    `threads` is the number per operation on a CPU; 0: chosen by the amount of work.
    """
    on_cpu = sample.device.type == "cpu"
    operations = operations_per_step(net, sample, batch) if on_cpu else 0.0
    name = backend
    if backend == "auto" and operations >= SMALL_STEP:  # without the check below, which takes a second here
        name = "loop"
    elif backend != "loop":
        obstacle = why_not_stackable(net, sample)
        if obstacle and backend == "stacked":
            raise BadInput(f"--backend stacked cannot train this network: {obstacle}; use --backend loop.")
        name = "loop" if obstacle else "stacked"
    stacked, available = name == "stacked", torch.get_num_threads()
    if not on_cpu:
        if stacked:
            return StackedEngine(net, arithmetic)
        return LoopEngine(net, arithmetic, channels_last=can_use_channels_last(net, sample))
    if stacked:
        return StackedEngine(net, arithmetic, threads or threads_per_operation(True, operations, clients, 1))
    # Draws that have no key depend on their order, so that one client trains after the other, with all threads.
    most = 1 if operations < SMALL_STEP or draws_without_key(net, sample) else clients
    per_operation = threads or threads_per_operation(False, operations, clients, parallel_clients(available, most))
    parallel = max(1, min(available // per_operation, most, MAX_PARALLEL_CLIENTS))
    return LoopEngine(net, arithmetic, per_operation, parallel, can_use_channels_last(net, sample))


def threads_per_operation(stacked: bool, operations: float, clients: int, parallel: int) -> int:
    """Return the number of threads per operation if this many clients train in parallel."""
    available = torch.get_num_threads()
    if stacked:
        return 1 if operations * clients < SMALL_STACK else available
    return 1 if operations < SMALL_STEP else max(1, available // parallel)


def parallel_clients(threads: int, clients: int) -> int:
    """Return how many clients to train in parallel, given that two threads make an operation 1.7 times as fast."""

    def time(parallel: int) -> float:
        per_operation = threads // parallel
        return math.ceil(clients / parallel) / math.pow(per_operation, math.log2(1.7))

    return min(range(1, max(2, min(threads, clients, MAX_PARALLEL_CLIENTS) + 1)), key=time)
