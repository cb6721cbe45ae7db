"""The cost of FedReMa's server step: seconds and peak memory against the number of clients, heads 512 → 10.

python benchmarks/check_server.py             K = 20 … 10,000, and a picture (5 minutes on two cores)
python benchmarks/check_server.py --clients K one size, in this process
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

from fedrema.core import Moment, Uploads
from fedrema.methods.fedrema import FedReMa
from fedrema.models.body_and_head import BodyAndHead, Net

SIZES = (20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)
GROUPS = 5


def measure(clients: int) -> dict[str, float]:
    """Time one step during the critical period, and one after it."""
    torch.set_num_threads(2)
    net = Net(BodyAndHead(nn.Linear(8, 512), nn.Linear(512, 10)), torch.zeros(1, 8))
    generator = torch.Generator().manual_seed(0)
    centres = {name: torch.randn(GROUPS, *value.shape, generator=generator) for name, value in net.initial.items()}
    group = torch.arange(clients) % GROUPS
    params = {}
    for name, value in centres.items():
        params[name] = torch.randn(clients, *value.shape[1:], generator=generator).mul_(0.03).add_(value[group])
    names = tuple(str(client) for client in range(clients))
    uploads = Uploads(torch.arange(clients), params, {}, torch.full((clients,), 60.0), names)
    method, state, seconds = FedReMa(), {}, {}
    before = peak_gigabytes()
    for phase in ("critical", "after"):
        state = state or method.server(net, clients)
        started = time.perf_counter()
        state = method.aggregate(net, {**state, "critical": phase == "critical"}, uploads, Moment(1, 10, 0)).state
        seconds[phase] = time.perf_counter() - started
    return {"clients": clients, **seconds, "gigabytes": peak_gigabytes(), "gigabytes_before": before}


def peak_gigabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def draw(found: list[dict[str, float]], file: Path) -> None:
    """Plot milliseconds per client against the number of clients."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4), layout="constrained")
    axes = figure.subplots()
    for phase, colour, words in (("critical", "#0072B2", "critical period"), ("after", "#D55E00", "after it")):
        clients = [one["clients"] for one in found]
        axes.plot(clients, [1000 * one[phase] / one["clients"] for one in found], marker="o", color=colour, label=words)
    axes.set(xscale="log", yscale="log", xlabel="Clients", ylabel="Server step, milliseconds per client")
    axes.set_title("FedReMa's server step, heads 512 → 10, two cores", fontsize=10.5, loc="left")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, help="measure one size here")
    parser.add_argument("--plot", type=Path, default=Path("server.png"))
    parser.add_argument("--quick", action="store_true", help="only to see that it runs")
    asked = parser.parse_args()
    if asked.clients:
        print(json.dumps(measure(asked.clients)))
        return
    found = []
    for clients in SIZES[:3] if asked.quick else SIZES:
        # A process each: peak memory is that of the whole process.
        command = [sys.executable, __file__, "--clients", str(clients)]
        found.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        one = found[-1]
        times = f"critical {one['critical']:.3f} s, after {one['after']:.3f} s"
        print(f"{clients:6} clients: {times}, peak {one['gigabytes']:.2f} GB", flush=True)
    draw(found, asked.plot)


if __name__ == "__main__":
    main()
