"""The target of a table: which task it is, and its values as classes or numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrema.data.checks import list_names
from fedrema.data.statistics import MAXIMUM_CLASSES
from fedrema.data.table import CategoryColumn, NumberColumn, Table, sorted_categories
from fedrema.errors import BadInput

_TRUTH = {"true": 1, "false": 0, "yes": 1, "no": 0}


@dataclass(frozen=True, eq=False)
class TableTarget:
    """The values to predict."""

    task: str
    y: NDArray[Any]
    """[N] int64 classes, [N] float64 numbers, or [N, labels] int64 with 0 and 1."""
    names: tuple[str, ...]
    """Names of the classes, or of the labels; empty for numbers."""


def make_target(table: Table, task: str = "auto", class_names: Sequence[str] | None = None) -> TableTarget:
    """Return the target of a table.

    `task` is a task or "auto". `class_names` are the classes of the run that the samples are used for; by default,
    those that occur.
    """
    for name, column in table.targets.items():
        _refuse_missing(table, name, column)
    if len(table.targets) > 1 or task == "multilabel":
        return _labels(table, task, part=class_names is not None)
    ((name, column),) = table.targets.items()
    if task == "auto":
        task = infer_task(column, class_names)
    if task in ("regression", "count"):
        return TableTarget(task, _numbers(table, name, column, task), ())
    found, names = _classes(table, name, column, task)
    if class_names is not None:
        return TableTarget(task, _numbered(table, name, found, names, class_names), tuple(class_names))
    if len(names) == 1:
        raise BadInput(f"the target {name!r} is {names[0]!r} in all samples; it must have at least two values.")
    if task == "binary" and len(names) > 2:
        raise BadInput(f"--task binary needs a target with two values; {name!r} has {len(names)}: {list_names(names)}.")
    return TableTarget(task, found, tuple(names))


def infer_task(column: NumberColumn | CategoryColumn, class_names: Sequence[str] | None = None) -> str:
    """Return the task of a target: text and at most 20 different whole numbers are classes, other numbers are not."""
    if class_names is not None:
        return "binary" if len(class_names) == 2 else "multiclass"
    if isinstance(column, CategoryColumn):
        distinct = len(column.categories)
    else:
        found = np.unique(column.values)
        if len(found) > MAXIMUM_CLASSES or (np.mod(found, 1) != 0).any():
            return "regression"
        distinct = len(found)
    return "binary" if distinct == 2 else "multiclass"


def target_codes(table: Table) -> NDArray[np.int64]:
    """Return a number for each sample that is the same for equal targets, of a table with one target."""
    (column,) = table.targets.values()
    values = column.codes if isinstance(column, CategoryColumn) else column.values
    codes: NDArray[np.int64] = np.unique(values, return_inverse=True)[1]
    return codes


def _refuse_missing(table: Table, name: str, column: NumberColumn | CategoryColumn) -> None:
    missing = np.isnan(column.values) if isinstance(column, NumberColumn) else column.codes < 0
    if missing.any():
        row = int(np.argmax(missing))
        raise BadInput(f"the target {name!r} is missing in {table.where(row)}; every sample needs one.")


def _numbers(table: Table, name: str, column: NumberColumn | CategoryColumn, task: str) -> NDArray[np.float64]:
    """Return the target of a regression or of a count."""
    if isinstance(column, CategoryColumn):
        raise BadInput(f"--task {task} needs a target of numbers; {name!r} has texts such as {column.categories[0]!r}.")
    values: NDArray[np.float64] = column.values.astype(np.float64, copy=False)
    if task == "count" and (wrong := (values < 0) | (np.mod(values, 1) != 0)).any():
        row = int(np.argmax(wrong))
        raise BadInput(
            f"--task count needs whole numbers of 0 or more; {name!r} is {values[row]:g} in {table.where(row)}."
        )
    if (values == values[0]).all():
        raise BadInput(f"the target {name!r} is {values[0]:g} in all samples; it must have at least two values.")
    return values


def _classes(
    table: Table, name: str, column: NumberColumn | CategoryColumn, task: str
) -> tuple[NDArray[np.int64], list[str]]:
    """Return the classes as numbers, and their names."""
    if isinstance(column, CategoryColumn):
        if task == "ordinal":
            raise BadInput(
                f"--task ordinal needs a target of whole numbers; {name!r} has texts such as "
                f"{column.categories[0]!r}: number them in ascending order."
            )
        used = [column.categories[code] for code in np.unique(column.codes)]
        names = sorted_categories(used)
        place = {each: number for number, each in enumerate(names)}
        return np.array([place.get(each, -1) for each in column.categories], np.int64)[column.codes], names
    if (wrong := np.mod(column.values, 1) != 0).any():
        row = int(np.argmax(wrong))
        raise BadInput(
            f"--task {task} needs a target of text or whole numbers; {name!r} is {column.values[row]:g} in "
            f"{table.where(row)}."
        )
    found, codes = np.unique(column.values, return_inverse=True)
    return codes.astype(np.int64), [str(int(value)) for value in found]


def _numbered(
    table: Table, name: str, codes: NDArray[np.int64], names: Sequence[str], class_names: Sequence[str]
) -> NDArray[np.int64]:
    """Return the classes of a run for the classes that occur."""
    place = {each: number for number, each in enumerate(class_names)}
    numbers = np.array([place.get(each, -1) for each in names], np.int64)[codes]
    if (numbers < 0).any():
        row = int(np.argmax(numbers < 0))
        raise BadInput(
            f"the target {name!r} is {names[codes[row]]!r} in {table.where(row)}; the classes are "
            f"{list_names(class_names)}."
        )
    return numbers


def _labels(table: Table, task: str, part: bool) -> TableTarget:
    """Return the labels of a multilabel task; in a part of a run's samples, a label may be absent."""
    if task not in ("auto", "multilabel"):
        raise BadInput(f"--task {task} needs one --target; {list_names(list(table.targets))} are given.")
    y = np.empty((len(table), len(table.targets)), np.int64)
    for place, (name, column) in enumerate(table.targets.items()):
        if isinstance(column, CategoryColumn):
            truth = np.array([_TRUTH.get(each.lower(), -1) for each in column.categories], np.int64)
            values: NDArray[Any] = truth[column.codes]
        else:
            values = column.values
        if (wrong := ~np.isin(values, (0, 1))).any():
            row = int(np.argmax(wrong))
            shown = column.categories[column.codes[row]] if isinstance(column, CategoryColumn) else f"{values[row]:g}"
            raise BadInput(f"--target: several targets must hold 0 and 1; {name!r} is {shown} in {table.where(row)}.")
        if not part and (values == values[0]).all():
            raise BadInput(f"the target {name!r} is {values[0]:g} in all samples; it must have at least two values.")
        y[:, place] = values
    return TableTarget("multilabel", y, tuple(table.targets))
