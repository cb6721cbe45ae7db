"""Checks that the Python reference covers every public name of fedrema, and that each has a docstring."""

import dataclasses
import inspect
from collections.abc import Iterator
from typing import Any

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

import fedrema
from fedrema.base.options import field_documentation

log = logging.getLogger(__name__)


def undocumented() -> Iterator[str]:
    """Yield the public names, and the public members of public classes, without a docstring."""
    for name in fedrema.__all__:
        value = getattr(fedrema, name)
        if inspect.isclass(value):
            if not value.__dict__.get("__doc__"):
                yield name
            yield from (f"{name}.{member}" for member in _undocumented_members(value))
        elif not inspect.getdoc(value):
            yield name


def _undocumented_members(kind: type[Any]) -> Iterator[str]:
    fields = field_documentation(kind) if dataclasses.is_dataclass(kind) else {}
    for member, value in vars(kind).items():
        if member.startswith("_") or member.replace("_", "-") in fields:
            continue
        if (callable(value) or isinstance(value, (property, classmethod, staticmethod))) and not inspect.getdoc(value):
            yield member
    yield from (name.replace("-", "_") for name, (_, meaning) in fields.items() if not meaning)


def check(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn, which fails a strict build, about names that the reference does not have or that have no docstring."""
    shown = env.domaindata["py"]["objects"]
    for name in fedrema.__all__:
        if f"fedrema.{name}" not in shown:
            log.warning("fedrema.%s is public, but no page in docs/reference documents it", name)
    for name in undocumented():
        log.warning("fedrema.%s is public, but has no docstring", name)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the check."""
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
