"""Supervised processes: started by this one, restarted on request, and stopped together with it."""

import collections
import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import BinaryIO

LONGEST_DELAY = 30.0
"""Largest number of seconds before a restart."""
LONG_RUN = 60.0
"""A process that ran for this many seconds did not fail at its start."""
LARGEST_LOG = 20_000_000
"""A log file above this many bytes is renamed before the process starts again."""
LAST_LINES = 20
"""How many lines of a process's output are kept to explain its exit."""
LONGEST_LINE = 300
SECONDS_BETWEEN_CHECKS = 0.2
SUPERVISOR = "FEDREMA_SUPERVISOR"
"""Environment variable of a supervised process: the number of the process that has started it."""
SECONDS_TO_EXIT = 10.0
"""How long a process may take to exit after its parent."""


class SupervisedProcess:
    """A process that can be restarted after it exits, and whose descendants are stopped with it.

    Parameters
    ----------
    name
        How messages name it.
    arguments
        Its command line.
    environment
        Its environment; None: that of this process.
    log
        File to which its output is appended. None: its error stream is read here instead.
    forward
        Called with each line of its error stream, from another thread. Only without `log`.
    pipes
        Whether `send` writes to its standard input and `received` reads its standard output.
    patience
        How many seconds `stop` waits after SIGTERM before it kills the process.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        forward: Callable[[str], None] | None = None,
        pipes: bool = False,
        patience: float = 5.0,
    ) -> None:
        self.name, self.arguments, self.log = name, list(arguments), log
        self.environment = None if environment is None else dict(environment)
        self.forward, self.pipes, self.patience = forward, pipes, patience
        self.process: subprocess.Popen[str] | None = None
        self.early_exits = 0
        """How often in succession it exited soon after its start."""
        self._started = self._exited = -LONGEST_DELAY
        self._exit_reported = True
        self._error_lines: collections.deque[str] = collections.deque(maxlen=LAST_LINES)
        self._reader: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        """Whether it has been started and has not exited."""
        return self.process is not None and self.process.poll() is None

    @property
    def restart_delay(self) -> float:
        """Seconds between its last exit and its restart: doubled by every early exit, up to a limit."""
        if not self.early_exits:
            return 0.0
        return min(LONGEST_DELAY, 2.0 ** min(self.early_exits - 1, 10))  # a larger exponent would overflow in time

    def supervise(self) -> str:
        """Start the process if it does not run and its delay has passed; return a message if it has just exited."""
        now = time.monotonic()
        if self.is_running:
            return ""
        if not self._exit_reported and self.process is not None:
            self._exit_reported, self._exited = True, now
            self.early_exits = 1 if now - self._started > LONG_RUN else self.early_exits + 1
            return f"{self.name} has exited ({self.last_line()}); it restarts in {self.restart_delay:g} s"
        if now - self._exited >= self.restart_delay:
            self.start()
        return ""

    def start(self) -> None:
        """Start the process now."""
        self._error_lines.clear()
        output = subprocess.PIPE if self.pipes else subprocess.DEVNULL
        with contextlib.ExitStack() as stack:
            errors = subprocess.PIPE
            if self.log is not None:
                errors = stack.enter_context(self._open_log(self.log)).fileno()
                output = subprocess.PIPE if self.pipes else errors
            self.process = subprocess.Popen(
                self.arguments,
                env={**(os.environ if self.environment is None else self.environment), SUPERVISOR: str(os.getpid())},
                stdin=subprocess.PIPE if self.pipes else subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                text=True,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,  # its descendants can be stopped with it, and Ctrl-C reaches only this process
            )
        if self.log is None:
            self._reader = threading.Thread(target=self._read_errors, args=(self.process,), daemon=True)
            self._reader.start()
        self._started, self._exit_reported = time.monotonic(), False

    def send(self, line: str) -> None:
        """Write a line to its standard input; a process that has exited receives nothing."""
        assert self.process is not None
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def received(self) -> Iterator[str]:
        """Yield the lines of its standard output as they arrive, until it closes it."""
        assert self.process is not None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield line.removesuffix("\n")

    def finish(self) -> int:
        """Close its standard input, wait until it exits, and return its exit code."""
        assert self.process is not None
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        if self.process.stdout is not None:
            for _ in self.process.stdout:  # a full pipe would keep it from exiting
                pass
        code = self.process.wait()
        self._close()
        return code

    def request_stop(self) -> None:
        """Send SIGTERM to the process alone; it may finish what it is doing."""
        if self.process is not None and self.is_running:
            self.process.send_signal(signal.SIGTERM)

    def terminate(self) -> None:
        """Send SIGTERM to the process and all its descendants."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)

    def stop(self) -> None:
        """Terminate the process and all its descendants; kill what has not exited in time."""
        if self.process is None:
            return
        self.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(self.patience)
        with contextlib.suppress(ProcessLookupError):  # also descendants that have outlived it
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._close()

    def last_line(self) -> str:
        """Return the last line that it wrote, without surrounding space."""
        if self.log is None:
            if self._reader is not None and not self.is_running:
                self._reader.join(1.0)
            lines = list(self._error_lines)
        elif self.log.exists():
            lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
        else:
            lines = []
        written = [line.strip() for line in lines if line.strip()]
        return written[-1][-LONGEST_LINE:] if written else "no output"

    def _open_log(self, log: Path) -> BinaryIO:
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.exists() and log.stat().st_size > LARGEST_LOG:
            log.replace(log.with_suffix(".old.log"))
        return log.open("ab")

    def _read_errors(self, process: "subprocess.Popen[str]") -> None:
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                self._error_lines.append(line)
                if self.forward is not None:
                    self.forward(line.removesuffix("\n"))

    def _close(self) -> None:
        """Close its remaining pipes."""
        if self.process is not None:
            for stream in (self.process.stdin, self.process.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()
        if self._reader is not None:
            self._reader.join(1.0)


class LogTail:
    """Follows the lines that other processes append to a file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.position = file.stat().st_size if file.exists() else 0

    def lines(self) -> list[str]:
        """Return the complete lines that were appended since the last call."""
        if not self.file.exists():
            return []
        if self.file.stat().st_size < self.position:
            self.position = 0
        with self.file.open("rb") as stream:
            stream.seek(self.position)
            complete = stream.read().rpartition(b"\n")[0]
        self.position += len(complete) + 1 if complete else 0
        return complete.decode("utf-8", errors="replace").splitlines() if complete else []


class StopRequested(BaseException):
    """SIGTERM or Ctrl-C was received; as `KeyboardInterrupt`, it is not caught by `except Exception`."""


@contextmanager
def stopped_on_exit(*processes: SupervisedProcess) -> Iterator[None]:
    """Stop the processes when the block ends; SIGTERM and Ctrl-C raise `StopRequested` in it."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise StopRequested

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number in before:
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave processes behind
        for process in processes:  # all at once, so that the time to stop does not depend on their number
            process.terminate()
        for process in processes:
            process.stop()
        for number, handler in before.items():
            signal.signal(number, handler)


def exit_with_parent(parent: int | None = None) -> None:
    """Interrupt this process (SIGINT) when its parent exits, even if the parent is killed; kill it if that fails.

    `parent` is by default the process that `SupervisedProcess` named at the start: it may have been killed while this
    process was importing its modules, and then this process exits at once.
    """
    if parent is None:
        parent = int(os.environ.get(SUPERVISOR, os.getppid()))

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(SECONDS_BETWEEN_CHECKS)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(SECONDS_TO_EXIT)  # this thread ends with the process
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True, name="fedrema-parent").start()


def free_port() -> int:
    """Return a TCP port of this machine that is not in use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
