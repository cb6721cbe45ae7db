"""What users bring along as `module:name`."""

import importlib
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedrema.errors import BadInput, raised_by_user

_LIBRARIES = (
    *(str(Path(folder)) for name, folder in sysconfig.get_paths().items() if name in ("stdlib", "purelib", "platlib")),
    str(Path(__file__).parent),
)
"""Where code lies that is not the user's."""


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
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(("<", *_LIBRARIES))]
    if not theirs:
        return sentence
    file = Path(theirs[-1].filename)
    name = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file.name
    return f"{sentence} ({name}, line {theirs[-1].lineno})"


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
