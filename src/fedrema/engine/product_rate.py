"""Measures the speed of a matrix product on a device: an upper limit for the speed of training."""

import statistics
import time
from collections.abc import Callable

import torch

MATRIX = {"cpu": 2048, "cuda": 8192}
"""Rows and columns of the matrices."""
REPEATS = 3
"""Repetitions of each measurement."""


def product_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Return the operations per second of a square matrix product."""
    left, right = (torch.rand(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: left @ right, device)


def seconds_of(action: Callable[[], object], device: torch.device) -> float:
    """Return the median seconds of an action that has been warmed up."""
    calls = 4 if device.type == "cuda" else 1  # waiting for the GPU takes time, shared by several calls
    seconds = []
    for _ in range(REPEATS + 1):
        synchronise(device)
        begun = time.perf_counter()
        for _ in range(calls):
            action()
        synchronise(device)
        seconds.append((time.perf_counter() - begun) / calls)
    return statistics.median(seconds[1:])


def synchronise(device: torch.device) -> None:
    """Wait until a GPU has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
