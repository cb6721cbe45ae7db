"""Argument lists as settings: every field of a dataclass is an option, its docstring the help."""

import argparse
import dataclasses
import difflib
import functools
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, get_args

from fedrema.cli.option_help import (
    Option,
    Section,
    distinct,
    help_parser,
    is_settings_class,
    options_of,
    run_sections,
    sections_of,
    text_width,
    wrapped,
)
from fedrema.config.values import WrongValue, convert, field_types, listed
from fedrema.errors import BadInput, describe

if TYPE_CHECKING:
    from fedrema.config.presets import Values
    from fedrema.config.settings import Settings

T = TypeVar("T")
LONGEST_SHOWN = 60
"""Characters of a value that an error message quotes."""
HELP = ("-h", "--help", "--help-all")
SOURCES = ("dataset", "federation", "paper", "tuned", "config")
"""Options of a run that decide the defaults of others."""


def positional(default: Any = dataclasses.MISSING) -> Any:
    """Return a field of a dataclass that is a positional argument instead of an option."""
    return dataclasses.field(default=default, metadata={"positional": True})


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Return whether the arguments ask for help."""
    return not set(HELP).isdisjoint(arguments)


def parse_arguments(
    kind: type[T],
    arguments: Sequence[str],
    prog: str,
    description: str | None = None,
    defaults: "Values | None" = None,
) -> T:
    """Fill a command's dataclass from arguments; --help prints the help and exits.

    Parameters
    ----------
    kind
        The dataclass; it may hold settings classes, whose fields are options too.
    arguments
        What follows the command.
    prog
        The command, as messages name it.
    description
        Its description in the help; default: the docstring of the class.
    defaults
        Values by option name that replace the defaults of the fields.
    """
    sections = sections_of(kind, defaults)
    if asks_for_help(arguments):
        print_help(prog, description or inspect.getdoc(kind) or "", sections)
    options = [option for section in sections for option in section.options]
    return fill(kind, {**_underscored(defaults or {}), **parse_options(options, arguments, prog)}, prog)


def parse_settings(method: str, arguments: Sequence[str], prog: str = "fedrema run", plain: bool = False) -> "Settings":
    """Return the settings of a run from a method's name and arguments; --help and --help-all print help and exit."""
    return parse_several([method], arguments, prog, plain)[0]


def parse_several(
    methods: Sequence[str],
    arguments: Sequence[str],
    prog: str = "fedrema run",
    plain: bool = False,
    defaults: "Values | None" = None,
) -> list["Settings"]:
    """Return the settings of a run with each method; an option that only some of them have applies to those.

    `plain`: start from the defaults of the settings classes instead of those of the dataset. `defaults` take the place
    of options that are not given.
    """
    from fedrema.config.settings import make_settings

    prog = f"{prog} {','.join(methods)}"
    if len(methods) == 1 and asks_for_help(arguments):
        print_run_help(methods[0], arguments, prog)
    values = {**(defaults or {}), **parse_options(run_options(methods), arguments, prog, "--help-all")}
    return [make_settings(name, values, plain=plain, among=methods) for name in methods]


def run_options(methods: Sequence[str]) -> list[Option]:
    """Return the options of a run with any of these methods."""
    from fedrema.config.settings import settings_classes
    from fedrema.methods import find_method

    classes = [kind for name in methods for kind in settings_classes(find_method(name)).values()]
    return list(distinct(option for kind in dict.fromkeys(classes) for option in options_of(kind)))


def print_run_help(method: str, arguments: Sequence[str], prog: str) -> NoReturn:
    """Print the options of a run, essential or all, with the defaults that apply to the dataset named; then exit."""
    from fedrema.config.settings import default_values, settings_classes
    from fedrema.methods import find_method

    kind = find_method(method)
    classes = settings_classes(kind)
    everything = "--help-all" in arguments
    description = f"Train clients with {kind.title}: {kind.paper}."
    if not everything:
        number = sum(len(dataclasses.fields(group)) for group in classes.values())
        description += f"\n\n{prog} --help-all lists all {number} options."
    defaults = default_values(method, peek(arguments, *SOURCES))
    print_help(prog, description, run_sections(classes, defaults, everything))


def print_help(prog: str, description: str, sections: Sequence[Section]) -> NoReturn:
    """Print the help of a command and exit."""
    parser = help_parser(prog, description, sections)
    for section in sections:
        if section.options or section.about:
            about = wrapped(section.about, text_width() - 2) or None
            group = parser.add_argument_group(section.title, about)
            for option in section.options:
                _add(group, option)
    parser.print_help()
    parser.exit()


def parse_data(kind: type[T], arguments: Sequence[str], prog: str) -> T:
    """Fill a dataclass that holds `DataSettings`, starting from the defaults of the dataset."""
    named = peek(arguments, "federation", "dataset")
    # Imports PyTorch, which other commands do not need to read their options.
    from fedrema.config.presets import data_defaults

    defaults = {} if "federation" in named else data_defaults(named.get("dataset", "digits"))
    return parse_arguments(kind, arguments, prog, defaults=defaults)


def parse_options(options: Sequence[Option], arguments: Sequence[str], prog: str, lists: str = "--help") -> "Values":
    """Return the given values by field name; what is not valid becomes one sentence.

    `lists` is the argument that lists all options.
    """
    hint = f"{prog} {lists} lists the valid options"
    parser = help_parser(prog, "", ())
    for option in options:
        _add(parser, option)
    try:
        given, rest = parser.parse_known_intermixed_args(list(map(_dashed, arguments)))
    except argparse.ArgumentError as error:
        raise BadInput(f"{error.argument_name}: {error.message}; {hint}.") from None
    if rest:
        unknown = next((word.partition("=")[0] for word in rest if word.startswith("-")), None)
        if unknown is None:
            raise BadInput(f"{prog}: unexpected argument {describe(rest[0])}; {hint}.")
        close = difflib.get_close_matches(unknown, [f"--{option.name}" for option in options], n=2)
        raise BadInput(f"{prog} has no option {unknown}; {f'perhaps you meant {listed(close)}' if close else hint}.")
    return {name: value for name, value in vars(given).items() if value is not None and value != []}


def fill(kind: type[T], values: "Values", prog: str) -> T:
    """Return an instance of a dataclass, and of those inside it, from values by field name."""
    types = field_types(kind)
    for option in options_of(kind):
        if option.default is dataclasses.MISSING and option.name.replace("-", "_") not in values:
            what = re.split(r"[.:;]( |$)", option.meaning)[0]
            what = f"{what[:1].lower()}{what[1:]}"
            raise BadInput(f"{prog} needs {what if option.positional else f'{option.shown}: {what}'}.")
    found: dict[str, Any] = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]  # T is a dataclass
        if is_settings_class(types[field.name]):
            found[field.name] = fill(types[field.name], values, prog)
        elif field.name in values:
            value = values[field.name]
            found[field.name] = tuple(value) if isinstance(value, list) else value
    return kind(**found)


def peek(arguments: Sequence[str], *names: str) -> dict[str, str]:
    """Return the last values given to some options, as text, and ignore all other arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in names:
        parser.add_argument(f"--{name}", nargs="?", default=argparse.SUPPRESS)
    found = vars(parser.parse_known_args(list(map(_dashed, arguments)))[0])
    return {name: text for name, text in found.items() if text is not None}


def as_arguments(settings: "Values") -> list[str]:
    """Return settings as command-line arguments; None is left out."""
    arguments: list[str] = []
    for name, value in settings.items():
        option = name.replace("_", "-")
        if option == "method" or value is None:
            continue
        if isinstance(value, bool):
            arguments.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, (str, int, float, Path)):
            arguments += [f"--{option}", str(value)]
        else:
            raise BadInput(f"Setting {name!r} must be a number, a text or true/false, got {describe(value)}.")
    return arguments


def _add(parser: argparse._ActionsContainer, option: Option) -> None:
    """Add an option to a parser; where it is not given, nothing is stored."""
    text = option.help().replace("%", "%%")
    if option.positional:
        nargs = "*" if option.is_list else "?"
        parser.add_argument(
            option.name.replace("-", "_"), nargs=nargs, type=_reader(option), metavar=option.metavar, help=text
        )
    elif option.is_flag:
        paired = not option.name.startswith("no-")
        parser.add_argument(
            f"--{option.name}",
            action=argparse.BooleanOptionalAction if paired else "store_true",
            default=argparse.SUPPRESS,
            help=text,
        )
    else:
        parser.add_argument(
            f"--{option.name}",
            nargs="*" if option.is_list else None,
            type=_reader(option),
            metavar=option.metavar,
            default=argparse.SUPPRESS,
            help=text,
        )


def _reader(option: Option) -> Any:
    """Return the function that converts one text given to an option."""
    return functools.partial(_read, option, get_args(option.kind)[0] if option.is_list else option.kind)


def _read(option: Option, kind: Any, text: str) -> Any:
    try:
        return convert(text, kind)
    except WrongValue as valid:
        given = text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"
        raise BadInput(f"{option.shown} must be {valid}, got {given!r}.") from None


def _dashed(argument: str) -> str:
    """Write an option with dashes: --data_dir is accepted as well."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}"


def _underscored(values: "Values") -> "Values":
    return {name.replace("-", "_"): value for name, value in values.items()}
