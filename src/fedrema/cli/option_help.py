"""The options of settings classes, and the help that lists them: for `fedrema run METHOD` the essential or all."""

import argparse
import dataclasses
import functools
import inspect
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from fedrema.base.options import field_documentation
from fedrema.config.values import field_types

ESSENTIAL = ("dataset", "federation", "rounds", "out", "seed", "device")
TRAINING = ("clients", "epochs", "batch", "lr", "net", "seeds")
TITLES = {
    "method": "Method options",
    "data": "Data options",
    "network": "Network options",
    "local": "Local training options",
    "simulation": "Simulation options",
    "output": "Output options",
}
"""Titles of the groups of a run's settings."""
WIDEST = 120
"""Longer lines are hard to read."""
METAVARS = {int: "INT", float: "FLOAT", str: "TEXT", Path: "PATH"}


@dataclasses.dataclass(frozen=True)
class Option:
    """An option or a positional argument of a command."""

    name: str
    """As on the command line, without the leading dashes."""
    kind: Any
    """Type of its value."""
    meaning: str
    default: Any
    """MISSING where a value is required."""
    positional: bool = False

    @property
    def is_flag(self) -> bool:
        """Whether it has no value."""
        return self.kind is bool

    @property
    def is_list(self) -> bool:
        """Whether it accepts any number of values."""
        return get_origin(self.kind) is tuple

    @property
    def metavar(self) -> str:
        """The placeholder of its value."""
        if self.positional:
            return self.name.upper().removesuffix("S") if self.is_list else self.name.upper()
        if get_origin(self.kind) is Literal:
            return f"{{{','.join(map(str, get_args(self.kind)))}}}"
        return METAVARS.get(get_args(self.kind)[0] if self.is_list else self.kind, "VALUE")

    @property
    def shown(self) -> str:
        """The name by which messages refer to it."""
        return self.metavar if self.positional else f"--{self.name}"

    def help(self) -> str:
        """Return its explanation with the default."""
        if self.default is False or self.default in (None, (), "", dataclasses.MISSING):
            return self.meaning
        default = "on" if self.default is True else " ".join(self.default) if self.is_list else self.default
        return f"{self.meaning} (default: {default})"


@dataclasses.dataclass(frozen=True)
class Section:
    """A group of options in a help text."""

    title: str
    about: str
    options: Sequence[Option]


def options_of(kind: type[Any], defaults: Mapping[str, Any] | None = None) -> list[Option]:
    """Return the options of a settings class, without those of settings classes inside it.

    `defaults`, by option name, replace those of the class.
    """
    types, documented = field_types(kind), field_documentation(kind)
    found = []
    for field in dataclasses.fields(kind):
        if not is_settings_class(types[field.name]):
            name = field.name.replace("_", "-")
            default = (defaults or {}).get(name, field.default)
            meaning = documented[name][1]
            found.append(Option(name, types[field.name], meaning, default, field.metadata.get("positional", False)))
    return found


def is_settings_class(kind: Any) -> bool:
    """Return whether a field's type is a settings class, whose fields are options themselves."""
    return dataclasses.is_dataclass(kind)


def sections_of(kind: type[Any], defaults: Mapping[str, Any] | None = None) -> list[Section]:
    """Return the options of a command: its own, then those of each settings class inside it."""
    types = field_types(kind)
    own = options_of(kind, defaults)
    found = [
        Section("Arguments", "", [option for option in own if option.positional]),
        Section("Options", "", [option for option in own if not option.positional]),
    ]
    for name, each in types.items():
        if is_settings_class(each):
            title = TITLES.get(name, f"{name.replace('_', ' ').capitalize()} options")
            found.append(Section(title, _first_paragraph(each), options_of(each, defaults)))
    return found


def run_sections(classes: Mapping[str, type[Any]], defaults: Mapping[str, Any], everything: bool) -> list[Section]:
    """Return the options of a run, all of them or those that are used most; `classes` by their names in `Settings`."""
    options = {name: options_of(kind, defaults) for name, kind in classes.items()}
    if everything:
        return [Section(TITLES[name], _first_paragraph(classes[name]), found) for name, found in options.items()]
    named = {option.name: option for group, found in options.items() if group != "method" for option in found}
    return [
        Section("Essential options", "", [named[name] for name in ESSENTIAL]),
        Section(TITLES["method"], _first_paragraph(classes["method"]), options["method"]),
        Section(
            "Training options",
            "The settings that are changed most often.",
            [named[name] for name in TRAINING],
        ),
    ]


def _first_paragraph(kind: type[Any]) -> str:
    return " ".join(inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0].split())


def distinct(options: Iterable[Option]) -> Iterator[Option]:
    """Yield each option once; one that several methods declare with different types is read as text."""
    by_name: dict[str, list[Option]] = {}
    for option in options:
        by_name.setdefault(option.name, []).append(option)
    for same in by_name.values():
        alike = all(option.kind == same[0].kind for option in same)
        yield same[0] if alike else dataclasses.replace(same[0], kind=str)


def text_width() -> int:
    """Return the width of help texts."""
    return min(shutil.get_terminal_size().columns, WIDEST) - 2


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Wraps the text of options at spaces only: not inside --data-seed."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def help_parser(prog: str, description: str, sections: Sequence[Section]) -> argparse.ArgumentParser:
    """Return a parser without arguments that formats help for the width of the terminal."""
    width = text_width()
    positional = [_in_usage(option) for section in sections for option in section.options if option.positional]
    return argparse.ArgumentParser(
        prog=prog,
        usage=" ".join([prog, "[-h]", *positional, "[OPTIONS]"]),
        description=wrapped(description, width),
        formatter_class=functools.partial(_Formatter, width=width),
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
    )


def _in_usage(option: Option) -> str:
    shown = f"{option.metavar} [{option.metavar} ...]" if option.is_list else option.metavar
    return shown if option.default is dataclasses.MISSING else f"[{shown}]"


def wrapped(text: str, width: int) -> str:
    """Return paragraphs wrapped to a width, at spaces only."""
    parts = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(textwrap.fill(" ".join(part.split()), width, break_on_hyphens=False) for part in parts)
