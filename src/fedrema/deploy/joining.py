"""fedrema deploy client: Flower's SuperNode, started again whenever it ends."""

import sys
import time
from collections.abc import Callable

from fedrema.deploy.children import Child, Stopped, Told, environment, free_port, keeping
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
    child = Child(
        "Flower's SuperNode",
        [
            *(sys.executable, "-m", "fedrema.deploy.supernode", "--superlink", place.server),
            *("--root-certificates", str(place.path / "ca.crt")),
            *("--auth-supernode-private-key", str(place.path / "node.key")),
            *("--host", "127.0.0.1", "--port", str(free_port())),
            *("--node-config", " ".join(f"{name}={_written(value)}" for name, value in place.config().items())),
        ],
        place.path / "state" / "supernode.log",
        environment(place.path / "state" / "flower", place.path),
    )
    told = Told(place.path / LOG)
    say(f"node {place.name} takes part at {place.server}")
    try:
        with keeping(child):
            while True:
                if sentence := child.keep():
                    say(sentence)
                for line in told.lines():
                    say(line)
                time.sleep(SECONDS_BETWEEN_LOOKS)
    except Stopped:
        say("stopped; the same command takes part again")
        return 130


def _written(value: str | float) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)
