"""Runs that are being watched: looks for what is new, and makes the parts of the document that have changed."""

import contextlib
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

from fedrema.errors import BadInput
from fedrema.page.document import main_part, order
from fedrema.page.people import people_part
from fedrema.page.reading import ThinnedRun
from fedrema.page.relations import relations_part
from fedrema.page.status import status_of

SEARCH = 1.0
"""Seconds between two searches for new runs."""
REST = 10.0
"""A part that took a second to make is made again after this many at the earliest."""


class Followed:
    """The runs in a folder, which may not be there yet; safe to be asked from several threads."""

    PARTS: ClassVar[tuple[str, ...]] = ("main", "people", "relations")

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = threading.RLock()
        self.known: dict[Path, ThinnedRun] = {}
        self.runs: list[ThinnedRun] = []
        self.versions = dict.fromkeys(self.PARTS, 0)
        self.made: dict[str, tuple[int, Any]] = {}
        self.cost = dict.fromkeys(self.PARTS, 0.0)
        self.asked = dict.fromkeys(self.PARTS, 0.0)
        self.waiting = dict.fromkeys(self.PARTS, False)
        self.seen: dict[Path, float] = {}
        self.searched = -SEARCH

    def look(self) -> None:
        """Look for new runs, new rounds and new matrices."""
        with self.lock:
            changed = False
            if time.monotonic() - self.searched >= SEARCH:
                changed = self._look_for_runs()
                self.searched = time.monotonic()
            for run in list(self.known.values()):
                try:
                    changed |= run.refresh()
                except BadInput:  # it was removed, or is being replaced
                    del self.known[run.path]
                    changed = True
            if changed:
                self.runs = self._in_order()
                self.waiting |= {"main": True, "people": True}
            if self._new_matrices():
                self.waiting["relations"] = True
            for name in self.PARTS:
                rested = time.monotonic() - self.asked[name] >= REST * self.cost[name]
                if self.waiting[name] and (rested or not self.versions[name]):
                    self.waiting[name] = False
                    self.asked[name] = time.monotonic()
                    self.versions[name] += 1

    def part(self, name: str) -> Any:
        """Return a part as of the last look."""
        with self.lock:
            version = self.versions[name]
            if name not in self.made or self.made[name][0] != version:
                begun = time.monotonic()
                self.made[name] = version, self._make(name)
                self.cost[name] = time.monotonic() - begun
            return self.made[name][1]

    def status(self) -> list[dict[str, Any]]:
        """Say how each run is doing."""
        with self.lock:
            return [status_of(run) for run in self.runs]

    def _make(self, name: str) -> Any:
        if name == "main":
            return main_part(self.runs, live=True)
        return people_part(self.runs) if name == "people" else relations_part(self.runs)

    def _look_for_runs(self) -> bool:
        changed = False
        for file in sorted(self.folder.rglob("config.json")):
            if file.parent in self.known:
                continue
            try:
                run = ThinnedRun(file.parent)
                order([run])
            except (BadInput, OSError):  # another program's config.json, or one that has just been removed
                continue
            self.known[file.parent] = run
            changed = True
        return changed

    def _in_order(self) -> list[ThinnedRun]:
        return order(list(self.known.values())) if self.known else []

    def _new_matrices(self) -> bool:
        now = {}
        for run in self.runs:
            for file in (run.directory.relations_file, run.directory.checkpoint_file):
                with contextlib.suppress(OSError):
                    now[file] = file.stat().st_mtime
        changed, self.seen = now != self.seen, now
        return changed
