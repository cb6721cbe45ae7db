"""Gaussian noise from the operating system's random generator: the only noise that protects data."""

import math
import os

import numpy as np

AT_ONCE = 1 << 17
"""Pairs of numbers that are drawn at a time, to limit memory."""
BITS = 53
"""Bits of a uniform number, as many as double precision can hold."""


def gaussian_noise(shape: tuple[int, ...]) -> np.ndarray:
    """Return independent numbers of the standard normal distribution in double precision (Box and Muller, 1958).

    NumPy's and torch's generators are not used: their state can be computed from their output. The largest absolute
    value is 8.6.
    """
    count = math.prod(shape)
    drawn = np.empty(count + count % 2)
    for first in range(0, len(drawn), 2 * AT_ONCE):
        some = drawn[first : first + 2 * AT_ONCE]
        half = len(some) // 2
        radius = np.sqrt(-2 * np.log(1 - _uniform(half)))  # of (0, 1], because log 0 is infinite
        angle = 2 * math.pi * _uniform(half)
        some[:half], some[half:] = radius * np.cos(angle), radius * np.sin(angle)
    return drawn[:count].reshape(shape)


def _uniform(count: int) -> np.ndarray:
    """Return numbers of [0, 1)."""
    numbers = np.frombuffer(os.urandom(8 * count), np.uint64) >> np.uint64(64 - BITS)
    uniform: np.ndarray = numbers * 2.0**-BITS
    return uniform
