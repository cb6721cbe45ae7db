"""Files that are either whole or not there, also after a loss of power."""

import errno
import itertools
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedrema.errors import BadInput


@contextmanager
def written_whole(path: Path, durable: bool = True) -> Iterator[Path]:
    """Give a temporary path beside `path`; on success it becomes `path`, on any failure it is removed.

    When this returns, the file is on the disk; with `durable=False` it may be lost or empty after a loss of power.
    A full disk, a missing permission and the like become a `BadInput` that names `path`.
    """
    # Not tempfile: its files are for the owner alone, and these should follow the user's umask.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        make_folder(path.parent)
        temporary.touch(exist_ok=False)
        try:
            yield temporary
            if durable:  # before the rename: otherwise the name could survive a loss of power without the content
                sync(temporary)
            temporary.replace(path)
            if durable:
                sync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise BadInput(f"cannot write {path}: {reason}; choose a place that is writable and has room.") from error


def write_text(path: Path, text: str, durable: bool = True) -> None:
    """Write a text file, whole or not at all."""
    with written_whole(path, durable) as temporary:
        temporary.write_text(text, encoding="utf-8")


def make_folder(path: Path) -> None:
    """Make a folder and those above it; when this returns, they are on the disk."""
    missing = list(itertools.takewhile(lambda folder: not folder.exists(), (path, *path.parents)))
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on the disk."""
    if path.is_dir() and os.name == "nt":  # Windows cannot open folders
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system without fsync for folders
            raise
    finally:
        os.close(descriptor)
