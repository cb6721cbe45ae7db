"""What changes from round to round, and what a round leaves behind."""

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedrema.core import State
from fedrema.engine import Stacked
from fedrema.net import Tensors


@dataclass
class World:
    """Everything that changes from round to round; a checkpoint holds exactly this."""

    round: int
    params: Stacked
    """Shared parameters once, personal and private ones for every client."""
    memory: Tensors
    """[K, ...] what clients keep for themselves."""
    inbox: Stacked
    """What the server sent beside parameters."""
    velocity: Tensors
    """[K, ...] momentum, where it is kept between rounds."""
    server: State


@dataclass(frozen=True)
class Round:
    """What a round leaves behind: a record of plain numbers and, on request, matrices between clients."""

    record: dict[str, Any]
    relations: dict[str, np.ndarray] = field(default_factory=dict)


class Clock:
    """Seconds by part of a round."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.laps = dict.fromkeys(("train", "aggregate", "evaluate", "other"), 0.0)
        self.last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Add the time since the last lap to a part."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.laps[part] += now - self.last
        self.last = now


def size(tensors: Tensors) -> int:
    """Return the bytes that tensors take on the wire."""
    return sum(value.numel() * value.element_size() for value in tensors.values())
