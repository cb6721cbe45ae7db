"""The help of `fedrema run METHOD`: the essential options, or all of them with --help-all."""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, get_type_hints

import tyro

from fedrema.base.options import field_documentation

ESSENTIAL = ("dataset", "federation", "rounds", "out", "seed", "device")
TRAINING = ("clients", "epochs", "batch", "lr", "net", "seeds")


@dataclasses.dataclass(frozen=True)
class Option:
    """An option as the help shows it."""

    name: str
    kind: Any
    meaning: str
    default: Any

    def field(self) -> tuple[str, Any, Any]:
        """Return a field of a dataclass that is only ever shown."""
        hint = "" if self.default is None else None  # what happens by default is told in words
        described = tyro.conf.arg(help=self.meaning, help_behavior_hint=hint)
        shown = Annotated[self.kind, described]  # type: ignore[name-defined]  # made while running
        return self.name, shown, dataclasses.field(default=self.default)


def options_of(kind: type[Any], chosen: Any) -> list[Option]:
    """Return the options of a settings class; `chosen` is an instance whose values are shown as defaults, or None."""
    hints, told = get_type_hints(kind, include_extras=True), field_documentation(kind)
    return [
        Option(
            field.name,
            hints[field.name],
            told[field.name.replace("_", "-")][1],
            field.default if chosen is None else getattr(chosen, field.name),
        )
        for field in dataclasses.fields(kind)
    ]


def help_groups(kinds: Mapping[str, type[Any]], chosen: Any, everything: bool) -> dict[str, tuple[str, list[Option]]]:
    """Return what the help shows: for each group of options what it is about, and the options.

    `kinds` are the settings classes by group, the method's among them.
    """
    options = {group: options_of(kind, getattr(chosen, group, None)) for group, kind in kinds.items()}
    about = {group: kind.__doc__ or "" for group, kind in kinds.items()}
    if everything:
        return {group: (about[group], found) for group, found in options.items()}
    named = {option.name: option for group, found in options.items() if group != "method" for option in found}
    return {
        "essential": ("The data, how long to train, and where.", [named[name] for name in ESSENTIAL]),
        "method": (inspect.cleandoc(about["method"]).partition("\n\n")[0], options["method"]),
        "training": ("What is changed most often.", [named[name] for name in TRAINING]),
    }


def print_help(groups: Mapping[str, tuple[str, Sequence[Option]]], prog: str, description: str, config: Any) -> None:
    """Print the help and exit."""
    shown = [
        (group, dataclasses.make_dataclass(group, [option.field() for option in options], namespace={"__doc__": about}))
        for group, (about, options) in groups.items()
        if options or group == "method"
    ]
    kind = dataclasses.make_dataclass("Help", shown)
    tyro.cli(kind, prog=prog, description=description, config=config, args=["--help"])
