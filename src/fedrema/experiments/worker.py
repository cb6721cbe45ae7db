"""A process that plays tasks: orders come in, a JSON line each; what happens goes out, a JSON line each."""

import json
import os
import signal
import sys
from pathlib import Path

from fedrema.experiments.launchers import Event, outcome, telling
from fedrema.experiments.runner import Runner
from fedrema.experiments.store import Store
from fedrema.experiments.work import Task
from fedrema.runs.execute import Interrupted

OUT = os.dup(sys.stdout.fileno())
"""Where events go; what methods and data of the user's own print goes to the error stream instead."""


def main(cells: str, work: str, beside: str) -> int:
    """Play what comes in, until nothing more does."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    runner = Runner(Store(Path(cells)), Path(work), telling(tell), int(beside))
    for line in sys.stdin:
        try:
            tell(outcome(runner, Task.ordered(json.loads(line))))
        except Interrupted:
            tell(Event("stopped"))
            return 130
    return 0


def tell(event: Event) -> None:
    """Send an event; if nobody is there any more, stop gently."""
    try:
        os.write(OUT, f"{event.line()}\n".encode())
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), OUT)  # for what is still to be told
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
