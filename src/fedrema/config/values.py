"""Conversion of a setting's value, as text, TOML, JSON or Python hold it, to the type of its field."""

import math
import numbers
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


class WrongValue(ValueError):
    """The value does not fit the type; the message lists what is valid."""


TOO_LARGE = 10**15
"""Whole numbers from here on are refused: their products would exceed 64 bits, and no setting needs them."""
SMALLEST, LARGEST = 1e-30, 1e30
"""Numbers outside overflow float32, in which models are trained, or do so when they are divided by."""

_FIELD_TYPES: weakref.WeakKeyDictionary[type[Any], Mapping[str, Any]] = weakref.WeakKeyDictionary()


def field_types(kind: type[Any]) -> Mapping[str, Any]:
    """Return the types of a settings class's fields, by name; of `X | None` the X."""
    if kind not in _FIELD_TYPES:  # evaluating annotations is slow, and every cell of a grid needs them
        _FIELD_TYPES[kind] = {name: _required(hint) for name, hint in get_type_hints(kind).items()}
    return _FIELD_TYPES[kind]


def _required(hint: Any) -> Any:
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    kinds = [each for each in get_args(hint) if each is not type(None)]
    return kinds[0] if len(kinds) == 1 else hint


def convert(value: Any, kind: Any) -> Any:
    """Return a value as bool, int, float, str, Path, one of a Literal, or a tuple of these.

    Numbers and booleans may be given as text.

    Raises
    ------
    WrongValue
        With the valid values: "a whole number", "auto, cpu or cuda".
    """
    if get_origin(kind) is Literal:
        return _choice(value, get_args(kind))
    if get_origin(kind) is tuple:
        return _several(value, get_args(kind)[0])
    if (converter := CONVERTERS.get(kind)) is not None:
        return converter(value)
    if isinstance(kind, type) and isinstance(value, kind):
        return value
    raise WrongValue(f"of type {kind.__name__ if isinstance(kind, type) else kind}")


def _choice(value: Any, choices: Sequence[Any]) -> Any:
    for choice in choices:
        if value == choice or (isinstance(value, str) and value == str(choice)):
            return choice
    raise WrongValue(listed(choices))


def _several(value: Any, kind: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise WrongValue("a list")
    return tuple(convert(each, kind) for each in value)


def _boolean(value: Any) -> bool:
    if isinstance(value, str) and value in ("true", "false"):
        return value == "true"
    if not isinstance(value, bool):
        raise WrongValue("true or false")
    return value


def _whole(value: Any) -> int:
    if isinstance(value, str) or (isinstance(value, numbers.Integral) and not isinstance(value, bool)):
        try:
            number = int(value)
        except ValueError:
            raise WrongValue("a whole number") from None
        if abs(number) >= TOO_LARGE:
            raise WrongValue("a whole number of at most 15 digits")
        return number
    raise WrongValue("a whole number")


def _number(value: Any) -> float:
    if isinstance(value, str) or (isinstance(value, numbers.Real) and not isinstance(value, bool)):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            raise WrongValue("a number") from None
        # Infinity and NaN are refused by the settings themselves, which say what is valid.
        if math.isfinite(number) and number != 0 and not SMALLEST <= abs(number) <= LARGEST:
            raise WrongValue(f"0 or a number of size {SMALLEST:g} to {LARGEST:g}")
        return number
    raise WrongValue("a number")


def _text(value: Any) -> str:
    if isinstance(value, str | Path) or (isinstance(value, int) and not isinstance(value, bool)):
        return str(value)
    raise WrongValue("text")


def _path(value: Any) -> Path:
    if isinstance(value, str | Path) and str(value) and "\0" not in str(value):
        return Path(value)
    raise WrongValue("a path")


CONVERTERS: dict[type[Any], Callable[[Any], Any]] = {
    bool: _boolean, int: _whole, float: _number, str: _text, Path: _path
}  # fmt: skip


def listed(choices: Sequence[Any]) -> str:
    """Return choices for a sentence: "auto, cpu or cuda"."""
    *first, last = map(str, choices)
    return f"{', '.join(first)} or {last}" if first else last
