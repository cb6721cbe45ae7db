"""Runs that are being watched: looks for what is new, and makes the parts of the document that have changed."""

import contextlib
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

from fedrema.errors import BadInput
from fedrema.page.clients import people_part
from fedrema.page.document import main_part, order
from fedrema.page.reading import ThinnedRun
from fedrema.page.relations import relations_part
from fedrema.page.status import status_of
from fedrema.runs.directory import RunDirectory

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
        self.damaged: dict[Path, tuple[object, str]] = {}
        """Runs that cannot be read, with the state of their files and the complaint."""
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
                except BadInput as error:
                    self._leave_out(run.path, error)
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
        try:
            return self._made_of(name, self.runs)
        except BadInput:
            for run in self.runs:
                try:
                    self._made_of(name, [run])
                except BadInput as error:
                    self._leave_out(run.path, error)
            self.runs = self._in_order()
            self.waiting = dict.fromkeys(self.PARTS, True)  # every part has the same runs
            return self._made_of(name, self.runs)

    def _made_of(self, name: str, runs: list[ThinnedRun]) -> Any:
        if name == "main":
            notes = [f"{complaint} The run is left out." for _, complaint in self.damaged.values()]
            return main_part(runs, live=True, notes=notes)
        return people_part(runs) if name == "people" else relations_part(runs)

    def _leave_out(self, folder: Path, error: BadInput) -> None:
        """Show a run no longer that was removed or damaged; the page says which are damaged."""
        self.known.pop(folder, None)
        if RunDirectory(folder).looks_like_run():
            self.damaged[folder] = _state(folder), self._without_place(str(error))

    def _without_place(self, complaint: str) -> str:
        """Return a complaint without the place of the watched folder, which is nobody's business who looks."""
        return complaint.replace(f"{self.folder}/", "")

    def _look_for_runs(self) -> bool:
        changed = False
        found = {file.parent for name in ("config.json", "rounds.jsonl") for file in self.folder.rglob(name)}
        for folder in self.damaged.keys() - found:
            del self.damaged[folder]
            changed = True
        for folder in sorted(found - self.known.keys()):
            if folder in self.damaged and self.damaged[folder][0] == _state(folder):
                continue
            changed |= self.damaged.pop(folder, None) is not None
            try:
                run = ThinnedRun(folder)
                order([run])
            except OSError:  # it has just been removed
                continue
            except BadInput as error:  # damaged, or another program's config.json
                self._leave_out(folder, error)
                changed |= folder in self.damaged
                continue
            self.known[folder] = run
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


def _state(folder: Path) -> object:
    """Return what changes when a file of a run does."""
    directory = RunDirectory(folder)
    found = []
    for file in (
        *(directory.config_file, directory.rounds_file, directory.summary_file),
        *(directory.clients_file, directory.relations_file, directory.checkpoint_file),
    ):
        with contextlib.suppress(OSError):
            facts = file.stat()
            found.append((file, facts.st_mtime_ns, facts.st_size))
    return found
