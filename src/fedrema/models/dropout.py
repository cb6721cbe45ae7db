"""Dropout whose masks follow from a key: the same in both backends, on every device, and after a run is resumed.

A random number is a hash of the key (client, round, phase and step), the number of the layer's call in the step, and
the position of the element (a counter-based generator). The position counts from the first sample of the batch, so that
padding at the end changes nothing.
"""

import math

import torch
from torch import Tensor

from fedrema.errors import BadInput

BITS = 24
"""Bits of a random number that are compared with the probability."""
# Multipliers of a 32-bit integer hash with low bias ("lowbias32"), as signed integers.
FIRST, SECOND = 0x7FEB352D, 0x846CA68B - (1 << 32)
ALPHA = -1.7580993408473766
"""The value of SELU for inputs far below 0, which alpha dropout assigns."""


def random_integers(key: Tensor, draw: int, count: int) -> Tensor:
    """Return integers from 0 to 2²⁴ − 1 that are uniformly distributed and independent.

    Parameters
    ----------
    key
        One 64-bit integer.
    draw
        The number of the draw with this key.
    count
        How many integers to return.
    """
    mixed = key ^ _spread_bits(draw)
    low, high = (mixed & 0xFFFFFFFF).to(torch.int32), (mixed >> 32).to(torch.int32)
    position = torch.arange(count, dtype=torch.int32, device=key.device)
    return _hash(_hash(position ^ low) + high) & ((1 << BITS) - 1)


def _hash(value: Tensor) -> Tensor:
    # Arithmetic shifts extend the sign, so the new upper bits are removed.
    value = value ^ ((value >> 16) & 0xFFFF)
    value = value * FIRST
    value = value ^ ((value >> 15) & 0x1FFFF)
    value = value * SECOND
    return value ^ ((value >> 16) & 0xFFFF)


def _spread_bits(number: int) -> int:
    """Return a signed 64-bit integer that depends on all bits of a number (the finaliser of SplitMix64)."""
    value = (number * 0x9E3779B97F4A7C15) & (2**64 - 1)
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    value ^= value >> 31
    return value - 2**64 if value >= 2**63 else value


def kept(x: Tensor, shape: tuple[int, ...], p: float, key: Tensor, draw: int) -> Tensor:
    """Return a mask of a shape, in the type of x: 1 with probability 1 − p, else 0."""
    drawn: Tensor = random_integers(key, draw, math.prod(shape)) >= round(p * 2**BITS)
    return drawn.reshape(shape).to(x.dtype)


def dropout(x: Tensor, p: float, key: Tensor, draw: int, samples: int | None = None) -> Tensor:
    """Set elements of x to 0 with probability p, and scale the others by 1 / (1 − p).

    `samples` is the number of samples of the batch; it tells which axis of x is that of the samples.
    """
    axis = _sample_axis(x, samples)
    first = x.movedim(axis, 0)
    return (first * kept(x, tuple(first.shape), p, key, draw) * _scale(p)).movedim(0, axis)


def feature_dropout(x: Tensor, p: float, key: Tensor, draw: int) -> Tensor:
    """Set whole channels of x [n, channels, ...] to 0 with probability p."""
    return x * kept(x, _one_per_channel(x), p, key, draw) * _scale(p)


def alpha_dropout(x: Tensor, p: float, key: Tensor, draw: int, by_channel: bool = False) -> Tensor:
    """Dropout for self-normalising networks: keeps mean and variance (Klambauer et al., 2017)."""
    mask = kept(x, _one_per_channel(x) if by_channel else tuple(x.shape), p, key, draw)
    if p == 1:
        return x * 0
    scale: float = (1 - p + ALPHA**2 * (1 - p) * p) ** -0.5
    return (x * mask + (1 - mask) * ALPHA) * scale - scale * ALPHA * p


def checked(p: float) -> float:
    """Return a probability; torch's own functions reject others too."""
    if not 0 <= p <= 1:
        raise BadInput(f"The probability of dropout must be from 0 to 1, got {p}.")
    return float(p)


def _scale(p: float) -> float:
    return 1 / (1 - p) if p < 1 else 0.0


def _one_per_channel(x: Tensor) -> tuple[int, ...]:
    return (*x.shape[:2], *[1] * (x.dim() - 2))


def _sample_axis(x: Tensor, samples: int | None) -> int:
    """Return the axis of the samples: the first one, possibly merged with others, or the first of that length."""
    if samples is None or x.dim() == 0 or x.shape[0] % samples == 0 or samples not in x.shape:
        return 0
    return x.shape.index(samples)
