"""The status of a run: its state, the time it still needs, and which clients are missing."""

import time
from pathlib import Path
from typing import Literal, TypedDict

from fedrema.page.reading import ABSENT, FAILED, DownsampledRun
from fedrema.runs.lock import Writer

SILENCE = 60.0
"""Seconds without a new record after which a run on another machine no longer counts as running."""
SHOWN_NAMES = 12

State = Literal["running", "finished", "stopped", "silent"]


class MissingClients(TypedDict):
    """Clients without an upload in the last round; the lists name the first few."""

    absent: list[str]
    absent_count: int
    failed: list[str]
    failed_count: int


class Status(MissingClients):
    """The status of a run; times in seconds since 1970."""

    state: State
    done: int
    rounds: int
    seconds_left: float | None
    checkpoint: float | None
    """When the checkpoint was written."""
    updated: float | None
    """When the last record was written."""


def status_of(run: DownsampledRun) -> Status:
    """Return the present status of a run."""
    done, wanted = run.file.count, int(run.settings["rounds"])
    writer = run.directory.training_process()
    state = _state(run, writer, time.time())
    return {
        "state": state,
        "done": done,
        "rounds": wanted,
        "seconds_left": _seconds_left(run, writer, done, wanted) if state == "running" else None,
        "checkpoint": _changed(run.directory.checkpoint_file),
        "updated": _changed(run.directory.rounds_file) or _changed(run.directory.config_file),
        **_missing(run),
    }


def _state(run: DownsampledRun, writer: Writer | None, now: float) -> State:
    if run.finished:
        return "finished"
    if writer is None:
        return "stopped"
    if writer.is_here:
        return "running" if writer.is_alive() else "stopped"
    updated = max(_changed(run.directory.rounds_file) or 0.0, writer.since)
    return "running" if now - updated < SILENCE else "silent"


def _seconds_left(run: DownsampledRun, writer: Writer | None, done: int, wanted: int) -> float | None:
    latest = _changed(run.directory.rounds_file)
    if writer is None or latest is None or done <= (writer.first or 0) or latest <= writer.since:
        return None
    return (wanted - done) * (latest - writer.since) / (done - (writer.first or 0))


def _missing(run: DownsampledRun) -> MissingClients:
    if not run.kept:
        return {"absent": [], "failed": [], "absent_count": 0, "failed_count": 0}
    last, names = run.kept[-1], run.names
    presence = last.clients.presence
    failed = {name: "" for name, value in zip(names, presence, strict=True) if value == FAILED}
    failed |= last.record.rejected
    absent = [name for name, value in zip(names, presence, strict=True) if value == ABSENT]
    return {
        "absent": absent[:SHOWN_NAMES],
        "absent_count": len(absent),
        "failed": [f"{name} ({why})" if why else name for name, why in list(failed.items())[:SHOWN_NAMES]],
        "failed_count": len(failed),
    }


def _changed(file: Path) -> float | None:
    try:
        return file.stat().st_mtime
    except OSError:
        return None
