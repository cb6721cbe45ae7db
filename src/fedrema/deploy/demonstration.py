"""fedrema deploy demo: a whole federation on this machine, with TLS and keys, that ends by itself."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fedrema.base.processes import LogTail, StopRequested, SupervisedProcess, free_port, stopped_on_exit
from fedrema.config.settings import Settings
from fedrema.deploy.flower_environment import environment
from fedrema.deploy.founding import Founding, found
from fedrema.deploy.plan import Plan
from fedrema.errors import FedremaError

SECONDS_BETWEEN_LOOKS = 0.5
STAMP = len("2026-01-01 00:00:00")


def demonstrate(
    folder: Path, names: tuple[str, ...], settings: Settings, plan: Plan, say: Callable[[str], None]
) -> int:
    """Make a federation in a folder and play it to its end: a process for the server, one for each node."""
    found(folder, Founding(names, ("localhost",), free_port(), dealt=True), settings, plan)
    say(f"made {folder}: a server and {len(names)} nodes, each with a key and samples of its own")
    own = environment(folder / "server" / "state", folder)
    command = [sys.executable, "-m", "fedrema", "deploy"]
    logs = {name: folder / "nodes" / name / "command.log" for name in names}
    nodes = [
        SupervisedProcess(name, [*command, "client", str(folder / "nodes" / name)], own, log)
        for name, log in logs.items()
    ]
    told = [LogTail(log) for log in logs.values()]
    try:
        with stopped_on_exit(*nodes):
            server = subprocess.Popen(
                [*command, "server", str(folder / "server")], env=own, stdout=sys.stdout, stderr=sys.stderr
            )
            try:
                while (ended := server.poll()) is None:
                    for node, heard in zip(nodes, told, strict=True):
                        if sentence := node.supervise():
                            say(sentence)
                        for line in heard.lines():
                            say(f"{line[:STAMP]} {node.name}:{line[STAMP:]}")
                    time.sleep(SECONDS_BETWEEN_LOOKS)
            finally:
                server.terminate()
                server.wait()
    except StopRequested:
        return 130
    if ended:
        raise FedremaError(f"The server has ended with {ended}; {folder} tells more.")
    return 0
