"""Typed reading of tables: the values of a TOML table, by name, become a dataclass that msgspec has validated."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from fedrema.errors import BadInput, describe

T = TypeVar("T")
KINDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false", type(None): "none"}


def read_table(kind: type[T], values: Mapping[str, object], where: str) -> T:
    """Return a dataclass with these values; names are written with - instead of _.

    `where` begins the sentence about a name or a value that is not valid.
    """
    assert dataclasses.is_dataclass(kind)
    fields = {field.name.replace("_", "-"): field for field in dataclasses.fields(kind)}
    if unknown := [name for name in values if name not in fields]:
        raise BadInput(f"{where}: {unknown[0]} is unknown; valid are {', '.join(fields)}.")
    required = [name for name, field in fields.items() if field.default is dataclasses.MISSING]
    if missing := [name for name in required if name not in values]:
        raise BadInput(f"{where}: {missing[0]} is missing; {', '.join(required)} must be given.")
    hints = get_type_hints(kind)
    converted = {fields[name].name: _converted(name, value, hints, where) for name, value in values.items()}
    try:
        return kind(**converted)
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from None


def _converted(name: str, value: object, hints: Mapping[str, Any], where: str) -> object:
    hint = hints[name.replace("-", "_")]
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError:
        expected = " or ".join(KINDS.get(one, str(one)) for one in _alternatives(hint))
        raise BadInput(f"{where}: {name} must be {expected}, got {describe(value)}.") from None


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
