"""Randomness by name: a draw depends on what it is for, never on when or in which order it is made."""

import hashlib

import numpy as np
import torch

Part = int | str


def seed_of(*parts: Part) -> int:
    """Return 63 bits that belong to exactly these parts, for example (seed, round, client, purpose)."""
    # The separator is doubled inside a part: a client's name may contain anything.
    text = "\x1f".join(f"{type(part).__name__}:{part}".replace("\x1f", "\x1f\x1f") for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def numpy_generator(*parts: Part) -> np.random.Generator:
    """Return a NumPy generator that belongs to these parts."""
    return np.random.Generator(np.random.Philox(key=seed_of(*parts)))


def torch_generator(*parts: Part) -> torch.Generator:
    """Return a torch generator that belongs to these parts; always on the CPU, so that no device changes a draw."""
    return torch.Generator().manual_seed(seed_of(*parts))
