"""Keyed random generators: a draw depends on its purpose, never on when or in which order it is made."""

import hashlib

import numpy as np
import torch
from torch import Tensor

Part = int | str
BITS = 24
"""Bits of the numbers that `random_integers` returns."""
# Multipliers of a 32-bit integer hash with low bias ("lowbias32"), as signed integers.
FIRST, SECOND = 0x7FEB352D, 0x846CA68B - (1 << 32)


def seed_of(*parts: Part) -> int:
    """Return a 63-bit hash of the parts, for example (seed, round, client, purpose)."""
    # The separator is doubled inside a part, because a client's name may contain it.
    text = "\x1f".join(f"{type(part).__name__}:{part}".replace("\x1f", "\x1f\x1f") for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def numpy_generator(*parts: Part) -> np.random.Generator:
    """Return the NumPy generator of a key."""
    return np.random.Generator(np.random.Philox(key=seed_of(*parts)))


def step_keys(*parts: Part, steps: int) -> np.ndarray:
    """Return a 64-bit integer for each of some steps, to be used as the key of a counter-based generator."""
    with np.errstate(over="ignore"):  # integers wrap around, as intended
        value = np.uint64(seed_of(*parts)) + np.arange(1, steps + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        # The finaliser of SplitMix64: all bits of the result depend on all bits of the value.
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (value ^ (value >> np.uint64(31))).view(np.int64)


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
