"""Estimates time and memory of tasks: from similar runs, or else from the arithmetic of the network."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.utils.flop_counter import FlopCounterMode

from fedrema.config.presets import PlainValue
from fedrema.data.datasets import dataset_shape
from fedrema.engine.costs import GIGABYTE, MATRIX, client_bytes, product_rate
from fedrema.experiments.finished_run import FinishedRun, planned_epochs
from fedrema.experiments.store import Store
from fedrema.experiments.tasks import Task
from fedrema.models.networks import Network, build_net

ALIKE = ("dataset", "federation", "clients", "samples", "net", "hidden", "epochs", "batch", "participation")
"""Runs of one method that agree in these settings take about the same time."""
SHARE_OF_PRODUCTS = {"cpu": 0.7, "cuda": 0.3}
"""The share of a matrix product's speed that training reaches (docs/speed.md)."""
SECONDS_OF_A_STEP = {"cpu": 2e-4, "cuda": 2e-5}
"""The shortest time of a client's step."""
CLASSES = 10


@dataclass(frozen=True)
class Forecast:
    """The expected time and memory of tasks."""

    runs: int
    seconds: float | None
    """None for own data without similar runs."""
    guessed: bool
    """Whether some of it is not based on similar runs."""
    gigabytes: float | None
    """The most memory that a cell needs, all its seeds together."""

    def __str__(self) -> str:
        if not self.runs:
            return "All runs have finished already."
        runs = "1 run" if self.runs == 1 else f"{self.runs} runs"
        memory = "" if self.gigabytes is None else f", up to {max(self.gigabytes, 0.1):.1f} GB for one cell"
        if self.seconds is None:
            return f"{runs} to do{memory}; the time is known after the first."
        doubt = " (a rough estimate until the first have finished)" if self.guessed else ""
        return f"{runs} to do: about {duration(self.seconds)}{doubt}{memory}."


def duration(seconds: float) -> str:
    """Return a time in words: 40 seconds, 7 minutes, 2.5 hours."""
    if seconds < 90:
        return "a second" if seconds < 1.5 else f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


class Forecaster:
    """Estimates from the runs of a store, for a kind of device; several workers divide the time.

    Parameters
    ----------
    store
        The finished runs.
    device
        `auto`: a GPU if this machine has one. `cuda` without a GPU estimates from the finished runs only.
    workers
        How many tasks run at the same time.
    """

    def __init__(self, store: Store, device: str, workers: int = 1) -> None:
        self.store, self.workers = store, workers
        self.present = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
        """The device of this machine that is used."""
        self.device = "cuda" if device == "cuda" else self.present

    @classmethod
    def of_finished_runs(cls, store: Store, device: str) -> "Forecaster":
        """Return a forecaster that, with device `auto`, estimates for a GPU if finished runs used one."""
        used_gpu = any(one.device not in ("", "cpu") for one in store)
        return cls(store, "cuda" if device == "auto" and used_gpu else device)

    @property
    def device_name(self) -> str:
        """What the estimates are for, in words."""
        if self.device == "cpu":
            return "this CPU"
        names = sorted({one.device for one in self.store if self._counts(one)})
        return f"one {' or '.join(names)}" if names else "one GPU"

    def of(self, tasks: Sequence[Task]) -> Forecast:
        """Estimate tasks together."""
        known = [self.known_seconds(task) for task in tasks]
        pairs = zip(tasks, known, strict=True)
        times = [self._guess(task) if seconds is None else seconds for task, seconds in pairs]
        total = None if None in times else sum(time for time in times if time is not None) / self.workers
        memory = [self._gigabytes(task) for task in tasks]
        largest = max((size for size in memory if size is not None), default=None)
        return Forecast(sum(len(task.seeds) for task in tasks), total, None in known, largest)

    def seconds(self, task: Task) -> float | None:
        """Return the seconds that a task takes."""
        known = self.known_seconds(task)
        return self._guess(task) if known is None else known

    def known_seconds(self, task: Task) -> float | None:
        """Return the seconds that a task takes by the most similar runs; None where there are none."""
        wanted = task.cell.parsed.described()
        known = self._alike(wanted, ALIKE)
        if not known and self.device != self.present:  # a device that cannot be measured here
            return self._seconds_by_samples(task)
        by_method = [one for one in known if one.method == task.cell.method]
        epochs = planned_epochs(task.cell.parsed)
        same = [one for one in by_method if one.epochs == epochs]
        chosen = same or by_method or known
        if not chosen:
            return None
        rounds = [_device_seconds(one) for one in chosen]
        return float(sum(rounds) / len(rounds) * task.rounds)

    def _alike(self, wanted: Mapping[str, PlainValue], settings: Iterable[str]) -> list[FinishedRun]:
        """Return the runs that agree in some settings."""
        # Own data has no dataset and clients; --batch 0 is chosen from the data, so it is the same for all its runs.
        compared = [name for name in settings if name in wanted and (name != "batch" or wanted["batch"])]
        return [
            one
            for one in self.store
            if self._counts(one) and all(one.settings.get(name) == wanted[name] for name in compared)
        ]

    def _seconds_by_samples(self, task: Task) -> float | None:
        """Estimate in proportion to the samples, from runs of the method whose number of samples is the nearest."""
        wanted = task.cell.parsed.described()
        others = self._alike(wanted, [name for name in ALIKE if name != "samples"])
        known = [one for one in others if one.method == task.cell.method and one.settings.get("samples")]
        if not known:
            return None
        samples = float(wanted["samples"] or 0)

        def ratio(one: FinishedRun) -> float:
            return samples / float(one.settings["samples"] or 1)

        nearest = min(abs(math.log(ratio(one))) for one in known)
        chosen = [one for one in known if math.isclose(abs(math.log(ratio(one))), nearest)]
        return sum(_device_seconds(one) * ratio(one) for one in chosen) / len(chosen) * task.rounds

    def _counts(self, one: FinishedRun) -> bool:
        return not one.failed and (one.device == "cpu") == (self.device == "cpu")

    def _guess(self, task: Task) -> float | None:
        settings = task.cell.parsed
        if not settings.data.is_partitioned or self.device != self.present:
            return None
        samples = int(settings.data.samples * (1 - settings.data.test_share))
        taking_part = settings.data.clients * settings.simulation.participation
        steps = max(1, samples // (settings.local.batch or samples)) * settings.local.epochs
        shape = dataset_shape(settings.data.dataset)
        operations = operations_per_sample(settings.network, shape) * samples * settings.local.epochs * taking_part
        rate = products_per_second(self.device) * SHARE_OF_PRODUCTS[self.device]
        return task.rounds * (operations / rate + steps * taking_part * SECONDS_OF_A_STEP[self.device])

    def _gigabytes(self, task: Task) -> float | None:
        settings = task.cell.parsed
        if not settings.data.is_partitioned:
            return None
        together = len(task.seeds) if self.device == "cuda" else 1
        samples, shape = (
            min(settings.local.batch or settings.data.samples, settings.data.samples),
            dataset_shape(settings.data.dataset),
        )
        each = _client_bytes(settings.network, shape, samples, self.device)
        return together * settings.data.clients * each / GIGABYTE


def _device_seconds(run: FinishedRun) -> float:
    """Return the time of a round; tasks that used the device at the same time each count for their share of it."""
    beside = run.ran_on.beside if run.ran_on is not None and run.device != "cpu" else 0
    return run.seconds / max(run.summary.rounds, 1) / (1 + beside)


@functools.cache
def _client_bytes(network: Network, shape: tuple[int, ...], samples: int, device: str) -> int:
    net = build_net(network, shape, CLASSES, seed=0)
    on_gpu = device == "cuda"
    return client_bytes(net, torch.zeros(samples, *shape), stacked=on_gpu, with_graphs=on_gpu)


@functools.cache
def operations_per_sample(network: Network, shape: tuple[int, ...]) -> float:
    """Count the floating-point operations of training on one sample, forward and backward."""
    net, samples = build_net(network, shape, CLASSES, seed=0), 4
    params = {name: value.clone().requires_grad_(name in net.trainable) for name, value in net.initial.items()}
    with FlopCounterMode(display=False) as counter:
        torch.autograd.backward(net(params, torch.zeros(samples, *shape)).sum())
    return float(counter.get_total_flops() / samples)


@functools.cache
def products_per_second(device: str) -> float:
    """Measure the speed of a matrix product in the precision of training."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return product_rate(torch.device(device), dtype, MATRIX[device])
