"""What goes wrong for a user: always one sentence."""

import math


class FedremaError(Exception):
    """One sentence for the person at the keyboard; the command line prints it and exits with 2."""


class BadInput(FedremaError):
    """A setting, a file or a request that cannot be honoured: names it, its value, and what is valid."""


class Diverged(FedremaError):
    """Training produced a number that is not finite: names the round and the client."""


def raised_by_user(error: BaseException) -> str:
    """Return what a user's code raised, for the end of a sentence."""
    if isinstance(error, SystemExit):
        return f"it called sys.exit({'' if error.code is None else repr(error.code)}); raise an exception instead"
    said = (str(error).splitlines() or [""])[0].rstrip(".")
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def at_least(least: float, settings: object, *names: str) -> None:
    """Refuse settings that are less than a bound, or not finite numbers."""
    for name in names:
        value = getattr(settings, name)
        if not least <= value < math.inf:
            bound = "0 or more" if least == 0 else f"at least {least}"
            raise BadInput(f"--{name.replace('_', '-')} must be {bound}, got {value}.")


def above_zero(settings: object, *names: str) -> None:
    """Refuse settings that are not finite numbers above 0."""
    for name in names:
        value = getattr(settings, name)
        if not 0 < value < math.inf:
            raise BadInput(f"--{name.replace('_', '-')} must be above 0, got {value}.")
