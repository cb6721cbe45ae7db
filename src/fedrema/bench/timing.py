"""Time our backends and the textbook loop on the same clients, alternately."""

import dataclasses
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from fedrema.bench.ceilings import CEILING_OF, Ceilings
from fedrema.bench.profile import Profile, profiled
from fedrema.bench.textbook import Textbook, plain_module
from fedrema.bench.work import Work, trimmed
from fedrema.config.settings import Settings
from fedrema.data import Federation
from fedrema.engine import Backend, choose_device, choose_precision
from fedrema.errors import FedremaError
from fedrema.methods import find_method
from fedrema.runs.execute import Interrupted, build_simulator, execute

WARM_UP = {"cpu": 1, "cuda": 2}
"""Rounds before those that are measured."""
MOST_LOOPED = 2
"""Rounds that are measured with the loop backend on a GPU, where it is slow because it waits for the host."""
ORDER: dict[str, tuple[Backend, ...]] = {"cpu": ("loop", "stacked"), "cuda": ("stacked", "loop")}
"""The backend that `auto` would usually choose comes first: the textbook loop is timed alternately with it."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table. A step is one optimiser step of all clients; None: not measured."""

    network: str
    method: str
    backend: str
    device: str
    precision: str
    clients: int
    batch: int
    steps: int = 0
    """Number of steps that were timed."""
    ms_per_step: float | None = None
    gflop_per_step: float | None = None
    gflops_per_second: float | None = None
    ceiling: str | None = None
    """The peak rate of this precision."""
    share_of_ceiling: float | None = None
    ratio_to_textbook: float | None = None
    """Speed relative to the textbook loop."""
    seconds_per_round: float | None = None
    share_around_training: float | None = None
    seconds_by_part: dict[str, float] | None = None
    """Seconds of a round by part; `logging` is the time between rounds."""
    profile: Profile | None = None
    """How the time of a step is divided; None for the textbook loop."""
    note: str = ""
    """The reason why something was not measured, or measured differently."""

    def timed(self, seconds: float, work: Work, steps: int) -> "Row":
        """Return the row with the time of one step."""
        flop = work.operations / work.steps
        return dataclasses.replace(
            self,
            steps=steps,
            ms_per_step=seconds * 1e3,
            gflop_per_step=flop / 1e9,
            gflops_per_second=flop / seconds / 1e9,
        )

    def compared(self, ceilings: Mapping[str, float | None], textbook: "Row") -> "Row":
        """Return the row with its share of the ceiling and its ratio to the textbook loop."""
        name = CEILING_OF[self.precision]
        rate, ceiling = self.gflops_per_second, ceilings.get(name)
        base = textbook.ms_per_step
        return dataclasses.replace(
            self,
            ceiling=name,
            share_of_ceiling=rate * 1e9 / ceiling if rate is not None and ceiling is not None else None,
            ratio_to_textbook=base / self.ms_per_step if base is not None and self.ms_per_step is not None else None,
        )


@dataclasses.dataclass(frozen=True)
class Workload:
    """A network, the methods to train it with, and the clients."""

    network: str
    methods: Mapping[str, Settings]
    federation: Federation

    def check(self) -> None:
        """Build the network and a simulator for one sample, so that settings that do not fit raise now."""
        build_simulator(next(iter(self.methods.values())), trimmed(self.federation, 1, 1))


@dataclasses.dataclass(frozen=True)
class Measured:
    """The measurements of a benchmark."""

    rows: list[Row]
    ceilings: Mapping[str, float | None]
    """Operations (`copy`: bytes) per second; None where the machine does not support it."""
    load: float | None = None
    """The highest load of the machine, our own included; None where the system does not report it."""


def measure(workloads: list[Workload], report: Callable[[str], None]) -> Measured:
    """Measure all networks and the peak rates; what fails becomes a row with the reason, and the others continue."""
    simulation = next(iter(workloads[0].methods.values())).simulation
    device = choose_device(simulation.device)
    report("the machine's ceilings")
    ceilings = Ceilings(device, choose_precision(simulation.precision, device).products)
    ceilings.sample()
    rows = [_rows(workload, device, ceilings, report) for workload in workloads]  # the last is the textbook loop
    values = ceilings.values()
    compared = [row.compared(values, network[-1]) for network in rows for row in network]
    return Measured(compared, values, ceilings.load)


def _rows(workload: Workload, device: torch.device, ceilings: Ceilings, report: Callable[[str], None]) -> list[Row]:
    rows: list[Row] = []
    textbook = Textbook(next(iter(workload.methods.values())), workload.federation, device)
    for method, settings in workload.methods.items():
        wanted = settings.simulation.backend
        for backend in ORDER[device.type] if wanted == "auto" else (wanted,):
            report(f"{workload.network}, {method}, {backend}")
            rows.append(_row(workload, method, backend, device, textbook))
            gc.collect()  # free the device memory of this row before the next
            ceilings.sample()
    if not textbook.steps:  # none of our backends could be measured
        report(f"{workload.network}, textbook loop")
        textbook.sample()
    return [*rows, _textbook_row(workload, textbook)]


def _row(workload: Workload, method: str, backend: Backend, device: torch.device, textbook: Textbook) -> Row:
    settings = workload.methods[method]
    federation, local = workload.federation, settings.local
    precision = choose_precision(settings.simulation.precision, device).products
    row = Row(workload.network, method, backend, device.type, precision, len(federation), local.batch)
    brief = device.type == "cpu" and backend == "stacked" and _has_convolutions(settings, federation)
    if brief:
        federation = trimmed(federation, len(federation), local.batch)
        settings = dataclasses.replace(settings, local=dataclasses.replace(local, epochs=1))
    try:
        work = Work.of(settings, federation)
        records, walls = _run_rounds(settings, federation, backend, device, textbook)
        gc.collect()
        row = dataclasses.replace(row, profile=profiled(_with_backend(settings, backend), federation))
    except (FedremaError, RuntimeError) as error:
        return dataclasses.replace(row, note=reason(error))
    parts = {part: statistics.median(record[part] for record in records) for part in records[0]}
    row = row.timed(parts["train"] / work.steps, work, work.steps * len(records))
    if brief:
        return dataclasses.replace(
            row, note=f"slow with convolutions on a CPU: only a few steps were timed, {row.steps}"
        )
    wall = statistics.median(walls)
    parts["logging"] = max(wall - sum(parts.values()), 0.0)
    return dataclasses.replace(
        row, seconds_per_round=wall, share_around_training=1 - parts["train"] / wall, seconds_by_part=parts
    )


def _run_rounds(
    settings: Settings, federation: Federation, backend: Backend, device: torch.device, textbook: Textbook
) -> tuple[list[dict[str, float]], list[float]]:
    """Run rounds as `fedrema run` does; return the seconds of each measured one by part, and in total."""
    warm_up = WARM_UP[device.type]
    measured = settings.simulation.rounds
    if (device.type, backend) == ("cuda", "loop"):
        measured = min(measured, MOST_LOOPED)
    simulation = dataclasses.replace(settings.simulation, rounds=warm_up + measured, backend=backend)
    walls: list[float] = []
    last = time.perf_counter()

    def watch(_: object) -> None:
        nonlocal last
        walls.append(time.perf_counter() - last)
        if len(walls) > warm_up:
            textbook.sample()
        last = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        placed = dataclasses.replace(settings, simulation=simulation).placed(Path(folder) / "run")
        try:
            run = execute(placed, federation, watch=watch)
        except Interrupted:
            raise KeyboardInterrupt from None
        return [record.seconds for record in run.rounds[warm_up:]], walls[warm_up:]


def _with_backend(settings: Settings, backend: Backend) -> Settings:
    return dataclasses.replace(settings, simulation=dataclasses.replace(settings.simulation, backend=backend))


def _textbook_row(workload: Workload, textbook: Textbook) -> Row:
    settings = dataclasses.replace(next(iter(workload.methods.values())), method=find_method("fedavg")())
    clients, device = len(workload.federation), textbook.device.type
    row = Row(workload.network, "plain", "textbook", device, "float32", clients, settings.local.batch)
    if textbook.error:
        return dataclasses.replace(row, note=reason(textbook.error))
    row = row.timed(statistics.median(textbook.seconds), Work.of(settings, workload.federation), textbook.steps)
    usual = "torch's defaults: convolutions in TF32, matrix products in float32" if device == "cuda" else ""
    return dataclasses.replace(row, note=usual)


def reason(error: Exception) -> str:
    """Return the first line of an error message."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _has_convolutions(settings: Settings, federation: Federation) -> bool:
    module = plain_module(settings.network, federation.sample_shape, federation.task.outputs)
    return any(isinstance(layer, nn.modules.conv._ConvNd) for layer in module.modules())
