"""A complete federation on this machine, with TLS and keys, for a few rounds: `fedrema deploy demo`."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fedrema.base.processes import LogTail, StopRequested, SupervisedProcess, free_port, stopped_on_exit
from fedrema.config.settings import Settings
from fedrema.deploy.approval import approve, proposed_plan
from fedrema.deploy.first_connection import first_problem
from fedrema.deploy.folder import NodeFolder
from fedrema.deploy.node_service import flower_environment
from fedrema.deploy.run_config import Plan
from fedrema.deploy.setup import Members, create_federation
from fedrema.errors import FedremaError

SECONDS_BETWEEN_CHECKS = 0.5
TIME_LENGTH = len("2026-01-01 00:00:00")
"""Length of the time at the start of a log line."""


def run_demo(
    folder: Path, names: tuple[str, ...], settings: Settings, plan: Plan, report: Callable[[str], None]
) -> int:
    """Create a federation in a folder and run it: one process for the server, and one for each node."""
    create_federation(folder, Members(names, ("localhost",), free_port()), settings, plan, partition=True)
    for name in names:
        place = NodeFolder.open(folder / "nodes" / name)
        approve(place, proposed_plan(place))
    report(f"created {folder}: a server and {len(names)} nodes, each with its own key and samples")
    environment = flower_environment(folder / "server" / "state", folder)
    command = [sys.executable, "-m", "fedrema", "deploy"]
    logs = {name: folder / "nodes" / name / "command.log" for name in names}
    nodes = [
        SupervisedProcess(name, [*command, "client", str(folder / "nodes" / name)], environment, log)
        for name, log in logs.items()
    ]
    tails = [LogTail(log) for log in logs.values()]
    admitted: set[str] = set()
    try:
        with stopped_on_exit(*nodes):
            server = subprocess.Popen(
                [*command, "server", str(folder / "server")], env=environment, stdout=sys.stdout, stderr=sys.stderr
            )
            try:
                while (code := server.poll()) is None:
                    # A node that starts before the server has registered its key would report a problem.
                    waiting = [name for name in names if name not in admitted]
                    admitted |= {name for name in waiting if not first_problem(folder / "nodes" / name)}
                    for node, tail in zip(nodes, tails, strict=True):
                        if node.name in admitted and (message := node.supervise()):
                            report(message)
                        for line in tail.lines():
                            report(f"{line[:TIME_LENGTH]} {node.name}:{line[TIME_LENGTH:]}")
                    time.sleep(SECONDS_BETWEEN_CHECKS)
            finally:
                server.terminate()
                server.wait()
    except StopRequested:
        return 130
    if code:
        raise FedremaError(f"The server exited with code {code}; see the logs in {folder}.")
    return 0
