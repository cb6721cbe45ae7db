"""Runs that are watched: finds new records, and rebuilds the parts of the document that have changed."""

import contextlib
import threading
import time
from pathlib import Path
from typing import ClassVar, get_args

from fedrema.errors import BadInput
from fedrema.page.clients import clients_part
from fedrema.page.document import in_order, main_part
from fedrema.page.reading import DownsampledRun
from fedrema.page.relations import relations_part
from fedrema.page.render import Part, PartName
from fedrema.page.status import Status, status_of
from fedrema.page.verdict import verdict_part
from fedrema.runs.directory import RunDirectory

SEARCH = 1.0
"""Seconds between searches for new runs."""
REST = 10.0
"""Minimum seconds between two versions of a part, for each second that it takes to make."""


class LiveRuns:
    """The runs in a folder, which may be empty at first; safe to use from several threads."""

    PARTS: ClassVar[tuple[PartName, ...]] = get_args(PartName)

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lock = threading.RLock()
        self.known: dict[Path, DownsampledRun] = {}
        self.runs: list[DownsampledRun] = []
        self.versions: dict[PartName, int] = dict.fromkeys(self.PARTS, 0)
        self.made: dict[PartName, tuple[int, Part]] = {}
        self.cost = dict.fromkeys(self.PARTS, 0.0)
        self.started = dict.fromkeys(self.PARTS, 0.0)
        self.waiting = dict.fromkeys(self.PARTS, False)
        self.seen: dict[Path, float] = {}
        self.damaged: dict[Path, tuple[object, str]] = {}
        """Runs that cannot be read, with the state of their files and the error message."""
        self.other_tasks: list[str] = []
        """Tasks of runs that are not shown because they have another primary metric."""
        self.searched = -SEARCH

    def refresh(self) -> None:
        """Find new runs, records and matrices."""
        with self.lock:
            changed = False
            if time.monotonic() - self.searched >= SEARCH:
                changed = self._find_runs()
                self.searched = time.monotonic()
            for run in list(self.known.values()):
                try:
                    changed |= run.refresh()
                except BadInput as error:
                    self._leave_out(run.path, error)
                    changed = True
            if changed:
                self.runs = self._in_order()
                self.waiting |= {"main": True, "clients": True, "verdict": True}
            if self._new_matrices():
                self.waiting["relations"] = True
            for name in self.PARTS:
                rested = time.monotonic() - self.started[name] >= REST * self.cost[name]
                if self.waiting[name] and (rested or not self.versions[name]):
                    self.waiting[name] = False
                    self.started[name] = time.monotonic()
                    self.versions[name] += 1

    def part(self, name: PartName) -> Part:
        """Return a part as of the last refresh."""
        with self.lock:
            version = self.versions[name]
            if name not in self.made or self.made[name][0] != version:
                started = time.monotonic()
                self.made[name] = version, self._make(name)
                self.cost[name] = time.monotonic() - started
            return self.made[name][1]

    def status(self) -> list[Status]:
        """Return the status of each run."""
        with self.lock:
            return [status_of(run) for run in self.runs]

    def _make(self, name: PartName) -> Part:
        try:
            return self._made_of(name, self.runs)
        except BadInput:
            for run in self.runs:
                try:
                    self._made_of(name, [run])
                except BadInput as error:
                    self._leave_out(run.path, error)
            self.runs = self._in_order()
            self.waiting = dict.fromkeys(self.PARTS, True)  # all parts have the same runs
            return self._made_of(name, self.runs)

    def _made_of(self, name: PartName, runs: list[DownsampledRun]) -> Part:
        if name == "main":
            notes = [f"{message} The run is not shown." for _, message in self.damaged.values()]
            if self.other_tasks:
                words = " and ".join(self.other_tasks)
                notes.append(f"Runs of other tasks ({words}) are not shown: watch their folders separately.")
            return main_part(runs, live=True, notes=notes)
        if name == "verdict":
            return verdict_part(runs, live=True)
        return clients_part(runs) if name == "clients" else relations_part(runs)

    def _leave_out(self, folder: Path, error: BadInput) -> None:
        """Stop showing a run that was removed or damaged; the page names the damaged ones."""
        self.known.pop(folder, None)
        if RunDirectory(folder).looks_like_run():
            self.damaged[folder] = _state(folder), self._without_folder(str(error))

    def _without_folder(self, message: str) -> str:
        """Return an error message without the path of the watched folder: other users may see the page."""
        return message.replace(f"{self.folder}/", "")

    def _find_runs(self) -> bool:
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
                run = DownsampledRun(folder)
                in_order([run])
            except OSError:  # removed in the meantime
                continue
            except BadInput as error:  # damaged, or another program's config.json
                self._leave_out(folder, error)
                changed |= folder in self.damaged
                continue
            self.known[folder] = run
            changed = True
        return changed

    def _in_order(self) -> list[DownsampledRun]:
        """Return the runs that are shown: those that have the task of the run that was started last."""
        runs = list(self.known.values())
        if not runs:
            return []
        latest = max(runs, key=lambda run: run.manifest.ran_on.started)
        others = {run.manifest.federation.task.name for run in runs if run.metric != latest.metric}
        self.other_tasks = sorted(others)
        return in_order([run for run in runs if run.metric == latest.metric])

    def _new_matrices(self) -> bool:
        now = {}
        for run in self.runs:
            for file in (run.directory.relations_file, run.directory.checkpoint_file):
                with contextlib.suppress(OSError):
                    now[file] = file.stat().st_mtime
        changed, self.seen = now != self.seen, now
        return changed


def _state(folder: Path) -> object:
    """Return times and sizes of a run's files, which change when a file does."""
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
