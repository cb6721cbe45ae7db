"""Time of a round with real nodes: a server and nodes as processes of this machine, with TLS and keys.

python benchmarks/time_rounds.py [NODES] [ROUNDS]

The nodes train a tiny network on 20 samples each, so that almost nothing but the cost of a round is left. Prints the
median time from the end of a round to the end of the next one, and the CPU time that the processes of a node need per
second when there is nothing to do.
"""

import itertools
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path

from fedrema.base.processes import free_port

SETTINGS = ("--samples", "40", "--hidden", "6", "--epochs", "1", "--device", "cpu")
SECONDS_IDLE = 20
SECONDS_UNTIL_IDLE = 75


def main() -> None:
    """Measure and print."""
    nodes, rounds = (*map(int, sys.argv[1:3]), *(3, 12)[len(sys.argv) - 1 :])
    with tempfile.TemporaryDirectory() as temporary:
        folder, fedrema = Path(temporary) / "federation", (sys.executable, "-m", "fedrema", "deploy")
        before = os.getloadavg()[0]
        words = ("--nodes", str(nodes), "--rounds", str(rounds), *SETTINGS)
        subprocess.run([*fedrema, "demo", str(folder), "fedavg", *words], check=True, stdout=subprocess.DEVNULL)
        log = (folder / "server" / "run.log").read_text()
        ends = re.findall(r"(?m)^(.{19}) round \d+ of \d+: ", log)
        times = [datetime.strptime(end, "%Y-%m-%d %H:%M:%S") for end in ends]
        seconds = [(after - start).total_seconds() for start, after in itertools.pairwise(times)]
        load = f"load average {before:.1f} before and {os.getloadavg()[0]:.1f} after, {os.cpu_count()} cores"
        median, mean = statistics.median(seconds), statistics.mean(seconds)
        print(f"{nodes} nodes: median {median:.1f} s, mean {mean:.1f} s, longest {max(seconds):.0f} s a round ({load})")
        print(f"idle node: {idle_share(Path(temporary) / 'idle', fedrema):.1%} of a core")


def idle_share(folder: Path, fedrema: tuple[str, ...]) -> float:
    """Return the CPU time per second of the processes of a node whose server waits for another node."""
    words = ("--deal", "--nodes", "2", "--port", str(free_port()), *SETTINGS)
    node = folder / "nodes" / "node-1"
    subprocess.run([*fedrema, "init", str(folder), "fedavg", *words], check=True, stdout=subprocess.DEVNULL)
    subprocess.run([*fedrema, "approve", str(node)], check=True, stdout=subprocess.DEVNULL)
    started = [
        subprocess.Popen([*fedrema, *side], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for side in (("server", str(folder / "server")), ("client", str(node)))
    ]
    try:
        time.sleep(SECONDS_UNTIL_IDLE)
        start = cpu_seconds(node)
        time.sleep(SECONDS_IDLE)
        return (cpu_seconds(node) - start) / SECONDS_IDLE
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait()


def cpu_seconds(node: Path) -> float:
    """Return the CPU time of all processes whose command line names the node's folder."""
    total = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if str(node).encode() in (entry / "cmdline").read_bytes():
                    total += sum(map(int, (entry / "stat").read_text().rpartition(")")[2].split()[11:13]))
            except OSError:
                continue
    return total / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
