"""fedrema methods."""

import dataclasses
import inspect
import textwrap
from typing import TYPE_CHECKING, cast

from fedrema.cli.arguments import as_arguments, parse_arguments, positional
from fedrema.cli.option_help import text_width

if TYPE_CHECKING:
    from fedrema.base.terminal import Console
    from fedrema.config.presets import Values
    from fedrema.core import Method
    from fedrema.tasks import TaskName


@dataclasses.dataclass(frozen=True)
class Methods:
    """List the methods with their settings and papers."""

    name: str | None = positional(None)
    """Describe only this method, in full; your own as module:Class."""
    paper: bool = False
    """List the names that --paper accepts, with their settings."""


def methods(arguments: list[str]) -> int:
    """Print the methods, one of them, or the paper's presets."""
    args = parse_arguments(Methods, arguments, "fedrema methods")
    from fedrema.base.terminal import Console
    from fedrema.methods import find_method, registry

    console = Console()
    if args.paper:
        _print_presets(console)
        return 0
    chosen = [find_method(args.name)] if args.name else list(registry().values())
    for kind in chosen:
        _print_method(console, kind, in_full=args.name is not None)
    if not args.name:
        console.print(
            "fedrema methods NAME describes one method in full; fedrema run NAME --help-all lists all its options."
        )
    return 0


def _print_presets(console: "Console") -> None:
    from rich.text import Text

    from fedrema.config.presets import PRESETS

    for name, preset in PRESETS.items():
        console.print(Text(name, "bold"))
        for method, values in {"all methods": preset.common, **preset.own}.items():
            if values:
                console.print(Text(_listed(method, values)))


def _listed(method: str, values: "Values") -> str:
    """Return settings as options, wrapped between them."""
    options = ["\xa0".join(as_arguments({name: value})) for name, value in values.items()]
    lines = textwrap.wrap(f"{method}: {' '.join(options)}", text_width(), initial_indent="  ", subsequent_indent="    ")
    return "\n".join(lines).replace("\xa0", " ")


def supported_tasks(kind: type["Method"]) -> str:
    """Return which tasks a method supports with its default settings: all, classes, or their names."""
    from fedrema.tasks import CLASSIFICATION, TASKS, Task

    if _required(kind):
        return "depends on the settings"
    method = kind()
    found = [name for name in TASKS if method.supports(Task(cast("TaskName", name), 2))]
    if len(found) == len(TASKS):
        return "all"
    return "classes" if set(found) == CLASSIFICATION else ", ".join(found) or "none"


def secure_coverage(kind: type["Method"]) -> str:
    """Return what --secure-aggregation covers with a method's default settings."""
    from fedrema.errors import FedremaError
    from fedrema.runs.secure_coverage import dummy_coverage

    if _required(kind):
        return "depends on the settings"
    try:
        coverage, net = dummy_coverage(kind())
    except FedremaError as error:  # a user's method may need other data than the dummy samples
        return f"unknown: {error}"
    return coverage.described(net)


def _required(kind: type["Method"]) -> list[str]:
    """Return the settings without a default: there is no method with default settings."""
    # Both are MISSING.
    return [field.name for field in dataclasses.fields(kind) if field.default is field.default_factory]


def _print_method(console: "Console", kind: type["Method"], in_full: bool) -> None:
    from rich.table import Column, Table
    from rich.text import Text

    from fedrema.base.options import field_documentation, valid_choices
    from fedrema.methods import registry

    paragraphs = inspect.cleandoc(kind.__doc__ or "").split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in (paragraphs if in_full else paragraphs[:1]))
    own = f"{kind.__module__}:{kind.__qualname__}"
    called = kind.name if registry().get(kind.name) is kind else own
    console.print(Text.assemble((kind.title, "bold"), f"  (fedrema run {called})"), highlight=False)
    console.print(text, highlight=False)
    console.print(kind.paper, style="dim", highlight=False)
    console.print(f"Tasks: {supported_tasks(kind)}", style="dim", highlight=False)
    console.print(f"Secure aggregation: {secure_coverage(kind)}", style="dim", highlight=False)
    settings = field_documentation(kind)
    if settings:
        table = Table(Column("setting", no_wrap=True), "default", "meaning", box=None, padding=(0, 2, 0, 0))
        for name, (default, meaning) in settings.items():
            shown = "required" if default is dataclasses.MISSING else str(default)
            table.add_row(*map(Text, (f"--{name}", shown, meaning + valid_choices(kind, name))))
        console.print(table)
    console.print()
