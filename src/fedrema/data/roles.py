"""Which columns of a table are the target, the client, the split and the inputs."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from fedrema.data.checks import list_names
from fedrema.errors import BadInput, at_least
from fedrema.tasks import TASKS

ScaleName = Literal["federation", "site", "none"]
CategoriesName = Literal["onehot", "embed"]
TaskChoice = Literal["auto", "multiclass", "binary", "multilabel", "ordinal", "regression", "count"]

TARGET_NAMES = ("target", "label", "y", "class")
CLIENT_NAMES = ("client", "site")
SPLIT_NAME = "split"
LARGEST_IMAGE = 10_000


@dataclass(frozen=True)
class TableOptions:
    """How to read and preprocess a table; the fields have the names and meanings of the settings."""

    target: str | Sequence[str] | None = None
    client_column: str | None = None
    split_column: str | None = None
    columns: str | Sequence[str] | None = None
    scale: ScaleName = "federation"
    categories: CategoriesName = "onehot"
    image_size: int = 0
    task: TaskChoice = "auto"

    def __post_init__(self) -> None:
        """Validate the options that do not depend on the table."""
        for name, choices in (("scale", get_args(ScaleName)), ("categories", get_args(CategoriesName))):
            _check_choice(name, getattr(self, name), choices)
        _check_choice("task", self.task, ("auto", *TASKS))
        at_least(0, self, "image_size", most=LARGEST_IMAGE)

    def given(self) -> list[str]:
        """Return the names, as on the command line, of the options that differ from their defaults."""
        default = TableOptions()
        return [f"--{name.replace('_', '-')}" for name in vars(self) if getattr(self, name) != getattr(default, name)]

    def refuse(self, source: str, what: str, *allowed: str) -> None:
        """Raise `BadInput` if an option is given that has no meaning for a source, except the allowed ones."""
        for name in self.given():
            if name not in allowed:
                raise BadInput(f"{name} has no meaning for {source}, which holds {what}; leave it out.")


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise BadInput(f"--{name} {value} is unknown; valid are {', '.join(choices)}.")


@dataclass(frozen=True)
class Roles:
    """The columns of a table by their role."""

    targets: tuple[str, ...]
    client: str | None
    """None: the source has one part per client."""
    split: str | None
    inputs: tuple[str, ...]

    @property
    def all(self) -> tuple[str, ...]:
        """All columns that are read."""
        others = [name for name in (self.client, self.split) if name is not None]
        return (*self.inputs, *self.targets, *others)


def find_roles(names: Sequence[str], options: TableOptions, parts_are_clients: bool, need_target: bool = True) -> Roles:
    """Return the roles of the columns `names`.

    `parts_are_clients`: the source has one file per client, so that no column names the client. Without `need_target`,
    the target may be absent.
    """
    targets = _targets(names, options.target, need_target)
    if parts_are_clients:
        if options.client_column is not None:
            raise BadInput(
                f"--client-column {options.client_column} has no meaning for data with a part per client; leave it out."
            )
        client = None
    elif options.client_column is not None:
        (client,) = _existing([options.client_column], names, "--client-column")
    else:
        client = _only(CLIENT_NAMES, names, "--client-column", "the client that holds a sample")
    split = SPLIT_NAME if SPLIT_NAME in names else None
    if options.split_column is not None:
        (split,) = _existing([options.split_column], names, "--split-column")
    elif split in targets:
        split = None
    used = {client, split, *targets}
    if len([name for name in (client, split, *targets) if name is not None]) > len(used - {None}):
        raise BadInput(f"--target, --client-column and --split-column name a column twice: {_listed(used)}.")
    if options.columns is None:
        ignored = CLIENT_NAMES if parts_are_clients else ()
        inputs = tuple(name for name in names if name not in used and name not in ignored)
    else:
        inputs = tuple(_existing(_several(options.columns, names), names, "--columns"))
        for name in inputs:
            if name in used:
                raise BadInput(f"--columns names {name!r}, which is the target, the client or the split; leave it out.")
    if not inputs:
        raise BadInput(f"no columns are left as inputs; the table has only {_listed(names)}.")
    return Roles(targets, client, split, inputs)


def _targets(names: Sequence[str], given: str | Sequence[str] | None, needed: bool) -> tuple[str, ...]:
    if given is not None:
        chosen = _several(given, names)
        if not needed:
            return tuple(name for name in chosen if name in names)
        return tuple(_existing(chosen, names, "--target"))
    if not needed and not set(TARGET_NAMES) & set(names):
        return ()
    return (_only(TARGET_NAMES, names, "--target", "what to predict"),)


def _several(given: str | Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the names in a list or in a text that separates them by commas."""
    if not isinstance(given, str):
        return list(given)
    if given in names:  # a name may contain a comma
        return [given]
    return [name for each in re.split(",", given) if (name := each.strip())]


def _existing(chosen: Sequence[str], names: Sequence[str], option: str) -> list[str]:
    for name in chosen:
        if name not in names:
            raise BadInput(f"{option} {name!r} is not a column; the columns are {_listed(names)}.")
    if len(set(chosen)) < len(chosen):
        raise BadInput(f"{option} names a column twice: {_listed(chosen)}.")
    if not chosen:
        raise BadInput(f"{option} names no column; the columns are {_listed(names)}.")
    return list(chosen)


def _only(defaults: Sequence[str], names: Sequence[str], option: str, meaning: str) -> str:
    """Return the only column with one of the default names."""
    found = [name for name in defaults if name in names]
    if len(found) == 1:
        return found[0]
    problem = f"{_listed(found)} could be" if found else f"no column is named {' or '.join(defaults)}, so none is"
    raise BadInput(f"{problem} {meaning}: name it with {option}; the columns are {_listed(names)}.")


def _listed(names: "Iterable[str | None]") -> str:
    return list_names([name for name in names if name is not None])
