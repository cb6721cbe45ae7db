"""The lock of a run's folder: at most one process writes to a run at a time.

The operating system holds the lock on the file `run.lock`, so it ends with its process, also after `kill -9`.
`running.json` names the process that holds it.
"""

import json
import shlex
import socket
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType

import psutil
from filelock import FileLock, Timeout

from fedrema.base.files import make_folder, regular_file, write_text
from fedrema.errors import BadInput

LOCK_FILE = "run.lock"
WRITER_FILE = "running.json"
SECONDS_TO_WAIT = 1.0
"""Longer than `is_held` of another process holds the lock to test it."""
LONGEST_COMMAND = 200


@dataclass(frozen=True)
class Writer:
    """A process that writes to a run."""

    host: str
    process: int
    process_began: float
    """When the process started; distinguishes it from a later process with the same number."""
    since: float
    command: str = ""
    first: int | None = None
    """How many rounds the run had when training started; None where the process does not train (an export)."""

    @classmethod
    def this_process(cls) -> "Writer":
        """Return the current process."""
        me = psutil.Process()
        return cls(socket.gethostname(), me.pid, me.create_time(), time.time(), _command())

    @classmethod
    def read(cls, file: Path) -> "Writer | None":
        """Return the process that running.json names; None where the file is missing or cannot be read."""
        try:
            found = cls(**json.loads(regular_file(file).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        numbers = (found.process, found.process_began, found.since, found.first or 0)
        return found if all(isinstance(number, int | float) for number in numbers) else None

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this machine."""
        return self.host == socket.gethostname()

    def is_alive(self) -> bool:
        """Whether it still runs; only known on its own machine."""
        try:
            return bool(abs(psutil.Process(self.process).create_time() - self.process_began) < 1)
        except (psutil.Error, ValueError, OverflowError):
            return False

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        command = f" ({self.command})" if self.command else ""
        return f"process {self.process} on {self.host}{command} since {since}"


class RunLock:
    """Exclusive right to write to a run's folder; reading needs no lock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writer_file = folder / WRITER_FILE
        # Not thread-local: seeds that train jointly are prepared in one thread and finished in others.
        self._lock = FileLock(folder / LOCK_FILE, thread_local=False)

    def acquire(self) -> "RunLock":
        """Acquire the lock, unless this object holds it; an error names the process that holds it."""
        if self._lock.is_locked:
            return self
        try:
            make_folder(self.folder)
            self._lock.acquire(timeout=SECONDS_TO_WAIT, poll_interval=0.05)
            self._write(Writer.this_process())
        except Timeout:
            raise self._in_use() from None
        except OSError as error:
            reason = error.strerror or type(error).__name__
            file = self.folder / LOCK_FILE
            raise BadInput(f"cannot lock {file}: {reason}; choose a place that is writable.") from error
        return self

    def training_from(self, first: int) -> None:
        """Record that training starts, after `first` rounds."""
        self._write(replace(Writer.this_process(), first=first))

    def release(self) -> None:
        """Release the lock. The file stays: a process that waits for it would otherwise lock a deleted file."""
        if self._lock.is_locked:
            self.writer_file.unlink(missing_ok=True)
            self._lock.release()

    def check(self) -> None:
        """Raise an error if another process holds the lock; acquires nothing and writes nothing."""
        if self.is_held():
            raise self._in_use()

    def is_held(self) -> bool:
        """Whether a process currently holds the lock."""
        if not (self.folder / LOCK_FILE).is_file():
            return False
        attempt = FileLock(self.folder / LOCK_FILE, thread_local=False)
        try:
            attempt.acquire(blocking=False)
        except Timeout:
            return True
        except OSError:  # no process can write to this folder
            return False
        attempt.release()
        return False

    def __enter__(self) -> "RunLock":
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()

    def _write(self, writer: Writer) -> None:
        write_text(self.writer_file, json.dumps(asdict(writer)) + "\n", durable=False)

    def _in_use(self) -> BadInput:
        writer = Writer.read(self.writer_file) or "another process"
        return BadInput(f"{self.folder} is in use by {writer}: wait until it ends, or stop it.")


def _command() -> str:
    """Return the command of this process, as typed in a shell."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    command = shlex.join([name, *sys.argv[1:]])
    return command if len(command) <= LONGEST_COMMAND else f"{command[: LONGEST_COMMAND - 1]}…"
