"""Validate users' arrays, and convert them to the types that the rest of the package uses."""

import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedrema.errors import BadInput

log = logging.getLogger("fedrema")
_MAXIMUM_NAMES = 10
"""Maximum number of names in an error message."""
_MANY_LABELS = 20
"""From this number of distinct integer labels on, gaps between them suggest a quantity rather than classes."""


class BadRow(BadInput):
    """A sample is invalid; `at` replaces its row by a more precise location, such as a file and the row in it."""

    def __init__(self, before: str, row: int, after: str, location: str | None = None) -> None:
        self.before, self.row, self.after = before, row, after
        super().__init__(f"{before} in {location or f'row {row}'}{after}")

    def at(self, location: str) -> "BadRow":
        """Return the same error with another location."""
        return BadRow(self.before, self.row, self.after, location)


def check_samples(x: ArrayLike) -> NDArray[Any]:
    """Return samples as uint8 (unchanged), int32 or int64 (integers, depending on their range) or finite float32."""
    array = as_array(x, "x")
    if array.dtype.kind not in "biuf":
        raise BadInput(f"x has the type {array.dtype}; valid are uint8 for pixels, floats and integers.")
    if array.ndim < 2 or 0 in array.shape:
        raise BadInput(
            f"x has the shape {array.shape}; it must have one row per sample and at least one value per row."
        )
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind in "iu":
        lowest, highest = int(array.min()), int(array.max())
        if highest > np.iinfo(np.int64).max:
            raise BadInput(f"x has {highest}; integers up to {np.iinfo(np.int64).max} are valid.")
        narrow = lowest >= np.iinfo(np.int32).min and highest <= np.iinfo(np.int32).max
        return array.astype(np.int32 if narrow else np.int64, copy=False)
    with np.errstate(over="ignore"):
        # Checked after the conversion, to find values that overflow float32 too.
        numbers = array.astype(np.float32)
    finite = np.isfinite(numbers).reshape(len(numbers), -1).all(axis=1)
    if not finite.all():
        row = int(np.argmin(finite))
        place = np.argwhere(~np.isfinite(numbers[row]))[0].tolist()
        value = array[row][tuple(place)]
        raise BadRow(
            f"x has NaN or infinite values in {np.count_nonzero(~finite)} samples, the first is {value}",
            row,
            f", column {place[0] if len(place) == 1 else place}; all values must be finite.",
        )
    return numbers


def check_labels(
    y: ArrayLike, samples: int, classes: int | None = None, class_names: Sequence[str] | None = None
) -> tuple[NDArray[np.int64], int, tuple[str, ...]]:
    """Return int64 labels 0 .. classes-1, the number of classes, and their names unless these are 0, 1, 2, ….

    Parameters
    ----------
    y
        Whole numbers or strings.
    samples
        Expected number of labels.
    classes
        Number of classes, if `y` already holds 0 .. classes-1 (classes may be missing); `class_names` may name them.
    class_names
        Without `classes`: the valid labels. Without both, the labels that occur are the classes.
    """
    array = _vector(y, "y", samples)
    if array.dtype.kind == "f":
        array = _whole(array)
    if array.dtype.kind not in "iubU":
        raise BadInput(f"y has the type {array.dtype}; labels must be whole numbers or strings.")
    if class_names is not None and len(set(class_names)) < len(class_names):
        raise BadInput(f"class_names contains a class twice: {list_names(class_names)}; names must be unique.")
    if classes is not None and class_names is not None and len(class_names) != classes:
        raise BadInput(f"class_names has {len(class_names)} names for {classes} classes; give one name per class.")
    if classes is not None:
        return _numbered(array, classes), classes, custom_names(class_names or ())
    found, first, rows = np.unique(array, return_index=True, return_inverse=True)
    if array.dtype.kind == "i" and found[0] < 0:
        raise BadRow(f"y has the label {found[0]}", int(first[0]), "; labels must be 0, 1, 2, … or strings.")
    names = [str(label) for label in found]
    if array.dtype.kind == "U" and are_integers(names):  # sort 2 before 10, as integers
        order = np.argsort([int(name) for name in names])
        names, first, rows = [names[place] for place in order], first[order], np.argsort(order)[rows]
    if "" in names:
        raise BadRow("y has an empty label", int(first[names.index("")]), "; every sample needs a label.")
    if class_names is None:
        _warn(array.dtype.kind, found, samples)
        return rows.astype(np.int64), len(names), custom_names(names)
    place = {name: number for number, name in enumerate(class_names)}
    for name, row in zip(names, first, strict=True):
        if name not in place:
            raise BadRow(f"y has the label {name!r}", int(row), f"; the classes are {list_names(class_names)}.")
    return np.array([place[name] for name in names], np.int64)[rows], len(place), custom_names(class_names)


def _whole(array: NDArray[Any]) -> NDArray[Any]:
    """Convert whole numbers that are stored as floats to integers."""
    wrong = ~(np.mod(array, 1) == 0) | (np.abs(array) >= 2.0**53)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise BadRow(
            f"y has values that are not whole numbers, such as {array[row]}",
            row,
            "; labels must be whole numbers or strings.",
        )
    return array.astype(np.int64)


def _numbered(array: NDArray[Any], classes: int) -> NDArray[np.int64]:
    """Return labels that must already be 0 .. classes-1."""
    if classes < 1:
        raise BadInput(f"classes is {classes}; it must be at least 1.")
    if array.dtype.kind == "U":
        raise BadInput(f"y holds strings, but with classes={classes} it must hold 0 to {classes - 1}.")
    outside = (array < 0) | (array >= classes)
    if outside.any():
        row = int(np.argmax(outside))
        raise BadRow(f"y has the label {array[row]}", row, f"; labels must be between 0 and {classes - 1}.")
    return array.astype(np.int64)


def custom_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return class names, or an empty tuple if they are just 0, 1, 2, …."""
    plain = all(name == str(number) for number, name in enumerate(names))
    return () if plain else tuple(names)


def _warn(kind: str, found: NDArray[Any], samples: int) -> None:
    """Log a one-line warning about labels that may be a mistake."""
    doubts = []
    if len(found) == 1:
        doubts.append("there is only one class")
    if len(found) > samples / 10:
        doubts.append(f"there are {len(found)} classes for {samples} samples")
    if kind in "iu" and len(found) > 1:
        missing = int(found[-1]) - int(found[0]) + 1 - len(found)
        if missing:
            example = next(int(a) + 1 for a, b in itertools.pairwise(found) if int(b) > int(a) + 1)
            doubts.append(f"{missing} numbers in between are missing, such as {example}")
        if len(found) >= _MANY_LABELS and (missing or found[0] > 1):
            doubts.append("they look like a quantity, but fedrema predicts classes")
    if doubts:
        log.warning("Warning: y has the labels %s: %s.", list_names([str(label) for label in found]), "; ".join(doubts))


def list_names(names: Sequence[str]) -> str:
    """Return names as text for a message; of many names, the first and the last."""
    if len(names) <= _MAXIMUM_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[: _MAXIMUM_NAMES - 1])}, … {names[-1]} ({len(names)} in total)"


def check_clients(
    client: ArrayLike, samples: int, names: Sequence[str] | None
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return client rows [N] and client names, sorted by identifier or in the order of `names` if given."""
    array = _vector(client, "client", samples)
    if array.dtype.kind == "f":
        invalid = ~(np.mod(array, 1) == 0)
        if invalid.any():
            row = int(np.argmax(invalid))
            raise BadRow(f"client has {array[row]}", row, "; client identifiers must be whole numbers or strings.")
        raise BadInput(
            f"client has the type {array.dtype}; it must hold whole numbers or strings: client.astype(int) converts "
            f"{array[0]} to {int(array[0])}."
        )
    if array.dtype.kind not in "iuU":
        raise BadInput(f"client has the type {array.dtype}; it must hold whole numbers or strings.")
    identifiers, rows = np.unique(array, return_inverse=True)
    found = tuple(str(identifier) for identifier in identifiers)
    if names is None:
        return rows.astype(np.int64), found
    if len(set(names)) != len(names):
        raise BadInput(f"names has {len(names)} entries with duplicates; names must be unique.")
    if unknown := set(found) - set(names):
        raise BadInput(f"client has {min(unknown)!r}, which is not among the {len(names)} names.")
    if empty := set(names) - set(found):
        raise BadInput(f"client {min(empty)!r} has no samples; every client needs at least one.")
    place = {name: row for row, name in enumerate(names)}
    return np.array([place[name] for name in found], np.int64)[rows], tuple(names)


def are_integers(names: Iterable[str]) -> bool:
    """Return whether every name is a whole number in Python's notation (not 007) that fits into int64."""
    return all(name.isdecimal() and len(name) < 19 and str(int(name)) == name for name in names)


def check_split(split: ArrayLike, samples: int) -> NDArray[np.bool_]:
    """Return whether each sample is a test sample."""
    array = _vector(split, "split", samples)
    if array.dtype.kind == "U":
        known, test = np.isin(array, ("train", "test")), np.asarray(array == "test")
    elif array.dtype.kind in "biu":
        known, test = np.isin(array, (0, 1)), np.asarray(array == 1)
    else:
        known, test = np.zeros(samples, np.bool_), np.zeros(samples, np.bool_)
    if not known.all():
        row = int(np.argmin(known))
        raise BadRow(f"split has the value {array[row]}", row, "; valid are 'train' and 'test', or 0 and 1 (1 = test).")
    return test


def check_split_settings(data_seed: int, test_share: float) -> None:
    """Validate the settings with which test splits are drawn."""
    if data_seed < 0:
        raise BadInput(f"--data-seed {data_seed} is negative; it must be 0 or more.")
    if not 0 < test_share < 1:
        raise BadInput(f"--test-share {test_share} must be between 0 and 1, for example 0.2.")


def _vector(values: ArrayLike, name: str, samples: int) -> NDArray[Any]:
    """Return a one-dimensional array with one value per sample."""
    array = as_array(values, name)
    if array.ndim != 1:
        raise BadInput(f"{name} has the shape {array.shape}; it must have one value per sample.")
    if len(array) != samples:
        raise BadInput(f"{name} has {len(array)} entries but x has {samples} samples; the numbers must be equal.")
    return array


def as_array(values: ArrayLike, name: str) -> NDArray[Any]:
    """Convert to an array; refuse Python objects other than strings."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:  # ragged lists, tensors that need a gradient
        raise BadInput(f"{name} is not an array with rows of equal length ({error}).") from error
    if array.dtype.kind == "O" and array.ndim == 1 and all(isinstance(value, str) for value in array):
        return array.astype(np.str_)  # a text column of pandas
    if array.dtype.kind == "O":
        raise BadInput(f"{name} holds Python objects; it must hold numbers or strings.")
    return array
