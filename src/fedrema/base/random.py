"""Keyed random generators: a draw depends on its purpose, never on when or in which order it is made."""

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

Part = int | str
SEPARATOR = "\x1f"
"""Between the parts of a key."""
GOLDEN = 0x9E3779B97F4A7C15
"""The increment of SplitMix64."""
BITS = 24
"""Bits of the numbers that `random_integers` returns."""
# Multipliers of a 32-bit integer hash with low bias ("lowbias32"), as signed integers.
FIRST, SECOND = 0x7FEB352D, 0x846CA68B - (1 << 32)


def seed_of(*parts: Part) -> int:
    """Return a 63-bit hash of the parts, for example (seed, round, client, purpose)."""
    return int.from_bytes(hashlib.blake2b(encoded(*parts), digest_size=8).digest(), "big") >> 1


def encoded(*parts: Part) -> bytes:
    """Return the bytes that `seed_of` hashes."""
    # The separator is doubled inside a part, because a client's name may contain it.
    return SEPARATOR.join(f"{type(part).__name__}:{part}".replace(SEPARATOR, 2 * SEPARATOR) for part in parts).encode()


def numpy_generator(*parts: Part) -> np.random.Generator:
    """Return the NumPy generator of a key."""
    return np.random.Generator(np.random.Philox(key=seed_of(*parts)))


def step_keys(seeds: Sequence[int], steps: int) -> np.ndarray:
    """Return 64-bit integers [seeds, steps], to be used as keys of `random_integers`: SplitMix64 with these seeds."""
    first = np.array(seeds, np.uint64)[:, None]
    return _finalised(first + np.arange(1, steps + 1, dtype=np.uint64) * np.uint64(GOLDEN))


def _finalised(values: np.ndarray) -> np.ndarray:
    """Return signed integers that depend on all bits of unsigned ones (the finaliser of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    final: np.ndarray = (values ^ (values >> np.uint64(31))).view(np.int64)
    return final


def torch_generator(*parts: Part) -> torch.Generator:
    """Return the torch generator of a key; always on the CPU, so that draws do not depend on the device."""
    return torch.Generator().manual_seed(seed_of(*parts))


def random_integers(key: Tensor, draw: int, count: int) -> Tensor:
    """Return integers from 0 to 2²⁴ − 1, uniformly distributed: a hash of key, draw and position.

    It uses integer arithmetic only, so that the numbers are the same on every device.

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


def random_normals(key: Tensor, draw: int, count: int) -> Tensor:
    """Return numbers of the standard normal distribution in float64 (by the transform of Box and Muller).

    They follow from `random_integers`: pseudo-random numbers for simulations, which do not protect any data. The
    largest absolute value is 5.8. The draws 2·`draw` and 2·`draw` + 1 of the key are used.
    """
    first, second = (random_integers(key, 2 * draw + part, count).double() for part in (0, 1))
    radius = (-2 * torch.log((first + 1) * 2.0**-BITS)).sqrt()  # of (0, 1], because log 0 is infinite
    return radius * torch.cos(second * (2 * math.pi * 2.0**-BITS))


def _hash(value: Tensor) -> Tensor:
    # Arithmetic shifts extend the sign, so the new upper bits are removed.
    value = value ^ ((value >> 16) & 0xFFFF)
    value = value * FIRST
    value = value ^ ((value >> 15) & 0x1FFFF)
    value = value * SECOND
    return value ^ ((value >> 16) & 0xFFFF)


@lru_cache(maxsize=1024)
def _spread_bits(number: int) -> int:
    """Return a signed 64-bit integer that depends on all bits of a number."""
    return int(_finalised(np.array([number * GOLDEN % 2**64], np.uint64))[0])
