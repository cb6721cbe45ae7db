"""A folder of finished runs: one compressed table, and a small file for each run that finished since it was written.

Several processes write at the same time, so each finished run is first written as KEY.json. At the end of a
command `Store.fold` collects these files in a table, HASH.jsonl.xz, named by its content. A folder may hold several
tables, copied from several machines; they are then merged, and a run that occurs more than once is used once.
"""

import hashlib
import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fedrema.base.files import atomic_file, regular_file, write_text
from fedrema.base.options import Purpose
from fedrema.config.settings import Settings
from fedrema.errors import BadInput
from fedrema.experiments.finished_run import FORMAT, FinishedRun, diverged_run, finished_run
from fedrema.runs.manifest import Inputs
from fedrema.runs.provenance import inputs_of, method_name
from fedrema.runs.run import Run

FOLDER = "runs"
"""Name of the store in a folder of results."""
TABLE = ".jsonl.xz"
NOT_A_RUN = "is not a finished run of fedrema"
NOT_A_TABLE = "is not a table of finished runs of fedrema"
DEFINING = (Purpose.RESULT, Purpose.SEED, Purpose.RECORD, Purpose.ROUNDS, Purpose.SOURCE)
"""Purposes of the settings that a key is made of."""

Stamp = tuple[int, int, int]
"""Inode, size and modification time: a file with the same stamp is not read again."""


def key_of(settings: Settings, inputs: Inputs | None = None) -> str:
    """Return a digest of everything that defines a run's result: its settings and seed, and the user's files.

    `inputs` are digests of those files; default: their present content. Revisions of fedrema are not part of it: a
    run of a later revision replaces one of an earlier revision.
    """
    inputs = inputs_of(settings) if inputs is None else inputs
    defining = sorted(settings.identifying(*DEFINING).items())
    content = [method_name(settings.method), defining, *([inputs] if inputs else [])]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class _Line:
    """A finished run, and its line in the store."""

    text: bytes
    run: FinishedRun


class Store:
    """A folder of finished runs, by key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[Path, tuple[Stamp, dict[str, _Line]]] = {}
        """The stamp and content of each file when it was read: all runs are needed again after every cell."""

    def check(self) -> None:
        """Raise an error, before any work, if the folder is damaged or was written by another version."""
        self._lines()

    def find(self, settings: Settings) -> FinishedRun | None:
        """Return a finished run, outdated or not; None if there is none with these settings."""
        line = self._lines().get(key_of(settings))
        return None if line is None else line.run

    def has(self, key: str) -> bool:
        """Whether the run with this key has finished and is not outdated."""
        line = self._lines().get(key)
        return line is not None and not line.run.outdated

    def at(self, key: str) -> FinishedRun:
        """Return the run with a key."""
        return self._lines()[key].run

    def keys(self) -> list[str]:
        """Return the keys of all runs."""
        return sorted(self._lines())

    def __iter__(self) -> Iterator[FinishedRun]:
        return (line.run for _, line in sorted(self._lines().items()))

    def put(self, settings: Settings, run: Run, concurrent_tasks: int = 0, inputs: Inputs | None = None) -> None:
        """Store a finished run; `concurrent_tasks` is the number of other tasks that used its device at the same time.

        `inputs` are the digests that its key is made of; default: those that the run recorded.
        """
        recorded = run.manifest.inputs
        key = key_of(settings, recorded if inputs is None else inputs)
        self._write(finished_run(key, settings, run, concurrent_tasks))

    def put_diverged(self, settings: Settings, reason: str, inputs: Inputs | None = None) -> None:
        """Record that a run diverged, so that it is not tried again until its file is removed."""
        self._write(diverged_run(key_of(settings, inputs), settings, reason, inputs))

    def put_text(self, key: str, text: str) -> None:
        """Store a run that another machine has finished, given the text of its file."""
        write_text(self.folder / f"{key}.json", text)

    def _write(self, run: FinishedRun) -> None:
        self.put_text(run.key, msgspec.json.encode(run).decode() + "\n")

    def fold(self) -> None:
        """Collect all finished runs in one table, and remove the files that it replaces.

        The files of runs that diverged are kept. The table is complete before anything is removed, so nothing can be
        lost. Processes that do this at the same time leave several tables, which the next call merges.
        """
        files = self._files()
        if all(file.name.endswith(TABLE) for file in files) and len(files) < 2:
            return
        stamps = {file: self._read[file][0] for file in files}
        lines = self._lines()
        content = b"".join(line.text + b"\n" for _, line in sorted(lines.items()) if not line.run.failed)
        if not content:
            return
        table = self.folder / f"{hashlib.sha256(content).hexdigest()[:16]}{TABLE}"
        if table not in files:
            with atomic_file(table) as temporary:
                temporary.write_bytes(lzma.compress(content, preset=6))
        for file, stamp in stamps.items():
            kept = file == table or (file.stem in lines and lines[file.stem].run.failed)
            if not kept and _stamp(file) == stamp:  # otherwise another process has just replaced the file
                file.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        """Read all tables and files of single runs; returns their paths. Repeats if another process replaces one."""
        while True:
            names = (*self.folder.glob("*.json"), *self.folder.glob(f"*{TABLE}"))
            found = sorted(file for file in names if not file.name.startswith("."))
            try:
                for file in found:
                    self._load(file)
            except FileNotFoundError:
                continue
            return found

    def _load(self, file: Path) -> None:
        stamp = _stamp(file)
        if stamp is None:
            raise FileNotFoundError
        if file not in self._read or self._read[file][0] != stamp:
            self._read[file] = stamp, _read_table(file) if file.name.endswith(TABLE) else _read_single(file)

    def _lines(self) -> dict[str, _Line]:
        found: dict[str, _Line] = {}
        for file in self._files():
            for key, line in self._read[file][1].items():
                if key not in found or _rank(line.run) > _rank(found[key].run):
                    found[key] = line
        return found


def _rank(run: FinishedRun) -> tuple[bool, bool, str]:
    """Return a sort key that prefers, among runs with the same key, finished, then current, then later ones."""
    return not run.failed, not run.outdated, run.ran_on.started if run.ran_on else ""


def _stamp(file: Path) -> Stamp | None:
    try:
        found = file.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadInput(f"{file} cannot be read: {error.strerror}.") from error
    return found.st_ino, found.st_size, found.st_mtime_ns


def _read_single(file: Path) -> dict[str, _Line]:
    line = _line(_bytes(file).strip(), file, NOT_A_RUN)
    return {line.run.key: line}


def _read_table(file: Path) -> dict[str, _Line]:
    try:
        content = lzma.decompress(_bytes(file))
    except (lzma.LZMAError, EOFError) as error:
        raise BadInput(f"{file} {NOT_A_TABLE}: {error}; restore it or remove it.") from error
    lines = [_line(text, file, NOT_A_TABLE) for text in content.splitlines()]
    return {line.run.key: line for line in lines}


def _bytes(file: Path) -> bytes:
    try:
        return regular_file(file).read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise BadInput(f"{file} cannot be read: {error.strerror}.") from error


class _Version(msgspec.Struct):
    format: int | None = None


def _line(text: bytes, file: Path, complaint: str) -> _Line:
    try:
        found = msgspec.json.decode(text, type=_Version).format
        if found != FORMAT:
            raise BadInput(
                f"{file} has format {found!r}, and this version of fedrema reads {FORMAT}: choose another folder."
            )
        return _Line(text, msgspec.json.decode(text, type=FinishedRun))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadInput(f"{file} {complaint}: {error}.") from error
