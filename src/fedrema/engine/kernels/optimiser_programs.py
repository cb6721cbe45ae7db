# mypy: ignore-errors
"""Norms and steps of stacked clients, as Triton programs over [client, everything else in memory order]."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["y_client", "y_first"])
def squares(g, y, size, y_client, y_first, steps: tl.constexpr, block: tl.constexpr):
    """Sum the squares of one stretch of one client's tensor into y[client, y_first + stretch]."""
    client = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * (steps * block)
    g += client * size
    total = tl.zeros((block,), tl.float32)
    for step in tl.static_range(steps):
        place = first + step * block + tl.arange(0, block)
        value = tl.load(g + place, mask=place < size, other=0.0).to(tl.float32)
        total += value * value
    tl.store(y + client * y_client + y_first + tl.program_id(0), tl.sum(total, 0))


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
    parameter, velocity, gradient, scale, rate, active, size, keep, decay,
    has_scale: tl.constexpr, has_active: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    """Step one stretch of one client's tensor: each value is read once and written once."""
    client = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * block + tl.arange(0, block)
    mask = place < size
    if has_active:  # not times 0: a client that has finished keeps its values whatever its gradient is
        mask &= tl.load(active + client + tl.zeros_like(place)) != 0
    place = client * size + place
    value = tl.load(gradient + place, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(parameter + place, mask=mask, other=0.0)
    speed = tl.load(velocity + place, mask=mask, other=0.0)
    if has_scale:
        value *= tl.load(scale + client).to(tl.float32)
    speed = keep * speed + (value + decay * weight)
    tl.store(velocity + place, speed, mask=mask)
    tl.store(parameter + place, weight - tl.load(rate).to(tl.float32) * speed, mask=mask)
