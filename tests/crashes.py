"""The states that a disk can have after a crash: records writes below a folder and rebuilds every possible state.

The kernel may write names and contents to the disk in any order, except that fsync waits for the content of a file or
the names in a folder. Contents without fsync may be complete, missing, or zeros.
"""

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CALLS = ("fsync", "replace", "rename", "unlink", "remove", "mkdir", "rmdir", "truncate")
Names = dict[int, dict[str, int]]
"""By the inode of a folder: the names in it and their inodes."""
Contents = dict[int, bytes]
Tree = dict[str, bytes | None]
"""By path: a file's content, None for a folder."""


@dataclass(frozen=True)
class Moment:
    """The files as the program sees them, the part that is certainly on the disk, and what must survive a crash."""

    names: Names
    contents: Contents
    safe_names: Names
    safe_contents: Contents
    promise: Any


class Crashes:
    """Context manager that records the writes below a folder."""

    def __init__(self, root: Path, monkeypatch: Any) -> None:
        self.root, self.monkeypatch = root, monkeypatch
        self.moments: list[Moment] = []
        self.promised: Any = None
        self.safe_names: Names = {}
        self.safe_contents: Contents = {}
        self.held: dict[int, int] = {}
        """Open files: the number of one that is open is not given to another."""

    def __enter__(self) -> "Crashes":
        names, contents = self._look()
        self.safe_names, self.safe_contents = names, contents
        for call in CALLS:
            self.monkeypatch.setattr(os, call, self._recorded(call, getattr(os, call)))
        return self

    def __exit__(self, *error: object) -> None:
        self._note()
        self.monkeypatch.undo()
        for descriptor in self.held.values():
            os.close(descriptor)

    def promise(self, what: Any) -> None:
        """Set what a crash from now on must not undo."""
        self._note()
        self.promised = what

    def states(self) -> Iterator[tuple[Tree, Any]]:
        """Yield every distinct state that a crash may leave, with what was promised before it."""
        seen = set()
        for moment in self.moments:
            for tree in _trees(moment, self.root.stat().st_ino):
                key = (tuple(sorted(tree.items(), key=str)), repr(moment.promise))
                if key not in seen:
                    seen.add(key)
                    yield tree, moment.promise

    def _recorded(self, call: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*arguments: Any, **more: Any) -> Any:
            self._note()
            found = real(*arguments, **more)
            if call == "fsync":
                self._waited_for(arguments[0])
            return found

        return recorded

    def _waited_for(self, descriptor: Any) -> None:
        facts = os.fstat(descriptor)
        names, contents = self._look()
        if stat.S_ISDIR(facts.st_mode):
            self.safe_names = {**self.safe_names, facts.st_ino: names.get(facts.st_ino, {})}
        elif facts.st_ino in contents:
            self.safe_contents = {**self.safe_contents, facts.st_ino: contents[facts.st_ino]}

    def _note(self) -> None:
        self.moments.append(Moment(*self._look(), self.safe_names, self.safe_contents, self.promised))

    def _look(self) -> tuple[Names, Contents]:
        names: Names = {}
        contents: Contents = {}

        def look(folder: Path) -> None:
            mine = names.setdefault(folder.stat().st_ino, {})
            for entry in os.scandir(folder):
                number = entry.inode()
                mine[entry.name] = number
                if number not in self.held:
                    self.held[number] = os.open(entry.path, os.O_RDONLY)
                if entry.is_dir():
                    look(Path(entry.path))
                else:
                    contents[number] = Path(entry.path).read_bytes()

        look(self.root)
        return names, contents


def _trees(moment: Moment, root: int) -> Iterator[Tree]:
    zeros, halves = dict(moment.safe_contents), dict(moment.safe_contents)
    for number, content in moment.contents.items():
        safe = moment.safe_contents.get(number, b"")
        grown = content[len(safe) :] if content.startswith(safe) else content
        kept = safe if content.startswith(safe) else b""
        zeros[number] = kept + bytes(len(grown))
        halves[number] = kept + grown[: len(grown) // 2]
    everything = {**moment.safe_contents, **moment.contents}  # also of files that have been removed or replaced
    for names in (moment.names, moment.safe_names):
        for contents in (everything, moment.safe_contents, zeros, halves):
            tree: Tree = {}
            _grow(tree, "", root, names, contents, {**moment.names, **moment.safe_names})
            yield tree


def _grow(tree: Tree, path: str, folder: int, names: Names, contents: Contents, folders: Names) -> None:
    for name, number in names.get(folder, {}).items():
        if number in folders:
            tree[f"{path}{name}"] = None
            _grow(tree, f"{path}{name}/", number, names, contents, folders)
        else:
            tree[f"{path}{name}"] = contents.get(number, b"")


def rebuild(tree: Tree, folder: Path) -> None:
    """Replace the content of a folder with a state."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path, content in sorted(tree.items()):
        if content is None:
            (folder / path).mkdir(exist_ok=True)
        else:
            (folder / path).write_bytes(content)
