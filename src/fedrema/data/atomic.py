"""Files that are either whole or not there."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedrema.errors import BadInput


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path`; on success it becomes `path`, on any failure it is removed.

    A full disk, a missing permission and the like become a `BadInput` that names `path`.
    """
    # Not tempfile: its files are for the owner alone, and these should follow the user's umask.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch(exist_ok=False)
        try:
            yield temporary
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise BadInput(f"cannot write {path}: {reason}; choose a place that is writable and has room.") from error


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with written_whole(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
