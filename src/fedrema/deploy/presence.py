"""Beside the folder of a run: whether somebody writes there, what is told, and why it ended."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedrema.base.files import write_text
from fedrema.base.terminal import safe, safe_logger
from fedrema.errors import FedremaError
from fedrema.runs.lock import RunLock


def beside(folder: Path, what: str) -> Path:
    """Return a file beside a run's folder: log or stopped."""
    return folder.with_name(f"{folder.name}.{what}")


@contextmanager
def present(folder: Path) -> Iterator[RunLock]:
    """Hold the run's lock; the log and, after a failure, its reason are written beside the run's folder."""
    lock = RunLock(folder).acquire()
    handler = logging.FileHandler(beside(folder, "log"))
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S"))
    log = safe_logger("fedrema")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    beside(folder, "stopped").unlink(missing_ok=True)
    try:
        yield lock
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
    return RunLock(folder).is_held()


def reason(folder: Path) -> str:
    """Return why the last server gave up; empty where it did not."""
    file = beside(folder, "stopped")
    return file.read_text(encoding="utf-8").strip() if file.is_file() else ""
