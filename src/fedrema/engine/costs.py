"""The costs of training a network: operations per step, memory per client, and how many clients fit into memory."""

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedrema.base.memory import free_memory
from fedrema.core import Mean
from fedrema.models.body_and_head import Net, size

GIGABYTE = 10**9


def operations_per_step(net: Net, sample: Tensor, batch: int) -> float:
    """Count the operations of one client's step, forward and backward, in layers with weight matrices.

    An estimate, sufficient to choose a backend; torch's own counter takes half a second to import.
    """
    forward = 0.0

    def count(layer: nn.Module, _: object, output: object) -> None:
        nonlocal forward
        result = output[0] if isinstance(output, tuple) else output
        if isinstance(result, Tensor):
            matrices = [value for value in layer.parameters(recurse=False) if value.dim() > 1]
            if isinstance(layer, nn.RNNBase | nn.MultiheadAttention):  # each matrix is applied at each position
                forward += sum(2.0 * result.numel() / result.shape[-1] * value.numel() for value in matrices)
            else:
                forward += sum(2.0 * result.numel() * value[0].numel() for value in matrices)

    attention = [part for _, part in net.submodules() if isinstance(part, nn.MultiheadAttention)]
    handles = [layer.register_forward_hook(count) for layer in (*(layer for _, layer in net.layers()), *attention)]
    net.train(False)
    try:
        with torch.no_grad():
            net(net.initial, sample)
    finally:
        for handle in handles:
            handle.remove()
    return 3 * forward * batch / len(sample)


def free_bytes(device: torch.device) -> int:
    """Return how much memory is available on a device."""
    if device.type == "cuda":
        # Memory that torch has reserved but does not use is available as well.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return free_memory()


def step_bytes(net: Net, batch: Tensor) -> int:
    """Return the bytes that one client's step saves for the backward pass, measured with one forward pass."""
    seen: dict[int, int] = {}

    def note(value: Tensor) -> Tensor:
        seen[value.data_ptr()] = value.numel() * value.element_size()
        return value

    params = {name: value.clone().requires_grad_(name in net.trainable) for name, value in net.initial.items()}
    net.train(True)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
        net(params, batch, mask=batch.new_ones(len(batch), dtype=next(iter(params.values())).dtype))
    net.train(False)
    return sum(seen.values())


def client_bytes(net: Net, batch: Tensor, stacked: bool, with_graphs: bool) -> int:
    """Return the bytes of memory that one client needs while it trains.

    Parameters and momentum before and after training, and a copy for the checkpoint. Stacked clients also need a
    gradient and the activations it is computed from, and with CUDA graphs (`with_graphs`) their static buffers.
    """
    each = 6 * size(net.initial)
    if stacked:
        each += (6 if with_graphs else 1) * size(net.initial) + 2 * step_bytes(net, batch)
    return each


def clients_at_once(budget: float, each: int) -> int:
    """Return how many clients of this size fit into a budget, in whole blocks of `Mean`."""
    return max(1, int(budget / max(each, 1)) // Mean.BLOCK) * Mean.BLOCK


MATRIX = {"cpu": 2048, "cuda": 8192}
"""Rows and columns of the matrices."""
REPEATS = 3
"""Repetitions of each measurement."""


def product_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Return the operations per second of a square matrix product."""
    left, right = (torch.rand(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: left @ right, device)


def seconds_of(action: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of an action that has been warmed up."""
    calls = 4 if device.type == "cuda" else 1  # waiting for the GPU takes time, shared by several calls
    seconds = []
    for _ in range(REPEATS + 1):
        synchronise(device)
        begun = time.perf_counter()
        for _ in range(calls):
            action()
        synchronise(device)
        seconds.append((time.perf_counter() - begun) / calls)
    return statistics.median(seconds[1:])


def synchronise(device: torch.device) -> None:
    """Wait until a GPU has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
