"""Samples on the device, the order in which clients see them, and the batches of each step.

The order is drawn with generators that are keyed by a client's name, so that neither the backend nor the order of
clients changes it.
"""

import math
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedrema.base.random import numpy_generator, seed_of, step_keys
from fedrema.core import Batch, LocalTraining, Method, Phase
from fedrema.data.federation import Federation, Split, to_float
from fedrema.engine.cohort import Cohort, RowIndex
from fedrema.engine.private_steps import SampleNoise


@dataclass(frozen=True)
class Samples:
    """The training or the test samples of all clients on the device, padded to one length."""

    x: Tensor
    """[K, n, ...]"""
    y: Tensor
    """[K, n], or [K, n, L] for labels"""
    counts: Tensor
    """[K] how many of the n samples are real; on the CPU."""
    precision: torch.dtype = torch.float32
    """The type of masks where `x` holds integers."""

    @property
    def mask_dtype(self) -> torch.dtype:
        """The type of masks: that of the samples, unless those are integers."""
        return self.x.dtype if self.x.is_floating_point() else self.precision

    def of(self, client: int) -> Batch:
        """Return all real samples of one client."""
        n = int(self.counts[client])
        x = self.x[client, :n]
        return Batch(x, self.y[client, :n], x.new_ones(n, dtype=self.mask_dtype), torch.arange(n, device=x.device))

    def of_cohort(self, cohort: Cohort) -> Batch:
        """Return all samples of a cohort [k, n, ...]; padding is masked."""
        return self.padded(cohort.index, self.counts[cohort.clients].to(self.x.device))

    def padded(self, rows: RowIndex, counts: Tensor) -> Batch:
        """Return all samples of some rows; `counts`, on the device, are real. Does not synchronise with the device."""
        x = self.x[rows]
        order = torch.arange(x.shape[1], device=x.device)
        mask = order < counts[:, None]
        return Batch(x, self.y[rows], mask.to(self.mask_dtype), order.expand(len(counts), -1))


_ON_DEVICE: weakref.WeakKeyDictionary[Federation, dict[object, tuple[Samples, Samples]]] = weakref.WeakKeyDictionary()


def samples_on_device(
    federation: Federation, device: torch.device, dtype: torch.dtype, integers: bool = False
) -> tuple[Samples, Samples]:
    """Return the training and the test samples on a device; all simulations of a federation share one copy.

    Samples are floats, or with `integers` the integers that an embedding needs.
    """
    copies = _ON_DEVICE.setdefault(federation, {})
    key = (device, dtype, integers)
    if key not in copies:

        def on_device(split: Split) -> Samples:
            x = torch.from_numpy(split.x).to(device)
            x = x.long() if integers else to_float(x, dtype)
            # Quantities stay in float64: far from 0, the differences between them can be too small for float32.
            return Samples(x, torch.from_numpy(split.y).to(device), torch.from_numpy(split.count), dtype)

        copies[key] = on_device(federation.split("train")), on_device(federation.split("test"))
    return copies[key]


@dataclass(frozen=True)
class Order:
    """The batches of one phase for k clients."""

    index: np.ndarray
    """[k, steps, batches per step, batch] positions among a client's samples; 0 in the padding."""
    sizes: np.ndarray
    """[k, steps, batches per step] real samples in each batch; they come first."""
    steps: np.ndarray
    """[k] how many steps each client takes; clients with less data take fewer."""
    keys: np.ndarray
    """[k, steps, batches per step] keys of the random numbers that layers draw for each batch."""


@dataclass(frozen=True)
class TrainingPlan:
    """The local training of a cohort."""

    method: Method
    phases: Sequence[tuple[Phase, Order]]
    """Each phase with the batches of every client."""
    local: LocalTraining
    names: tuple[str, ...]
    """All parameters that the method ever trains."""
    key: tuple[int | str, ...]
    """Keys the random numbers that layers draw, together with a client's name."""
    noise: SampleNoise | None = None
    """Clipping of each sample's gradient, and noise on their sum; None: ordinary SGD."""


def draw_order(
    names: tuple[str, ...],
    counts: list[int],
    phase: Phase,
    local: LocalTraining,
    key: tuple[int | str, ...],
    epochs: list[int] | None = None,
    poisson: bool = False,
) -> Order:
    """Shuffle each client's samples for every epoch and cut them into batches.

    A client with fewer samples than a batch trains on all it has; otherwise an incomplete last batch is dropped
    (`drop_incomplete`) or kept. `epochs` gives each client's number of epochs; default: the phase's number for all.
    With `poisson`, each batch contains each sample with the same probability, independently, as the accounting of
    differentially private SGD requires; there are as many batches, and they have the same expected size.
    """
    each = epochs or [phase.epochs] * len(names)
    stream_of = _poisson_stream if poisson else _stream
    streams = [
        stream_of(numpy_generator(*key, name, "batches"), count, number, local)
        for name, count, number in zip(names, counts, each, strict=True)
    ]
    per_step = phase.batches_per_step
    limit = np.inf if phase.steps is None else phase.steps
    steps = np.array([min(max(len(stream) // per_step, 1), limit) if stream else 0 for stream in streams], np.int64)
    width = max((len(batch) for stream in streams for batch in stream), default=0)
    # A batch drawn with `poisson` may be empty; it then contains padding only.
    index = np.zeros((len(names), int(steps.max(initial=0)), per_step, max(width, 1) if poisson else width), np.int64)
    sizes = np.zeros(index.shape[:3], np.int64)
    for row, stream in enumerate(streams):
        for place in range(int(steps[row]) * per_step):
            batch = stream[place % len(stream)]
            index[row, place // per_step, place % per_step, : len(batch)] = batch
            sizes[row, place // per_step, place % per_step] = len(batch)
    keys = step_keys([seed_of(*key, name, "layers") for name in names], sizes[0].size)
    return Order(index, sizes, steps, keys.reshape(sizes.shape))


def _stream(generator: np.random.Generator, count: int, epochs: int, local: LocalTraining) -> list[np.ndarray]:
    batch = min(local.batch, count)
    stop = count - count % batch if local.drop_incomplete else count
    stream = []
    for _ in range(epochs):
        shuffled = generator.permutation(count)
        stream += [shuffled[start : min(start + batch, stop)] for start in range(0, stop, batch)]
    return stream


def sampling_rates(counts: Tensor, batch: int) -> Tensor:
    """Return the probability with which a client's sample is in a batch that is drawn with `poisson`."""
    return counts.clamp(max=batch) / counts


def _poisson_stream(generator: np.random.Generator, count: int, epochs: int, local: LocalTraining) -> list[np.ndarray]:
    batch = min(local.batch, count)
    per_epoch = count // batch if local.drop_incomplete else math.ceil(count / batch)
    return [np.flatnonzero(generator.random(count) < batch / count) for _ in range(epochs * per_epoch)]


def client_batches(samples: Samples, client: int, order: Order, k: int) -> Iterator[tuple[Batch, ...]]:
    """Yield the batches of each step of one client, which is row `k` of the order; only empty batches are padded."""
    x, y = samples.x[client], samples.y[client]
    keys = torch.from_numpy(order.keys[k]).to(x.device)
    for step in range(int(order.steps[k])):
        batches = []
        for place in range(order.index.shape[2]):
            size = int(order.sizes[k, step, place])
            # An empty batch is one sample of padding.
            index = torch.from_numpy(order.index[k, step, place, : max(size, 1)]).to(x.device)
            mask = x.new_full((len(index),), size > 0, dtype=samples.mask_dtype)
            batches.append(Batch(x[index], y[index], mask, index, keys[step, place]))
        yield tuple(batches)


def pack(order: Order, device: torch.device) -> Tensor:
    """Return an order as one tensor [steps, k, batches per step, batch + 3] on a device.

    The last three columns are the key, the number of real samples, and whether the client is active. With a single
    tensor, a captured step needs only one copy for its input.
    """
    k, steps, per_step, _ = order.index.shape
    active = np.broadcast_to(np.arange(steps) < order.steps[:, None], (k, steps))
    every_batch = np.broadcast_to(active[..., None], (k, steps, per_step))
    columns = [order.index, *(each[..., None] for each in (order.keys, order.sizes, every_batch))]
    return torch.from_numpy(np.concatenate(columns, axis=-1).swapaxes(0, 1).copy()).to(device)


def stacked_batches(packed_step: Tensor, samples: Samples, rows: Tensor) -> tuple[tuple[Batch, ...], Tensor]:
    """Return the batches [k, batch, ...] of one step of a packed order, and which clients are active [k]."""
    index, keys, sizes = packed_step[..., :-3], packed_step[..., -3], packed_step[..., -2]
    active = packed_step[:, 0, -1]
    mask = (torch.arange(index.shape[-1], device=packed_step.device) < sizes[..., None]).to(samples.mask_dtype)
    which = rows[:, None]
    batches = [
        Batch(
            samples.x[which, index[:, place]],
            samples.y[which, index[:, place]],
            mask[:, place],
            index[:, place],
            keys[:, place],
        )
        for place in range(packed_step.shape[1])
    ]
    return tuple(batches), active.to(samples.mask_dtype)
