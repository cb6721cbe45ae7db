# mypy: ignore-errors
"""Triton programs for norms and steps of stacked clients; tensors are [client, all other axes in memory order].

They take several tensors at once, as tuples: a launch for each small tensor would take longer than its computation.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["y_client", "y_first"])
def squares(tensors, sizes, y, y_client, y_first, block: tl.constexpr):
    """Sum the squares of one stretch of one client's tensors into y[client, y_first + stretch]."""
    client = tl.program_id(1).to(tl.int64)
    y += client * y_client + y_first + tl.program_id(0)
    stretch = tl.program_id(0)
    for number in tl.static_range(len(tensors)):
        size = sizes[number]
        if (stretch >= 0) & (stretch * block < size):
            place = stretch * block + tl.arange(0, block)
            value = tl.load(tensors[number] + client * size + place, mask=place < size, other=0.0).to(tl.float32)
            tl.store(y, tl.sum(value * value, 0))
        stretch -= tl.cdiv(size, block)


@triton.jit(do_not_specialize=["count"])
def roots(y, norms, count, block: tl.constexpr):
    """Add up each client's sums, always in the same order, and take the root."""
    client = tl.program_id(0).to(tl.int64)
    total = tl.zeros((block,), tl.float32)
    for first in range(0, count, block):
        place = first + tl.arange(0, block)
        total += tl.load(y + client * count + place, mask=place < count, other=0.0)
    tl.store(norms + client, tl.sqrt(tl.sum(total, 0)))


@triton.jit
def momentum(
    parameters, velocities, gradients, sizes, scale, rate, active, keep, decay,
    has_scale: tl.constexpr, has_active: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Step one stretch of one client's tensors: each value is read once and written once."""
    client = tl.program_id(1).to(tl.int64)
    stretch = tl.program_id(0)
    for number in tl.static_range(len(parameters)):
        size = sizes[number]
        if (stretch >= 0) & (stretch * block < size):
            place = stretch * block + tl.arange(0, block)
            mask = place < size
            if has_active:  # not times 0: a client that has finished keeps its values whatever its gradient is
                mask &= tl.load(active + client + tl.zeros_like(place)) != 0
            place = client * size + place
            value = tl.load(gradients[number] + place, mask=mask, other=0.0).to(tl.float32)
            weight = tl.load(parameters[number] + place, mask=mask, other=0.0)
            speed = tl.load(velocities[number] + place, mask=mask, other=0.0)
            if has_scale:
                value *= tl.load(scale + client).to(tl.float32)
            speed = keep * speed + (value + decay * weight)
            tl.store(velocities[number] + place, speed, mask=mask)
            tl.store(parameters[number] + place, weight - tl.load(rate).to(tl.float32) * speed, mask=mask)
        stretch -= tl.cdiv(size, block)
