"""How many threads share an operation on a CPU: decided by the amount of work, never by the load of the machine.

More threads per operation can change how its sums are rounded. So the number follows from a fixed rule, is recorded
with the run, and is used again when the run is resumed. How many clients train side by side changes nothing.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn

from fedrema.models.body_and_head import Net

SMALL_STEP = 30e6
"""Operations of one client's step below which stacking clients is faster than training them one after the other.

CPU time of one thread, 20 clients, looped against stacked: 2.7 to 6.2 times as long with 0.4 to 5 million operations
(also with convolutions), 1.1 to 2.9 times with 9, 1.8 with 17, but 0.7 with 240, and 0.3 to 0.6 with more.
"""
SMALL_STACK = 500e6
"""Operations of a step of all clients below which threads cost more than they save, a few milliseconds on one core."""

P = ParamSpec("P")
R = TypeVar("R")


class HasThreads(Protocol):
    """Something that computes with a fixed number of threads."""

    threads: int | None


S = TypeVar("S", bound=HasThreads)


def operations_per_step(net: Net, sample: Tensor, batch: int) -> float:
    """Count the operations of one client's step, forward and backward, in layers that have matrices of weights.

    Close enough for a rule; torch's own counter takes half a second to import.
    """
    forward = 0.0

    def count(layer: nn.Module, _: object, output: object) -> None:
        nonlocal forward
        made = output[0] if isinstance(output, tuple) else output
        if isinstance(made, Tensor):
            matrices = [value for value in layer.parameters(recurse=False) if value.dim() > 1]
            forward += sum(2.0 * made.numel() * value[0].numel() for value in matrices)

    handles = [layer.register_forward_hook(count) for _, layer in net.layers()]
    net.train(False)
    try:
        with torch.no_grad():
            net(net.initial, sample)
    finally:
        for handle in handles:
            handle.remove()
    return 3 * forward * batch / len(sample)


def threads_per_operation(stacked: bool, operations: float, clients: int, side_by_side: int) -> int:
    """Return how many of torch's threads share an operation; `side_by_side` clients train at the same time."""
    available = torch.get_num_threads()
    if stacked:
        return 1 if operations * clients < SMALL_STACK else available
    return 1 if operations < SMALL_STEP else max(1, available // side_by_side)


@contextmanager
def torch_threads(number: int | None) -> Iterator[None]:
    """Let so many threads share an operation for a while; None leaves torch's setting as it is."""
    before = torch.get_num_threads()
    if number is None or number == before:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def with_its_threads(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Run a method with the object's own number of threads."""

    @functools.wraps(method)
    def wrapped(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with torch_threads(self.threads):
            return method(self, *args, **kwargs)

    return wrapped
