"""Which samples each client sees at which step: drawn by name, so that no backend and no row order changes it."""

from dataclasses import dataclass

import numpy as np

from fedrema.base.random import numpy_generator
from fedrema.core import LocalTraining, Phase


@dataclass(frozen=True)
class Order:
    """The batches of one phase for k clients."""

    index: np.ndarray
    """[k, steps, batches per step, batch] positions among a client's samples; 0 where there is none."""
    sizes: np.ndarray
    """[k, steps, batches per step] real samples in each batch; they come first."""
    steps: np.ndarray
    """[k] how many steps each client takes; clients with less data take fewer."""


def draw_order(
    names: tuple[str, ...],
    counts: list[int],
    phase: Phase,
    local: LocalTraining,
    key: tuple[int | str, ...],
    epochs: list[int] | None = None,
) -> Order:
    """Shuffle each client's samples anew for every epoch and cut them into batches.

    A client with fewer samples than a batch trains on all it has; otherwise an incomplete last batch is dropped
    (`drop_incomplete`) or kept. `epochs` says how many each client takes, where it is not the phase's number for all.
    """
    each = epochs or [phase.epochs] * len(names)
    streams = [
        _stream(numpy_generator(*key, name, "batches"), count, number, local)
        for name, count, number in zip(names, counts, each, strict=True)
    ]
    per_step = phase.batches_per_step
    most = np.inf if phase.steps is None else phase.steps
    steps = np.array([min(max(len(stream) // per_step, 1), most) if stream else 0 for stream in streams], np.int64)
    width = max((len(batch) for stream in streams for batch in stream), default=0)
    index = np.zeros((len(names), int(steps.max(initial=0)), per_step, width), np.int64)
    sizes = np.zeros(index.shape[:3], np.int64)
    for row, stream in enumerate(streams):
        for place in range(int(steps[row]) * per_step):
            batch = stream[place % len(stream)]
            index[row, place // per_step, place % per_step, : len(batch)] = batch
            sizes[row, place // per_step, place % per_step] = len(batch)
    return Order(index, sizes, steps)


def _stream(generator: np.random.Generator, count: int, epochs: int, local: LocalTraining) -> list[np.ndarray]:
    batch = min(local.batch, count)
    stop = count - count % batch if local.drop_incomplete else count
    stream = []
    for _ in range(epochs):
        shuffled = generator.permutation(count)
        stream += [shuffled[start : min(start + batch, stop)] for start in range(0, stop, batch)]
    return stream
