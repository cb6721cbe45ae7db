"""The command line: one module per command, imported when the command is called, so that help is instant."""

import errno
import importlib
import io
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from fedrema import __version__
from fedrema.errors import FedremaError, unknown

COMMANDS = {
    "run": "train clients with one or several methods; alone: a demonstration",
    "resume": "resume an interrupted run",
    "compare": "compare runs: table, differences with intervals, curves",
    "report": "write an HTML report about runs",
    "verdict": "is joining worthwhile? each client's gain over Local or FedAvg",
    "watch": "show runs in the browser while they train",
    "grid": "run an experiment from a file: methods × settings × seeds",
    "reproduce": "reproduce the tables and figures of the FedReMa paper",
    "leaderboard": "compare all methods, or your own method with them",
    "methods": "list the methods with their settings and papers",
    "data": "list the datasets, or download them",
    "partition": "partition a dataset among clients: print, save, draw",
    "predict": "predict new rows or images with the clients' models",
    "export": "write each client's model as safetensors, for plain PyTorch",
    "personalize": "make a model for a client that did not participate in training",
    "deploy": "run the same methods on a real network: server, nodes, demo",
    "bench": "measure training speed on this machine",
    "doctor": "check this installation, and get advice",
    "completion": "print a script that completes commands in your shell",
}
"""What each command does; the command NAME is the function NAME in the module `fedrema.cli.NAME`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code.

    0: success; 2: an error that the user can correct; 130: interrupted; 141: the reader of the output has closed it.
    """
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # characters that the terminal cannot show become ?
            stream.reconfigure(errors="replace")
    try:
        try:
            with _without_repetitions():
                return _run(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            sys.stdout.flush()
    except FedremaError as error:
        _print_error(str(error))
        return 2
    except BrokenPipeError:  # such as head, which closes the pipe early
        _discard_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.filename is None:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF):
                raise
            _discard_output()
            _print_error(f"cannot write the output: {error.strerror}.")
            return 2
        _print_error(f"{error.filename}: {error.strerror}; check the path and its permissions.")
        return 2
    except KeyboardInterrupt:
        print("fedrema: interrupted.", file=sys.stderr)
        return 130


def _open_closed_streams() -> None:
    """Open /dev/null for streams that the caller has closed: the next opened file would take their place."""
    with suppress(OSError):
        while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
            os.set_inheritable(descriptor, True)  # by the commands that this one starts
        os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115  # a descriptor
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def _discard_output() -> None:
    """Let Python discard what it could not write; it reports an error at exit otherwise."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _OnlyOnce(logging.Filter):
    """Drops messages that were logged before: of several runs on the same data, only the first one's are shown."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a message is new."""
        text = record.getMessage()
        is_new = text not in self._seen
        self._seen.add(text)
        return is_new


@contextmanager
def _without_repetitions() -> Iterator[None]:
    logger, once = logging.getLogger("fedrema"), _OnlyOnce()
    logger.addFilter(once)
    try:
        yield
    finally:
        logger.removeFilter(once)


def _print_error(sentence: str) -> None:
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
        raise unknown("Command", command, COMMANDS)
    function = getattr(importlib.import_module(f"fedrema.cli.{command}"), command)
    return int(function(rest) or 0)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: fedrema COMMAND [OPTIONS]",
            "",
            "Personalised federated learning: FedReMa and other methods.",
            "",
            *lines,
            "",
            "fedrema COMMAND --help explains a command.",
        ]
    )
