"""Validate targets, find out which task they are for, and derive the task that a federation trains."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedrema.core import LocalTraining
from fedrema.data.checks import BadRow, as_array, check_labels, custom_names
from fedrema.errors import BadInput
from fedrema.tasks import TASKS, Task, TaskName

if TYPE_CHECKING:
    from fedrema.data.federation import Federation


@dataclass(frozen=True, eq=False)
class Target:
    """Checked targets of all samples."""

    y: NDArray[Any]
    """[N] int64 classes or levels, [N, L] uint8 labels, or [N] float64 quantities or counts."""
    task: TaskName
    classes: int
    class_names: tuple[str, ...] = ()
    """Names of classes, levels or labels; empty if they are 0, 1, 2, …"""


def check_target(
    y: ArrayLike,
    samples: int,
    task: str | None = None,
    classes: int | None = None,
    class_names: Sequence[str] | None = None,
) -> Target:
    """Return checked targets.

    Without a task, several columns are labels, fractions are a quantity, and everything else is classes.
    """
    if task is not None and task not in TASKS:
        raise BadInput(f"--task {task!r} is unknown; valid are auto, {', '.join(TASKS)}.")
    array = as_array(y, "y")
    chosen = task or _inferred(array)
    if chosen == "multilabel":
        return _labels(array, samples, class_names)
    if chosen in ("regression", "count"):
        return Target(_quantities(array, samples, chosen), cast(TaskName, chosen), 1)
    labels, number, names = check_labels(array, samples, classes, class_names)
    if chosen == "ordinal" and number < 2:
        raise BadInput(f"--task ordinal needs at least 2 levels, but y has {number}.")
    if task == "binary" and number != 2:
        raise BadInput(f"--task binary needs 2 classes, but y has {number}.")
    if task is None and number == 2:
        chosen = "binary"
    return Target(labels, cast(TaskName, chosen), number, names)


def _inferred(array: NDArray[Any]) -> str:
    if array.ndim == 2 and array.shape[1] > 1:
        return "multilabel"
    fractions = array.dtype.kind == "f" and bool((np.mod(array[np.isfinite(array)], 1) != 0).any())
    return "regression" if fractions else "multiclass"


def _labels(array: NDArray[Any], samples: int, names: Sequence[str] | None) -> Target:
    if array.ndim != 2 or len(array) != samples:
        raise BadInput(f"y has the shape {array.shape}; labels need one row for each of the {samples} samples.")
    if names is not None and len(names) != array.shape[1]:
        raise BadInput(f"class_names has {len(names)} names for {array.shape[1]} labels; give one name per label.")
    wrong = ~np.isin(array, (0, 1)) if array.dtype.kind in "biuf" else np.ones(array.shape, np.bool_)
    if wrong.any():
        row, column = np.argwhere(wrong)[0].tolist()
        raise BadRow(f"y has {array[row, column]}", row, f", label {column}; labels must be 0 or 1.")
    return Target(array.astype(np.uint8), "multilabel", array.shape[1], custom_names(names or ()))


def _quantities(array: NDArray[Any], samples: int, task: str) -> NDArray[np.float64]:
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1 or len(array) != samples:
        raise BadInput(f"y has the shape {array.shape}; it must have one value for each of the {samples} samples.")
    if array.dtype.kind not in "biuf":
        raise BadInput(f"y has the type {array.dtype}, but --task {task} needs numbers.")
    numbers = array.astype(np.float64)
    finite = np.isfinite(numbers)
    if not finite.all():
        row = int(np.argmin(finite))
        raise BadRow(f"y is {array[row]}", row, "; every sample needs a finite number.")
    if task == "count" and ((numbers < 0) | (np.mod(numbers, 1) != 0)).any():
        row = int(np.argmax((numbers < 0) | (np.mod(numbers, 1) != 0)))
        raise BadRow(f"y is {array[row]}", row, "; counts must be whole numbers from 0 on.")
    if len(numbers) > 1 and (numbers == numbers[0]).all():
        raise BadInput(f"y is {numbers[0]:g} for every sample: there is nothing to predict.")
    return numbers


def task_of(target: Target, test: NDArray[np.bool_]) -> Task:
    """Return the task of targets, with mean and standard deviation of quantities over the training samples."""
    if target.task not in ("regression", "count"):
        return Task(target.task, target.classes)
    training = target.y[~test]
    spread = float(training.std())
    return Task(target.task, 1, float(training.mean()), spread if target.task == "regression" and spread else 1.0)


def trained_task(federation: "Federation", local: LocalTraining) -> Task:
    """Return the task that a federation trains with these settings: with its loss and class weights."""
    task = federation.task
    if local.regression_loss != "squared" and task.name != "regression":
        raise BadInput(f"--regression-loss {local.regression_loss} is for regression, but the task is {task.name}.")
    if not local.class_weights:
        return replace(task, loss_name=local.regression_loss)
    if not task.has_classes:
        raise BadInput(f"--class-weights {local.class_weights} needs classes, but the task is {task.name}.")
    if local.class_weights == "balanced":
        counts = np.array(federation.class_counts or federation.label_counts("train").sum(axis=0), np.float64)
        weights = counts.sum() / (len(counts) * np.maximum(counts, 1))
        return replace(task, weights=tuple(np.where(counts > 0, weights, 0.0).tolist()))
    try:
        numbers = tuple(float(each) for each in local.class_weights.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) != task.classes or not all(0 <= each < np.inf for each in numbers) or not any(numbers):
        raise BadInput(
            f"--class-weights {local.class_weights!r} must be 'balanced' or {task.classes} numbers from 0 on,"
            " one for each class."
        )
    return replace(task, weights=numbers)
