"""Processes that a command of ours starts, starts again when they end, and takes with it when it ends."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

LONGEST_PAUSE = 30.0
LONG_LIFE = 60.0
LARGEST_LOG = 20_000_000


def environment(home: Path, modules: Path) -> dict[str, str]:
    """Return the environment of Flower's processes: nothing calls home, nothing installs or updates itself."""
    switches = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "FLWR_HOME": str(home),
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
    }
    paths = {
        "PATH": [str(Path(sys.executable).parent), os.environ.get("PATH", "")],  # Flower starts its parts by name
        "PYTHONPATH": [str(modules), os.environ.get("PYTHONPATH", "")],
    }
    joined = {name: os.pathsep.join(part for part in parts if part) for name, parts in paths.items()}
    # Warnings as errors are meant for one's own code; Flower, whose libraries warn, would not start.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    return {**inherited, **switches, **joined}


class Child:
    """A process that is to be there all the time."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path, environment: dict[str, str]) -> None:
        self.name, self.arguments, self.log, self.environment = name, list(arguments), log, environment
        self.process: subprocess.Popen[bytes] | None = None
        self.started = self.ended = -LONGEST_PAUSE
        self.vain = 0
        """Its ends in a row without a long life between them."""
        self.noticed = True
        """Whether its last end has been told."""

    @property
    def pause(self) -> float:
        """How long it stays away after an end, in seconds: twice as long each time, up to a limit."""
        if not self.vain:
            return 0.0
        return min(LONGEST_PAUSE, 2.0 ** min(self.vain - 1, 10))  # after days, two to that power would be no number

    def keep(self) -> str:
        """Start it if it is not there; returns a sentence when it has ended by itself, else nothing."""
        now = time.monotonic()
        if self.process is not None and self.process.poll() is None:
            return ""
        if not self.noticed and self.process is not None:
            self.noticed, self.ended = True, now
            self.vain = 1 if now - self.started > LONG_LIFE else self.vain + 1
            return f"{self.name} has ended ({self._last_words()}); it is started again in {self.pause:g} s"
        if now - self.ended >= self.pause:
            self._start()
        return ""

    def end(self) -> None:
        """End it, and whatever it has started."""
        if self.process is None:
            return
        for what, patience in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            try:
                os.killpg(self.process.pid, what)
                self.process.wait(patience)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        self.process.wait()

    def _start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self.log.exists() and self.log.stat().st_size > LARGEST_LOG:
            self.log.replace(self.log.with_suffix(".old.log"))
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.arguments, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self.environment,
                start_new_session=True,  # so that all of it can be ended together
            )  # fmt: skip
        self.started, self.noticed = time.monotonic(), False

    def _last_words(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines() if self.log.exists() else []
        said = [line.strip() for line in lines[-20:] if line.strip()]
        return said[-1][-300:] if said else "without a word"


class Told:
    """Lines that others add to a file, handed on as they come."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.place = file.stat().st_size if file.exists() else 0

    def lines(self) -> list[str]:
        """Return the lines that have come since the last call."""
        if not self.file.exists():
            return []
        if self.file.stat().st_size < self.place:
            self.place = 0
        with self.file.open("rb") as stream:
            stream.seek(self.place)
            whole = stream.read().rpartition(b"\n")[0]
        self.place += len(whole) + 1 if whole else 0
        return whole.decode("utf-8", errors="replace").splitlines() if whole else []


class Stopped(Exception):
    """Somebody asked us to end."""


@contextmanager
def keeping(*children: Child) -> Iterator[None]:
    """End the children when this ends, however it does; SIGTERM and Ctrl-C become `Stopped`."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number in before:
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not leave anybody behind
        for child in children:
            child.end()
        for number, handler in before.items():
            signal.signal(number, handler)


def free_port() -> int:
    """Return a port of this machine that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
