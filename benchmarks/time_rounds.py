"""Time of a round with real nodes: a server and nodes as processes of this machine, with TLS and keys.

python benchmarks/time_rounds.py [NODES] [ROUNDS] [SETTINGS]

The nodes train a tiny network on 20 samples each, so that almost nothing but the cost of a round is left. Prints the
median time of a round and of its parts, the CPU time that each kind of process needs per round, and the CPU time that
the processes of a node need per second when there is nothing to do. Other programs that are running make rounds longer,
but hardly change the CPU time: on an idle machine, a round takes at least this time divided by the number of cores.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from measured_processes import Usage, described, rounds_of

from fedrema.base.processes import SupervisedProcess, free_port, stopped_on_exit

SETTINGS = ("--samples", "40", "--hidden", "6", "--epochs", "1", "--device", "cpu")
SECONDS_IDLE = 20
SECONDS_UNTIL_IDLE = 75


def main(arguments: list[str]) -> None:
    """Measure and print."""
    nodes, rounds = (*arguments[:2], *("3", "12")[len(arguments) :])
    with tempfile.TemporaryDirectory() as temporary:
        folder, fedrema = Path(temporary) / "federation", (sys.executable, "-m", "fedrema", "deploy")
        before = os.getloadavg()[0]
        words = ("--nodes", nodes, "--rounds", rounds, *SETTINGS, *arguments[2:])
        demo = SupervisedProcess(
            "demo", [*fedrema, "demo", str(folder), "fedavg", *words], log=Path(temporary) / "demo.log", patience=30.0
        )
        with stopped_on_exit(demo), Usage(os.getpid()) as usage:
            demo.start()
            if code := demo.finish():
                sys.exit(f"fedrema deploy demo exited with code {code}: {demo.last_line()}")
        load = f"load average {before:.1f} before and {os.getloadavg()[0]:.1f} after, {os.cpu_count()} cores"
        print(f"{nodes} nodes ({load})\n{described(rounds_of(folder), usage)}")
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
    main(sys.argv[1:])
