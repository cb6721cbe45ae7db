"""One file per method; every `Method` in this folder is registered automatically."""

import importlib
import pkgutil
from functools import cache

from fedrema.base.user_code import load_object
from fedrema.core import Method
from fedrema.core.checks import check_method
from fedrema.errors import BadInput, unknown


@cache
def registry() -> dict[str, type[Method]]:
    """Return all built-in methods by their name on the command line."""
    found: dict[str, type[Method]] = {}
    for module_name in sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg):
        module = importlib.import_module(f"{__name__}.{module_name}")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, Method) and value.__module__ == module.__name__:
                found[value.name] = value
    return found


def find_method(name: str) -> type[Method]:
    """Return a built-in method by name, or a user's method by `module:Class`."""
    if ":" in name:
        found = load_object(name, "method")
        if not (isinstance(found, type) and issubclass(found, Method)):
            raise BadInput(f"Method {name!r} must be a class derived from fedrema.Method, got {type(found).__name__}.")
        return check_method(found)
    if name not in registry():
        raise unknown("Method", name, registry(), ", or your own as module:Class")
    return registry()[name]
