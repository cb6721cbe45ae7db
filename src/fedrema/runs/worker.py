"""A worker process of `WorkerPool`: reads jobs from standard input, one line each, and writes replies as JSON lines.

`python -m fedrema.runs.worker MODULE:FUNCTION ARGUMENT…`
"""

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable

from fedrema.runs.execute import Interrupted

REPLIES = os.dup(sys.stdout.fileno())
"""The pipe to the pool; output that methods and data functions print goes to standard error instead."""

Handler = Callable[..., str]


def main(handler: str, *arguments: str) -> int:
    """Handle jobs until standard input is closed."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    module, _, name = handler.partition(":")
    handle: Handler = getattr(importlib.import_module(module), name)
    for line in sys.stdin:
        try:
            _reply(handle(line.rstrip("\n"), _reply, *arguments), finished=True)
        except Interrupted:
            return 130
    return 0


def _reply(text: str, finished: bool = False) -> None:
    """Write a reply; if the pool has exited, stop after the current round."""
    try:
        os.write(REPLIES, f"{json.dumps({'finished': finished, 'text': text})}\n".encode())
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (REPLIES, sys.stdout.fileno(), sys.stderr.fileno()):
            os.dup2(nowhere, stream)
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
