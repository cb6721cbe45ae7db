"""A command that has played something, remembered: where, how long, how many runs. One small file each."""

import json
import os
import shlex
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from fedrema.base.files import write_text
from fedrema.experiments.store import Store
from fedrema.runs.manifest import read_object

FOLDER = "sittings"


def write_sitting(
    out: Path, command: Sequence[str], started: datetime, seconds: float, store: Store, new: set[str], again: int = 0
) -> None:
    """Keep what a command has done; `again`: how many of its runs replaced outdated ones."""
    runs = [run for run in map(store.at, sorted(new)) if not run.failed]
    content = {
        "command": shlex.join(command),
        "started": started.isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        "runs": len(new),
        **({"again": again} if again else {}),
        "devices": sorted({str(run.ran_on["device"]) for run in runs}),
        "versions": sorted({json.dumps(run.ran_on["versions"]) for run in runs}),
    }
    # The process's number keeps commands apart that were given in the same second.
    name = f"{started.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json"
    write_text(out / FOLDER / name, json.dumps(content, indent=2) + "\n")


def read_sittings(out: Path) -> list[dict[str, Any]]:
    """Return what commands have done, in the order of their time."""
    return [read_object(file, "is not a sitting") for file in sorted((out / FOLDER).glob("*.json"))]
