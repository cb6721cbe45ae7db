"""Keyed random generators: a draw depends on its purpose, never on when or in which order it is made."""

import hashlib

import numpy as np
import torch

Part = int | str


def seed_of(*parts: Part) -> int:
    """Return a 63-bit hash of the parts, for example (seed, round, client, purpose)."""
    # The separator is doubled inside a part, because a client's name may contain it.
    text = "\x1f".join(f"{type(part).__name__}:{part}".replace("\x1f", "\x1f\x1f") for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def numpy_generator(*parts: Part) -> np.random.Generator:
    """Return the NumPy generator of a key."""
    return np.random.Generator(np.random.Philox(key=seed_of(*parts)))


def torch_generator(*parts: Part) -> torch.Generator:
    """Return the torch generator of a key; always on the CPU, so that draws do not depend on the device."""
    return torch.Generator().manual_seed(seed_of(*parts))
