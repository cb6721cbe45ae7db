"""Which process plays a run: a note in its folder, so that others can tell a run that goes on from one that stopped."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from fedrema.data.atomic import write_text


@dataclass(frozen=True)
class Player:
    """A process that plays a run."""

    host: str
    process: int
    process_began: float
    """Tells it from a later process with the same number."""
    since: float
    first: int
    """How many rounds there were when it began."""

    @classmethod
    def read(cls, file: Path) -> "Player | None":
        """Return who plays; None where nobody says so."""
        try:
            return cls(**json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, RecursionError):
            return None

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this machine."""
        return self.host == socket.gethostname()

    def is_alive(self) -> bool:
        """Whether it is still there; to be asked on its own machine."""
        try:
            return bool(abs(psutil.Process(self.process).create_time() - self.process_began) < 1)
        except psutil.Error:
            return False


@contextmanager
def playing(file: Path, first: int) -> Iterator[None]:
    """Leave a note while a run is being played; after kill -9 it stays, and names a process that is gone."""
    me = psutil.Process()
    player = Player(socket.gethostname(), me.pid, me.create_time(), time.time(), first)
    write_text(file, json.dumps(asdict(player)) + "\n")
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
