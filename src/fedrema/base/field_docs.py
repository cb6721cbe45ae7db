"""What a settings class says about its fields: the same words for help, tables and tests."""

import ast
import dataclasses
import inspect
import itertools
import textwrap
from typing import Any, Literal, get_args, get_origin, get_type_hints


def field_documentation(kind: type[Any]) -> dict[str, tuple[Any, str]]:
    """Return for each setting of a dataclass its name on the command line, its default and its docstring."""
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
    """Return a sentence that lists what a setting with named choices can be; empty for any other."""
    hint = get_type_hints(kind)[name.replace("-", "_")]
    return f" One of {', '.join(get_args(hint))}." if get_origin(hint) is Literal else ""


def _docstrings(kind: type[Any]) -> dict[str, str]:
    # Python forgets the strings below fields; the source still has them.
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    body = next(node for node in tree.body if isinstance(node, ast.ClassDef)).body
    found = {}
    for field, text in itertools.pairwise(body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(meaning))):
                found[name] = " ".join(meaning.split())
    return found
