"""Time a round of every method relative to FedAvg's, on this machine's CPU: `python benchmarks/time_methods.py`.

Methods take turns, one round each, so that other load on the machine affects all of them; the fastest round of each
is used, including scoring. The first rounds are left out because some methods differ in them.
"""

import torch

from fedrema.cli.arguments import parse_settings
from fedrema.data import build_federation
from fedrema.methods import registry
from fedrema.reporting.tables import markdown_lines
from fedrema.runs.execute import build_simulator
from fedrema.simulation.simulator import Simulator
from fedrema.simulation.state import SimulationState

EARLY, COUNTED = 4, 8
SETTINGS = {
    "digits, mlp": ["--dataset", "digits"],
    "8×8 images, cnn": ["--dataset", "digits", "--clients", "4", "--net", "time_methods:small_cnn"],
}


def small_cnn(shape: tuple[int, ...], classes: int) -> torch.nn.Module:
    """Return a network whose time is spent in convolutions, like the paper's networks."""
    from collections import OrderedDict

    from torch import nn

    body = nn.Sequential(
        nn.Conv2d(shape[0], 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    )  # fmt: skip
    return nn.Sequential(OrderedDict(body=body, head=nn.Linear(64 * (shape[1] // 2) * (shape[2] // 2), classes)))


def quickest_rounds(arguments: list[str]) -> dict[str, dict[str, float]]:
    """Return the seconds of each method's fastest round, by part."""
    running: dict[str, tuple[Simulator, SimulationState]] = {}
    for name in registry():
        settings = parse_settings(name, [*arguments, "--device", "cpu"])
        simulator = build_simulator(settings, build_federation(settings.data))
        running[name] = simulator, simulator.start()
    quickest: dict[str, dict[str, float]] = {}
    for number in range(EARLY + COUNTED):
        for name, (simulator, state) in running.items():
            seconds = simulator.run_round(state).record.seconds
            if number >= EARLY and sum(seconds.values()) < sum(quickest.get(name, {"": 1e9}).values()):
                quickest[name] = seconds
    return quickest


def times_markdown() -> str:
    """Return a table of times relative to FedAvg's."""
    torch.set_num_threads(1)  # more threads would slow down such small operations
    found = {title: quickest_rounds(arguments) for title, arguments in SETTINGS.items()}
    usual = {title: sum(times["fedavg"].values()) for title, times in found.items()}
    rows = []
    for name, kind in registry().items():
        cells = []
        for title, times in found.items():
            total, server = sum(times[name].values()), times[name]["aggregate"]
            cells += [f"{total / usual[title]:.1f}", f"{server / usual[title]:.1f}"]
        rows.append((kind.title, *cells))
    headings = ["method", *(heading for title in SETTINGS for heading in (title, "of it server"))]
    milliseconds = ", ".join(f"{title} {1000 * seconds:.0f} ms" for title, seconds in usual.items())
    note = f"Times as multiples of FedAvg's round ({milliseconds}), on 1 thread: a tenth or two are noise."
    return "\n".join([*markdown_lines(headings, rows), "", note])


if __name__ == "__main__":
    print(times_markdown())
