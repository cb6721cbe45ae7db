"""Dropout whose masks follow from a key: the same in both backends, on every device, and after a run is resumed.

A random number follows from the key (client, round, phase and step), the number of the layer's call in the step, and
the position of the element. The position counts from the first sample of the batch, so that padding at the end changes
nothing.
"""

import math

from torch import Tensor

from fedrema.base.random import BITS, random_integers
from fedrema.errors import BadInput

ALPHA = -1.7580993408473766
"""The value of SELU for inputs far below 0, which alpha dropout assigns."""


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
