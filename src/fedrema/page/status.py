"""How a run is doing: going on, stopped or finished; how long it still takes; who is missing."""

import time
from pathlib import Path
from typing import Any

from fedrema.page.reading import ThinnedRun
from fedrema.runs.lock import Writer

SILENCE = 60.0
"""Seconds without news after which a run on another machine is no longer said to be going on."""
SHOWN_NAMES = 12


def status_of(run: ThinnedRun) -> dict[str, Any]:
    """Say how a run is doing now."""
    now = time.time()
    done, wanted = run.file.count, int(run.config["settings"]["rounds"])
    writer = run.directory.trainer()
    state = _state(run, writer, now)
    return {
        "state": state,
        "done": done,
        "rounds": wanted,
        "seconds_left": _seconds_left(run, writer, done, wanted) if state == "running" else None,
        "checkpoint": _changed(run.directory.checkpoint_file),
        "news": _changed(run.directory.rounds_file) or _changed(run.directory.config_file),
        **_missing(run),
    }


def _state(run: ThinnedRun, writer: Writer | None, now: float) -> str:
    if run.finished:
        return "finished"
    if writer is None:
        return "stopped"
    if writer.is_here:
        return "running" if writer.is_alive() else "stopped"
    news = max(_changed(run.directory.rounds_file) or 0.0, writer.since)
    return "running" if now - news < SILENCE else "silent"


def _seconds_left(run: ThinnedRun, writer: Writer | None, done: int, wanted: int) -> float | None:
    latest = _changed(run.directory.rounds_file)
    if writer is None or latest is None or done <= (writer.first or 0) or latest <= writer.since:
        return None
    return (wanted - done) * (latest - writer.since) / (done - (writer.first or 0))


def _missing(run: ThinnedRun) -> dict[str, Any]:
    """Say who did not count in the last round."""
    if not run.rounds:
        return {"absent": [], "failed": [], "absent_count": 0, "failed_count": 0}
    record, names = run.rounds[-1], run.names
    there = {int(row) for row in record.participants}
    failed = {names[row]: "" for row in map(int, record.dropped) if row < len(names)}
    failed |= record.rejected
    absent = [name for row, name in enumerate(names) if row not in there and name not in failed]
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
