"""Beside the folder of a run: whether somebody writes there, what is told, and why it ended."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from fedrema.data.atomic import write_text
from fedrema.errors import BadInput, FedremaError
from fedrema.text import safe, safe_logger

SECONDS_TO_GET_IN = 5.0


def beside(folder: Path, what: str) -> Path:
    """Return a file beside a run's folder: lock, log or stopped."""
    return folder.with_name(f"{folder.name}.{what}")


@contextmanager
def present(folder: Path) -> Iterator[None]:
    """Be the only one who writes to a run's folder; what is logged, and why it ended in vain, is left beside it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(beside(folder, "lock"))
    try:
        lock.acquire(timeout=SECONDS_TO_GET_IN)
    except Timeout as error:
        raise BadInput(f"Another server conducts the federation in {folder}: end that one first.") from error
    handler = logging.FileHandler(beside(folder, "log"))
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    log = safe_logger("fedrema")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    beside(folder, "stopped").unlink(missing_ok=True)
    try:
        yield
    except FedremaError as error:
        log.error("%s", error)
        write_text(beside(folder, "stopped"), f"{safe(error)}\n")
        raise
    except Exception:  # it is told and goes on to whoever called
        log.exception("this should not have happened")
        raise
    finally:
        log.removeHandler(handler)
        handler.close()
        lock.release()


def somebody_is_there(folder: Path) -> bool:
    """Say whether a server conducts the federation in this folder at the moment."""
    lock = FileLock(beside(folder, "lock"))
    try:
        lock.acquire(blocking=False)
    except Timeout:
        return True
    lock.release()
    return False


def reason(folder: Path) -> str:
    """Return why the last server gave up; empty where it did not."""
    file = beside(folder, "stopped")
    return file.read_text(encoding="utf-8").strip() if file.is_file() else ""
