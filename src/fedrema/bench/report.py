"""The results of a benchmark as a table, sentences and JSON."""

import dataclasses
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

import fedrema
from fedrema.base.files import write_text
from fedrema.bench.ceilings import MEANING
from fedrema.bench.profile import Profile
from fedrema.bench.timing import Measured, Row
from fedrema.reporting.fitting_table import FittingTable

MISSING = "–"
LARGEST = 5
"""Number of PyTorch's operators or kernels that are shown."""
LONGEST = 60
"""Characters of their names that are shown: those of templates are very long."""


@dataclasses.dataclass(frozen=True)
class Report:
    """All results of a benchmark."""

    rows: list[Row]
    ceilings: Mapping[str, float | None]
    machine: Mapping[str, Any]
    peak_memory: Mapping[str, int | None]
    """Peak bytes of the process and of the GPU."""
    command: str

    @classmethod
    def of(cls, found: Measured, command: str) -> "Report":
        """Combine measurements with the description of the machine."""
        device = found.rows[0].device
        machine = {**_machine(device), "highest_load": found.load}
        return cls(found.rows, found.ceilings, machine, _peak_memory(device), command)

    def as_json(self) -> dict[str, object]:
        """Return the content of the JSON file."""
        ceilings = {
            name: {
                "meaning": MEANING[name],
                "unit": _unit(name),
                "value": None if rate is None else rate / 1e9,
            }
            for name, rate in self.ceilings.items()
        }
        return {
            "machine": dict(self.machine),
            "ceilings": ceilings,
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "peak_memory_bytes": dict(self.peak_memory),
            "command": self.command,
        }

    def write(self, file: Path) -> None:
        """Write the JSON file, atomically."""
        write_text(file, json.dumps(self.as_json(), indent=2) + "\n")

    def show(self) -> RenderableType:
        """Return tables, notes and conclusions for the terminal."""
        machine = self.machine
        where = (
            machine["device"] if self.rows[0].device == "cuda" else f"{machine['cpu']}, {machine['threads']} threads"
        )
        memory = [f"{size / 2**30:.2f} GB {what}" for what, size in self.peak_memory.items() if size is not None]
        above = f"Machine: {where}; torch {machine['torch']}, Python {machine['python']}\n"
        below = [f"Note: {row.network}, {row.method}, {row.backend}: {row.note}" for row in self.rows if row.note]
        load, cores = machine["highest_load"], machine["cores"]
        if load is not None and load > cores + 1:
            below.append(
                f"Warning: other programs were running (load {load:.1f} on {cores} cores). This slows down"
                " some rows much more than others: measure again on an idle machine."
            )
        below += [*self.conclusions(), *self.profiles(), f"Peak memory: {', '.join(memory) or 'unknown'}"]
        return Group(
            Text(above), self._ceilings_table(), Text(), self._rows_table(), Text(), *(Text(line) for line in below)
        )

    def conclusions(self) -> list[str]:
        """Return a sentence for each network."""
        sentences = []
        for network in dict.fromkeys(row.network for row in self.rows):
            fastest = self._fastest(network)
            if fastest is None:
                sentences.append(f"{network}: none of our backends could be measured.")
                continue
            ratio, part = fastest.ratio_to_textbook, fastest.share_of_ceiling
            relative = "" if ratio is None else f", {ratio:.2f} × the speed of the textbook loop"
            share = "" if part is None else f", {_percent(part)} of {fastest.ceiling}"
            sentences.append(
                f"{network}: {fastest.backend} ({fastest.method}) is fastest, "
                f"{fastest.ms_per_step:,.4g} ms per step{relative}{share}."
            )
        return sentences

    def profiles(self) -> list[str]:
        """Return where the time of a step goes, for the fastest backend of each network."""
        networks = dict.fromkeys(row.network for row in self.rows)
        found = [row for network in networks if (row := self._fastest(network)) is not None and row.profile is not None]
        lines = []
        if any(row.device == "cpu" for row in found):
            lines.append("On a CPU none of our kernels is used; PyTorch's operators by their share of the time:")
        return lines + [_profile_line(row, row.profile) for row in found if row.profile is not None]

    def _fastest(self, network: str) -> Row | None:
        ours = [row for row in self.rows if row.network == network and row.backend != "textbook" and row.ms_per_step]
        # Of one method only, because a step of another may do less work.
        return min(
            (row for row in ours if row.method == ours[0].method), key=lambda row: row.ms_per_step or 0, default=None
        )

    def _ceilings_table(self) -> Table:
        table = Table("ceiling", "what", box=None, padding=(0, 2, 0, 0))
        table.add_column("rate", justify="right")
        for name, rate in self.ceilings.items():
            value = "not available" if rate is None else f"{rate / 1e9:,.0f} {_unit(name)}"
            table.add_row(name, MEANING[name], value)
        return table

    def _rows_table(self) -> FittingTable:
        numbers = ("ms/step", "GFLOP/s", "of ceiling", "×textbook", "s/round", "around")
        table = FittingTable(("network", "method", "backend", *numbers), texts=3)
        for row in self.rows:
            table.add_row(
                *(row.network, row.method, row.backend),
                MISSING if row.ms_per_step is None else f"{row.ms_per_step:,.1f}",
                MISSING if row.gflops_per_second is None else _digits(row.gflops_per_second),
                MISSING if row.share_of_ceiling is None else f"{_percent(row.share_of_ceiling)} {row.ceiling}",
                MISSING if row.ratio_to_textbook is None else f"{row.ratio_to_textbook:.2f}",
                MISSING if row.seconds_per_round is None else f"{row.seconds_per_round:,.3f}",
                MISSING if row.share_around_training is None else _percent(row.share_around_training),
            )
        return table


def _profile_line(row: Row, profile: Profile) -> str:
    label = f"{row.network}, {row.method}, {row.backend}"
    largest = ", ".join(
        f"{name[:LONGEST]} {_percent(share)}" for name, share in [*profile.torch_shares.items()][:LARGEST]
    )
    if row.device == "cpu":
        return f"{label}: {largest}"
    times = f"{_percent(profile.share_outside_kernels)} of a step's time is outside our kernels"
    waiting = f"the GPU waits {_percent(profile.share_waiting)}"
    fell_back = f"left to PyTorch: {', '.join(profile.fell_back)}" if profile.routed else "no layer runs as our kernel"
    return f"{label}: {times} ({waiting}; PyTorch's largest: {largest or 'none'}); {fell_back}."


def _digits(value: float) -> str:
    """Format a number without decimals, or with two digits if it is small."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _percent(share: float) -> str:
    return f"{_digits(share * 100)}%"


def _unit(ceiling: str) -> str:
    return "GB/s" if ceiling == "copy" else "GFLOP/s"


def _machine(device: str) -> dict[str, object]:
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "fedrema": fedrema.__version__,
        "platform": platform.platform(),
    }


def _cpu() -> str:
    listing = Path("/proc/cpuinfo")
    lines = listing.read_text(encoding="utf-8").splitlines() if listing.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _peak_memory(device: str) -> dict[str, int | None]:
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        process = None
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return {"process": process, "gpu": torch.cuda.max_memory_allocated() if device == "cuda" else None}
