"""How much memory there is, and how many clients it can train at once."""

import torch
from torch import Tensor

from fedrema.base.memory import free_memory
from fedrema.core import Mean
from fedrema.models.body_and_head import Net, size

GIGABYTE = 10**9


def free_bytes(device: torch.device) -> int:
    """Return how much memory can still be taken on a device."""
    if device.type == "cuda":
        # What this process holds but does not use can be taken as well.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return free_memory()


def step_bytes(net: Net, batch: Tensor) -> int:
    """Return what one client's step keeps for its gradient, found by trying."""
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


def client_bytes(net: Net, batch: Tensor, stacked: bool, recorded: bool) -> int:
    """Return what a client takes while it trains.

    Parameters and momentum, as they were and as they become, and once more on their way to disk; stacked also a
    gradient, what it is computed from, and on a GPU what recorded steps keep in place.
    """
    each = 6 * size(net.initial)
    if stacked:
        each += (6 if recorded else 1) * size(net.initial) + 2 * step_bytes(net, batch)
    return each


def clients_at_once(budget: float, each: int) -> int:
    """Return how many clients of this size fit into a budget: whole blocks of `Mean`."""
    return max(1, int(budget / max(each, 1)) // Mean.BLOCK) * Mean.BLOCK
