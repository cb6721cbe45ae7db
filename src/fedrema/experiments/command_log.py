"""The log of commands that finished runs: when, where, how long, how many.

The log is a file commands-HASH.jsonl in the folder of finished runs, named by its content, so that folders of several
machines can be copied into one; the next command merges their logs.
"""

import hashlib
import shlex
from collections.abc import Sequence
from datetime import datetime

import msgspec

from fedrema.base.files import regular_file, write_text
from fedrema.errors import BadInput
from fedrema.experiments.store import Store

PATTERN = "commands-*.jsonl"


class Command(msgspec.Struct, frozen=True, omit_defaults=True):
    """A command that finished runs."""

    started: str
    command: str
    seconds: float
    runs: int
    devices: list[str]
    versions: list[dict[str, str]]
    again: int = 0
    """How many of its runs replaced outdated ones."""


def log_command(
    store: Store, command: Sequence[str], started: datetime, seconds: float, new: set[str], again: int = 0
) -> None:
    """Add a command to the log; `new` are the keys of the runs that it finished."""
    runs = [run.ran_on for run in map(store.at, sorted(new)) if run.ran_on is not None]
    versions = {msgspec.json.encode(ran_on.versions): ran_on.versions for ran_on in runs}
    entry = Command(
        started.isoformat(timespec="seconds"),
        shlex.join(command),
        round(seconds, 1),
        len(new),
        sorted({ran_on.device for ran_on in runs}),
        [versions[text] for text in sorted(versions)],
        again,
    )
    write_log(store, [*read_log(store), entry])


def write_log(store: Store, commands: Sequence[Command]) -> None:
    """Write the log, and remove the files that it replaces."""
    files = list(store.folder.glob(PATTERN))
    lines = sorted({msgspec.json.encode(command).decode() for command in commands})
    content = "".join(f"{line}\n" for line in lines)
    log = store.folder / PATTERN.replace("*", hashlib.sha256(content.encode()).hexdigest()[:16])
    write_text(log, content)
    for file in files:
        if file != log:
            file.unlink(missing_ok=True)


def read_log(store: Store) -> list[Command]:
    """Return the commands in the order of their time."""
    found: dict[bytes, Command] = {}
    for file in sorted(store.folder.glob(PATTERN)):
        try:
            for line in regular_file(file).read_bytes().splitlines():
                found[line] = msgspec.json.decode(line, type=Command)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadInput(f"{file} is not a log of commands: {error}; restore it or remove it.") from error
    return sorted(found.values(), key=lambda command: (command.started, command.command))
