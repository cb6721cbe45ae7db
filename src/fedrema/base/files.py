"""Atomic and durable files: complete or absent, even after a power failure; and what may be read or replaced."""

import errno
import itertools
import os
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fedrema.errors import BadInput

_SYSTEM_FOLDERS = (Path("/dev"), Path("/proc"))
"""Their entries belong to the operating system: renaming a file onto /dev/stdout would break it for all programs."""


@contextmanager
def atomic_file(path: Path, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path next to `path`; on success it is renamed to `path`, on failure it is removed.

    The file is on disk when the context ends; with `durable=False` it may be lost or empty after a power failure. A
    full disk, a missing permission and similar errors become a `BadInput` that names `path`. A device or a pipe is
    never replaced: what was written is copied into it.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a folder")
        if _is_special(path):
            with tempfile.TemporaryDirectory() as folder:
                temporary = Path(folder) / "content"
                temporary.touch()
                yield temporary
                _copy_into(path, temporary)
            return
        # Not tempfile, whose files ignore the user's umask.
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        make_folder(path.parent)
        temporary.touch(exist_ok=False)
        try:
            yield temporary
            if durable:  # before the rename: otherwise a power failure could leave an empty file under the final name
                sync(temporary)
            temporary.replace(path)
            if durable:
                sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise BadInput(f"cannot write {path}: {reason}; choose a writable folder with enough free space.") from error


def write_text(path: Path, text: str, durable: bool = True) -> None:
    """Write a text file atomically."""
    with atomic_file(path, durable) as temporary:
        temporary.write_text(text, encoding="utf-8")


def regular_file(path: Path) -> Path:
    """Return the path of a file that will be read; raise `OSError` for a pipe or a device, which may never end."""
    if not stat.S_ISREG(mode := path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is a folder" if stat.S_ISDIR(mode) else "it is not a regular file", str(path))
    return path


def _is_special(path: Path) -> bool:
    """Whether a path, or the target of a link, is a device, a pipe or another entry of the operating system."""
    if path.parent.resolve() in _SYSTEM_FOLDERS or Path("/proc") in path.parent.resolve().parents:
        return True
    with suppress(FileNotFoundError):
        return not stat.S_ISREG(path.stat().st_mode)
    return False


def _copy_into(path: Path, content: Path) -> None:
    """Copy a file into a device, a pipe or a stream of this process."""
    # Without O_CREAT: /dev holds no ordinary files. O_NONBLOCK: a pipe that nobody reads is an error, not a hang.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY)
    with os.fdopen(descriptor, "wb") as stream, content.open("rb") as source:
        opened = os.fstat(descriptor)
        if stat.S_ISBLK(opened.st_mode):
            raise OSError(errno.EINVAL, "it is a disk")
        os.set_blocking(descriptor, True)
        shutil.copyfileobj(source, _own_stream(opened) or stream)


def _own_stream(opened: os.stat_result) -> BinaryIO | None:
    """Return stdout or stderr if it is the open file: what is printed later then follows instead of overwriting it."""
    for mine in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            if os.path.samestat(opened, os.fstat(mine.fileno())):
                mine.flush()
                return mine.buffer
    return None


def make_folder(path: Path) -> None:
    """Create a folder and its parents durably."""
    missing = list(itertools.takewhile(lambda folder: not folder.exists(), (path, *path.parents)))
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


@contextmanager
def private_files() -> Iterator[None]:
    """Let only their owner access new files, whatever the umask; also those of processes that are started meanwhile."""
    umask = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(umask)


def make_private(folder: Path) -> None:
    """Take the rights of other users from a folder and everything in it, such as after it was copied."""
    if os.name == "nt":
        return
    for place, folders, files in os.walk(folder):
        for path in (Path(place), *(Path(place) / name for name in (*folders, *files))):
            with suppress(OSError):  # it was deleted meanwhile, or belongs to somebody else
                if not path.is_symlink() and (mode := path.stat().st_mode) & 0o077:
                    path.chmod(mode & 0o700)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on disk."""
    if path.is_dir() and os.name == "nt":  # Windows cannot open folders
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system does not support fsync for folders
            raise
    finally:
        os.close(descriptor)
