"""Load users' code, given as `module:name`, and describe its errors."""

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

_GENERATED = ("<frozen", "<string>")
"""File names of Python's import system and of functions that dataclasses generate."""


@functools.cache
def installed_folders() -> tuple[Path, ...]:
    """Return the folders of installed packages and of Python itself."""
    named = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    return tuple({Path(folder) for folder in (*named, *site.getsitepackages(), site.getusersitepackages())})


def load_object(reference: str, what: str) -> Any:
    """Return the object that `module:name` refers to; modules are also searched in the working directory."""
    module_name, _, attribute = reference.partition(":")
    if not module_name or not attribute:
        raise BadInput(f"The {what} {reference!r} must have the form module:name.")
    with working_folder_importable():
        try:
            module = importlib.import_module(module_name)
        except (
            Exception,
            SystemExit,
        ) as error:  # reported in one sentence
            raise BadInput(f"The {what} {reference!r} cannot be loaded: {raised_at(error)}.") from error
    if not hasattr(module, attribute):
        raise BadInput(f"The {what} {reference!r} cannot be loaded: {module_name} has no {attribute!r}.")
    return getattr(module, attribute)


def raised_at(error: BaseException) -> str:
    """Return an error of a user's code as text, with the line of that code."""
    sentence = raised_by_user(error)
    if isinstance(error, SyntaxError):  # its message includes file and line
        return sentence
    line = user_code_line(error)
    if line is None:
        return sentence
    file = Path(line[0])
    name = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file.name
    return f"{sentence} ({name}, line {line[1]})"


def user_code_line(error: BaseException, user_files: Collection[str] = ()) -> tuple[str, int] | None:
    """Return file and line of the innermost call in the user's code; `user_files` count as such even if installed."""
    libraries = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], *installed_folders()))
    found = None
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename in user_files or not frame.filename.startswith((*_GENERATED, *libraries)):
            found = frame.filename, frame.lineno or 0
    return found


@contextmanager
def working_folder_importable() -> Iterator[None]:
    """Make modules in the working directory importable, which a console command, unlike `python -m`, does not do."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    importlib.invalidate_caches()  # a module may just have been written
    try:
        yield
    finally:
        sys.path.remove(folder)
