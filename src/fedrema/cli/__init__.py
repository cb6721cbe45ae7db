"""The command line. Commands import what they need when they are called, so that help comes at once."""

import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence

from fedrema import __version__
from fedrema.errors import BadInput, FedremaError

COMMANDS = {
    "run": ("fedrema.cli.run", "train clients with a method; without arguments: a demonstration"),
    "resume": ("fedrema.cli.run", "go on with a run that was stopped"),
    "compare": ("fedrema.cli.after", "compare runs: table, differences with confidence, picture of the curves"),
    "report": ("fedrema.cli.page", "write one HTML page about runs: curves, every client, who learns from whom"),
    "watch": ("fedrema.cli.page", "show the same page in the browser while runs go on"),
    "grid": ("fedrema.cli.grid", "run an experiment from a file: methods × settings × seeds, resumable"),
    "reproduce": ("fedrema.cli.reproduce", "the paper's tables and figures, ours beside the published"),
    "methods": ("fedrema.cli.look", "list every method, its settings and its paper"),
    "data": ("fedrema.cli.look", "list the datasets: what is there, what can be fetched"),
    "partition": ("fedrema.cli.look", "deal a dataset to clients: show, save, draw"),
    "export": ("fedrema.cli.after", "write each client's model as safetensors, for plain PyTorch"),
    "personalize": ("fedrema.cli.more", "make a model for a client that was not there"),
    "deploy": (
        "fedrema.cli.deploy",
        "the same methods on a real network: server, nodes, keys, status, a demonstration",
    ),
    "bench": ("fedrema.cli.bench", "measure speed on this machine, beside a textbook loop and its ceilings"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code.

    0, 2 for anything the user can mend, 130 when interrupted, 141 where nobody reads the output any more.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal without ± shows ? instead of failing
            stream.reconfigure(errors="replace")
    try:
        try:
            return _run(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            sys.stdout.flush()
    except FedremaError as error:
        _complain(str(error))
        return 2
    except BrokenPipeError:  # the reader of our output, such as head, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.filename is None:
            raise
        _complain(f"{error.filename}: {error.strerror}; see its place and permissions.")
        return 2
    except KeyboardInterrupt:
        print("fedrema: interrupted.", file=sys.stderr)
        return 130


def _complain(sentence: str) -> None:
    from fedrema.base.terminal import print_safe

    print_safe(f"fedrema: {sentence}", file=sys.stderr)


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0
    if arguments[0] == "--version":
        print(f"fedrema {__version__}")
        return 0
    command, *rest = arguments
    if command not in COMMANDS:
        raise BadInput(f"Command {command!r} is unknown; valid are {', '.join(COMMANDS)}.")
    function = getattr(importlib.import_module(COMMANDS[command][0]), command)
    return int(function(rest) or 0)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: fedrema COMMAND [OPTIONS]",
            "",
            "Personalised federated learning: FedReMa and its baselines.",
            "",
            *lines,
            "",
            "fedrema COMMAND --help explains a command.",
        ]
    )
