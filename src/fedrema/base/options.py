"""Fields of settings classes: their purpose, and their documentation for help, tables and tests."""

import ast
import dataclasses
import inspect
import itertools
import linecache
import textwrap
from enum import StrEnum
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


class Purpose(StrEnum):
    """The purpose of a setting, which determines whether results depend on it."""

    RESULT = "result"
    """Defines the result; the default."""
    SEED = "seed"
    """The training seed: runs that differ only in it are replicates."""
    RECORD = "record"
    """What is recorded in addition to the metrics."""
    ROUNDS = "rounds"
    """The number of rounds; increasing it continues the same run."""
    SOURCE = "source"
    """The source of own data; its content defines the result."""
    COMPUTATION = "computation"
    """How the result is computed: device, backend, threads, memory."""
    PLACE = "place"
    """A file or folder on this machine."""
    OUTPUT = "output"
    """What is written and displayed."""
    OPERATION = "operation"
    """How the server of a deployment operates: it can change while the federation is running."""


def option(
    default: T,
    purpose: Purpose = Purpose.RESULT,
    simulated: bool = False,
    partitions: bool = False,
    added: bool = False,
    joint: bool = False,
) -> T:
    """Return a field of a settings class.

    Parameters
    ----------
    default
        Its default value.
    purpose
        What it is for.
    simulated
        Whether it has no effect in a deployment with real clients.
    partitions
        Whether it has no effect with own data, because it defines how a dataset is partitioned.
    added
        Whether it was added after results had been published. With its default value it is then no part of identities
        and keys, so that earlier results stay valid.
    joint
        Whether runs of a method that differ in it can be trained jointly: its loss and predictions only compute with
        this number, which is then a tensor, or do not use it.
    """
    metadata = {"purpose": purpose, "simulated": simulated, "partitions": partitions, "added": added, "joint": joint}
    return dataclasses.field(default=default, metadata=metadata)


def purpose_of(field: "dataclasses.Field[Any]") -> Purpose:
    """Return the purpose of a field of a settings class."""
    return Purpose(field.metadata.get("purpose", Purpose.RESULT))


def field_documentation(kind: type[Any]) -> dict[str, tuple[Any, str]]:
    """Return for each field of a dataclass its name on the command line, its default and its docstring."""
    if not dataclasses.is_dataclass(kind):
        raise TypeError(f"{kind.__name__} is not a dataclass.")
    documented: dict[str, str] = {}
    for owner in reversed(kind.__mro__):
        if dataclasses.is_dataclass(owner):
            documented |= _docstrings(owner)
    return {
        field.name.replace("_", "-"): (field.default, documented.get(field.name, ""))
        for field in dataclasses.fields(kind)
    }


def valid_choices(kind: type[Any], name: str) -> str:
    """Return a sentence that lists the valid values of a `Literal` setting; empty for other types."""
    hint = get_type_hints(kind)[name.replace("-", "_")]
    return f" One of {', '.join(get_args(hint))}." if get_origin(hint) is Literal else ""


def class_source(kind: type[Any]) -> str | None:
    """Return the source of a class, also of one in a notebook; None where it is unknown."""
    try:
        return textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):
        # A class in a notebook has no file, but the cell that its functions are from is known.
        codes = [each.__code__ for each in vars(kind).values() if inspect.isfunction(each)]
        for file in dict.fromkeys(code.co_filename for code in codes):
            text = "".join(linecache.getlines(file))
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef) and node.name == kind.__name__:
                    return ast.get_source_segment(text, node)
        return None


def _docstrings(kind: type[Any]) -> dict[str, str]:
    # Python discards the docstrings of fields; they are read from the source.
    source = class_source(kind)
    if source is None:
        return {}
    tree = ast.parse(source)
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef)).body
    found = {}
    for field, text in itertools.pairwise(body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(meaning))):
                found[name] = " ".join(meaning.split())
    return found
