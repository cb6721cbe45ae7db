"""Time of a round of runs that are executed one after the other and together, on this machine's GPU.

python benchmarks/time_together.py [--runs 5] [--rounds 40] [--kernels 12] [METHOD:PRESET ...]

For each method and preset of the paper, executes replicates (replicate i has partition i and seed i) alone and
together, and prints the median time per round and run, the time that the GPU computes in a round of a single run, and
whether all accuracies are equal. `--kernels` also prints the kernels that take most of it.
"""

import argparse
import itertools
import statistics
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from fedrema.cli.arguments import parse_settings
from fedrema.config.settings import Settings
from fedrema.data import build_federation
from fedrema.reporting.tables import markdown_lines
from fedrema.runs.execute import build_simulator
from fedrema.runs.execute_many import execute_all
from fedrema.runs.run import Run

CASES = ["fedavg:table1-mnist", "fedavg:table2-s0.2", "fedpac:table2-s0.2", "fedavg:table1-cifar10"]
STARTING = 5
"""Rounds that are left out: they compile kernels and capture graphs."""
PROFILED = 4


def replicates(case: str, runs: int, rounds: int, folder: Path) -> list[Settings]:
    """Return the settings of the replicates."""
    method, _, preset = case.partition(":")
    base = parse_settings(method, ["--paper", preset, "--rounds", str(rounds), "--quiet"])
    return [
        replace(base, data=replace(base.data, data_seed=number)).seeded(number).placed(folder / str(number))
        for number in range(runs)
    ]


def milliseconds(runs: list[Run]) -> float:
    """Return the median time of a round and run."""
    return 1000 * statistics.median(sum(record.seconds.values()) for run in runs for record in run.rounds[STARTING:])


def kernel_times(settings: Settings) -> tuple[float, Counter[str], Counter[str]]:
    """Return the milliseconds a round in which the GPU computes, and the milliseconds and launches by kernel."""
    simulator = build_simulator(settings, build_federation(settings.data))
    rounds = simulator.run(simulator.start())
    list(itertools.islice(rounds, STARTING))
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        list(itertools.islice(rounds, PROFILED))
        torch.cuda.synchronize()
    times, launches = Counter[str](), Counter[str]()
    for event in profiler.events() or ():
        if event.device_type.name == "CUDA" and not event.is_user_annotation:
            times[event.name] += (event.time_range.end - event.time_range.start) / 1000 / PROFILED
            launches[event.name] += 1
    return sum(times.values()), times, launches


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=CASES)
    for name, default in (("runs", 5), ("rounds", 40), ("kernels", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    lines, details = [], []
    for case in args.cases:
        with tempfile.TemporaryDirectory() as temporary:
            wanted = [replicates(case, args.runs, args.rounds, Path(temporary) / how) for how in ("alone", "together")]
            alone = [Run(settings.output.folder) for settings in wanted[0] if list(execute_all([settings]))]
            together = [Run(settings.output.folder) for settings, _ in execute_all(wanted[1])]
            computed, times, launches = kernel_times(wanted[0][0])
            pairs = [
                (one.metrics["accuracy"], other.metrics["accuracy"])
                for first, second in zip(alone, together, strict=True)
                for one, other in zip(first.rounds, second.rounds, strict=True)
            ]
            equal = sum(one == other for one, other in pairs)
            texts = [f"{milliseconds(runs):.1f}" for runs in (alone, together)]
            lines.append([case, *texts, f"{computed:.1f}", f"{equal} of {len(pairs)}"])
            rows = [[name[:90], f"{time:.2f}", str(launches[name] // PROFILED)] for name, time in times.most_common()]
            details += ["", case, *markdown_lines(["kernel", "ms per round", "launches"], rows[: args.kernels])]
    headings = ["method and preset", "ms alone", "ms together", "ms of kernels", "rounds with equal accuracies"]
    print("\n".join([*markdown_lines(headings, lines), *(details if args.kernels else [])]), flush=True)


if __name__ == "__main__":
    main()
