"""What users bring along as `module:name`."""

import functools
import importlib
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedrema.errors import BadInput, raised_by_user

_MADE = ("<frozen", "<string>")
"""Files of Python's own import system, and of functions that dataclasses make."""


@functools.cache
def installation() -> tuple[Path, ...]:
    """Return the folders of installed packages and of Python itself."""
    named = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple({Path(folder) for folder in (*named, *site.getsitepackages(), site.getusersitepackages())})


def load_object(reference: str, what: str) -> Any:
    """Return the object that `module:name` points to; modules are looked for in the current folder too."""
    module_name, _, attribute = reference.partition(":")
    if not module_name or not attribute:
        raise BadInput(f"The {what} {reference!r} must have the form module:name.")
    with working_folder_importable():
        try:
            module = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:  # whatever a user's module raises is theirs to read, in one sentence
            raise BadInput(f"The {what} {reference!r} cannot be loaded: {raised_at(error)}.") from error
    if not hasattr(module, attribute):
        raise BadInput(f"The {what} {reference!r} cannot be loaded: {module_name} has no {attribute!r}.")
    return getattr(module, attribute)


def raised_at(error: BaseException) -> str:
    """Return what a user's code raised, with the line of that code, whatever library the line called."""
    sentence = raised_by_user(error)
    if isinstance(error, SyntaxError):  # names its file and line itself
        return sentence
    place = users_line(error)
    if place is None:
        return sentence
    file = Path(place[0])
    name = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file.name
    return f"{sentence} ({name}, line {place[1]})"


def users_line(error: BaseException, theirs: Collection[str] = ()) -> tuple[str, int] | None:
    """Return file and line of the innermost call in users' code; files in `theirs` are users' even if installed."""
    libraries = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], *installation()))
    found = None
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename in theirs or not frame.filename.startswith((*_MADE, *libraries)):
            found = frame.filename, frame.lineno or 0
    return found


@contextmanager
def working_folder_importable() -> Iterator[None]:
    """Look for modules in the working folder, which a console command, unlike `python -m`, does not do."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    importlib.invalidate_caches()  # a module may have been written a moment ago
    try:
        yield
    finally:
        sys.path.remove(folder)
