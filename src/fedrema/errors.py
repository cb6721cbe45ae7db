"""Errors with a one-sentence message for the user, and checks of numeric settings."""

import difflib
import math
from collections.abc import Iterable
from pathlib import Path


class FedremaError(Exception):
    """An error with a one-sentence message; the command line prints it and exits with status 2."""


class BadInput(FedremaError):
    """A setting, a file or a request is invalid; the message names it, its value, and what is valid."""


class Diverged(FedremaError):
    """Training produced a number that is not finite; the message names the round and the client."""


def describe(value: object) -> str:
    """Return a value for an error message: numbers and short text as they are, anything else by type and shape.

    A frame, an array or a list may hold data, which must not appear in messages and logs.
    """
    if value is None or isinstance(value, bool | float | complex | Path):
        return repr(value)
    if isinstance(value, int):
        return repr(value) if abs(value) < 10**60 else "a whole number of more than 60 digits"
    if isinstance(value, str):
        return repr(value if len(value) <= 200 else f"{value[:200]}…")
    shape = getattr(value, "shape", None)
    size = f" of shape {tuple(shape)}" if isinstance(shape, tuple) else ""
    if not size and isinstance(value, list | tuple | dict | set):
        size = f" of length {len(value)}"
    return f"a value of type {type(value).__name__}{size}"


def unknown(what: str, name: str, valid: Iterable[str], more: str = "") -> BadInput:
    """Return the error for an unknown name, which suggests the most similar valid one; `more` ends the list."""
    names = list(valid)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    hint = f"perhaps you meant {close[0]}; valid" if close else "valid"
    return BadInput(f"{what} {describe(name)} is unknown; {hint} are {', '.join(names)}{more}.")


def raised_by_user(error: BaseException) -> str:
    """Return an error that a user's code raised as text for the end of a sentence."""
    if isinstance(error, SystemExit):
        return f"it called sys.exit({'' if error.code is None else repr(error.code)}); raise an exception instead"
    message = (str(error).splitlines() or [""])[0].rstrip(".")
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


MOST = 10**7
"""Larger counts (rounds, epochs, clients) are mistakes: the run would not end."""


def at_least(least: float, settings: object, *names: str, most: int | None = MOST) -> None:
    """Raise `BadInput` unless the settings are finite numbers of at least `least`; whole numbers at most `most`."""
    for name in names:
        value = getattr(settings, name)
        if most is not None and isinstance(value, int) and value > most:
            raise BadInput(f"--{name.replace('_', '-')} must be from {least} to {most}, got {value}.")
        if not least <= value < math.inf:
            bound = "0 or more" if least == 0 else f"at least {least}"
            raise BadInput(f"--{name.replace('_', '-')} must be {bound}, got {value}.")


def above_zero(settings: object, *names: str) -> None:
    """Raise `BadInput` unless the settings are finite numbers above 0."""
    for name in names:
        value = getattr(settings, name)
        if not 0 < value < math.inf:
            raise BadInput(f"--{name.replace('_', '-')} must be above 0, got {value}.")
