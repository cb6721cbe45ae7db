"""fedrema deploy demo: a whole federation on this machine, with TLS and keys, that ends by itself."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fedrema.config.settings import Settings
from fedrema.deploy.children import Child, Stopped, Told, environment, free_port, keeping
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
    nodes = [
        Child(name, [*command, "client", str(folder / "nodes" / name)], folder / "nodes" / name / "command.log", own)
        for name in names
    ]
    told = [Told(node.log) for node in nodes]
    try:
        with keeping(*nodes):
            server = subprocess.Popen(
                [*command, "server", str(folder / "server")], env=own, stdout=sys.stdout, stderr=sys.stderr
            )
            try:
                while (ended := server.poll()) is None:
                    for node, heard in zip(nodes, told, strict=True):
                        if sentence := node.keep():
                            say(sentence)
                        for line in heard.lines():
                            say(f"{line[:STAMP]} {node.name}:{line[STAMP:]}")
                    time.sleep(SECONDS_BETWEEN_LOOKS)
            finally:
                server.terminate()
                server.wait()
    except Stopped:
        return 130
    if ended:
        raise FedremaError(f"The server has ended with {ended}; {folder} tells more.")
    return 0
