"""fedrema deploy client: Flower's SuperNode, started again whenever it ends."""

import sys
import time
from collections.abc import Callable

from fedrema.base.processes import LogTail, StopRequested, SupervisedProcess, free_port, stopped_on_exit
from fedrema.deploy.flower_environment import environment
from fedrema.deploy.places import NodePlace
from fedrema.errors import BadInput

SECONDS_BETWEEN_LOOKS = 1.0
LOG = "node.log"


def join(place: NodePlace, say: Callable[[str], None]) -> int:
    """Take part until somebody stops it."""
    for name in ("ca.crt", "node.key"):
        if not (place.path / name).is_file():
            raise BadInput(f"{place.path} has no {name}: copy the whole folder that fedrema deploy init made.")
    place.kept.mkdir(mode=0o700, exist_ok=True)
    child = SupervisedProcess(
        "Flower's SuperNode",
        [
            *(sys.executable, "-m", "fedrema.deploy.supernode", "--superlink", place.server),
            *("--root-certificates", str(place.path / "ca.crt")),
            *("--auth-supernode-private-key", str(place.path / "node.key")),
            *("--host", "127.0.0.1", "--port", str(free_port())),
            *("--node-config", " ".join(f"{name}={_written(value)}" for name, value in place.config().items())),
        ],
        environment(place.path / "state" / "flower", place.path),
        place.path / "state" / "supernode.log",
    )
    told = LogTail(place.path / LOG)
    say(f"node {place.name} takes part at {place.server}")
    try:
        with stopped_on_exit(child):
            while True:
                if sentence := child.supervise():
                    say(sentence)
                for line in told.lines():
                    say(line)
                time.sleep(SECONDS_BETWEEN_LOOKS)
    except StopRequested:
        say("stopped; the same command takes part again")
        return 130


def _written(value: str | float) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
