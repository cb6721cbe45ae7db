"""A federation of real processes on the loopback interface, with TLS and keys, which are stopped at the end."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr")

from fedrema.base.processes import free_port
from fedrema.cli.arguments import parse_settings
from fedrema.data import build_federation
from fedrema.deploy.approval import approve, proposed_plan
from fedrema.deploy.folder import NodeFolder
from fedrema.deploy.node_service import flower_environment
from fedrema.deploy.run_config import NO_FOLDER, Plan
from fedrema.deploy.setup import Members, create_federation
from fedrema.runs.checkpoint import load_state
from fedrema.runs.directory import RunDirectory
from fedrema.runs.execute import build_simulator
from fedrema.runs.run import Run

ARGUMENTS = (
    *("--samples", "40", "--hidden", "6", "--epochs", "1", "--seed", "3"),
    *("--precision", "float64", "--backend", "loop", "--device", "cpu"),
)
FEDREMA = (sys.executable, "-m", "fedrema")


class Processes:
    """The folder of a federation, and its processes: `server`, and one for each node by its name."""

    def __init__(self, folder, method="fedrema", nodes=3, rounds=3, more=(), hosts=("127.0.0.1",), **plan):
        self.folder = folder
        self.names = tuple(f"node-{number}" for number in range(1, nodes + 1))
        self.arguments = ["--clients", str(nodes), "--rounds", str(rounds), *ARGUMENTS, *more]
        self.settings = parse_settings(method, self.arguments)
        self.port = free_port()
        limits = {"least_clients": 2, "wait_seconds": 120.0, "round_seconds": 60.0, **plan}
        plan = Plan(NO_FOLDER, "1x8x8", 10, **limits)
        members = Members(self.names, hosts, self.port)
        create_federation(folder, members, self.settings, plan, partition=True)
        self.processes = {}
        self.approve_all()

    def approve_all(self):
        for name in self.names:
            self.approve(name)

    def approve(self, name):
        """Approve the plan in a node's folder, as its owner does."""
        folder = NodeFolder.open(self.node(name))
        approve(folder, proposed_plan(folder))

    def __enter__(self):
        return self

    def __exit__(self, *why):
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            process.wait(30)
        if why[0] is not None:  # pytest shows the logs of a failed test
            for log in sorted(self.folder.rglob("*.log")):
                print(f"== {log.relative_to(self.folder)}", *log.read_text().splitlines()[-25:], sep="\n")

    def start(self, name, *more, **environment):
        """Start the server, or a node; `more` are options of the command, and `environment` are variables."""
        side = ["server", str(self.folder / "server")] if name == "server" else ["client", str(self.node(name)), *more]
        with (self.folder / f"{name}.command.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*FEDREMA, "deploy", *side],
                stdout=log,
                stderr=log,
                env=flower_environment(self.folder / "unused", self.folder) | environment,
            )

    def start_all(self):
        for name in ("server", *self.names):
            self.start(name)

    def node(self, name):
        return self.folder / "nodes" / name

    def output(self, name):
        """Return the output of a command."""
        return (self.folder / f"{name}.command.log").read_text()

    def records(self):
        """Return the records of all rounds with metrics."""
        return RunDirectory(self.folder / "server" / "run").rounds()

    def rounds(self):
        """Return how many rounds are completed, by the server's log."""
        log = self.folder / "server" / "run.log"
        return len(re.findall(r"round \d+ of \d+: \d+ nodes", log.read_text())) if log.exists() else 0

    def status(self):
        printed = subprocess.run(
            [*FEDREMA, "deploy", "status", str(self.folder), "--json"], capture_output=True, text=True, check=True
        )
        return json.loads(printed.stdout)

    def wait(self, condition, seconds=300.0):
        """Wait until a condition is true; return its value."""
        end = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < end, f"the condition was not true within {seconds:g} s"
            time.sleep(0.3)
        return found

    def finish(self, seconds=300.0):
        """Wait until the server has exited by itself; return its exit code."""
        return self.processes["server"].wait(seconds)

    def kill(self, *words):
        """kill -9 every process whose command line contains all these words."""
        hit = [pid for pid, line in command_lines() if all(word in line for word in words)]
        for pid in hit:
            os.kill(pid, signal.SIGKILL)
        return len(hit)

    def kill_node(self, name):
        """kill -9 all processes of a node."""
        assert self.kill(str(self.node(name))) >= 2
        self.processes.pop(name).wait()


def assert_same_as_simulated(network):
    """Assert that the parameters and the accuracies on the server equal those of the simulator."""
    simulator = build_simulator(network.settings, build_federation(network.settings.data))
    state = simulator.start()
    records = [result.record for result in simulator.run(state)]
    run = Run(network.folder / "server" / "run")
    there = load_state(run.path / "checkpoint" / "state.safetensors", None).params
    assert there.common.keys() == state.params.common.keys()
    assert there.own.keys() == state.params.own.keys()
    for name, value in state.params.common.items():
        torch.testing.assert_close(there.common[name], value, rtol=0, atol=1e-6)
    for name, value in state.params.own.items():
        torch.testing.assert_close(there.own[name][: len(value)], value, rtol=0, atol=1e-6)
    assert [record["accuracy"] for record in run.rounds] == [record["accuracy"] for record in records]
    assert all(record["participants"] == list(range(len(network.names))) for record in run.rounds)


def command_lines():
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                yield int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
