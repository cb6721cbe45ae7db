"""Checks of a user's arrays: each returns them in the one form that the rest of the product uses."""

import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedrema.errors import BadInput

log = logging.getLogger("fedrema")
_SHOWN = 10
"""How many of many names a sentence lists."""
_QUANTITY = 20
"""So many different integers that do not count from 0 or 1 look like an amount rather than classes."""


class BadRow(BadInput):
    """One sample is wrong; `at` replaces its row by a more precise place, such as a file and the row in it."""

    def __init__(self, before: str, row: int, after: str, where: str | None = None) -> None:
        self.before, self.row, self.after = before, row, after
        super().__init__(f"{before} in {where or f'row {row}'}{after}")

    def at(self, where: str) -> "BadRow":
        """Return the same with another description of the place."""
        return BadRow(self.before, self.row, self.after, where)


def check_samples(x: ArrayLike) -> NDArray[Any]:
    """uint8 stays as it is, other integers become int32 (int64 where they are larger), the rest finite float32."""
    array = as_array(x, "x")
    if array.dtype.kind not in "biuf":
        raise BadInput(f"x has the type {array.dtype}; numbers are valid: uint8 for pixels, else floats or integers.")
    if array.ndim < 2 or 0 in array.shape:
        raise BadInput(f"x has the shape {array.shape}; one row per sample and at least one value each are valid.")
    if array.dtype == np.uint8:
        return array
    if array.dtype.kind in "iu":
        lowest, highest = int(array.min()), int(array.max())
        if highest > np.iinfo(np.int64).max:
            raise BadInput(f"x has {highest}; integers up to {np.iinfo(np.int64).max} are valid.")
        narrow = lowest >= np.iinfo(np.int32).min and highest <= np.iinfo(np.int32).max
        return array.astype(np.int32 if narrow else np.int64, copy=False)
    with np.errstate(over="ignore"):
        # Judged after the conversion, so that what float32 cannot hold is found too.
        numbers = array.astype(np.float32)
    finite = np.isfinite(numbers).reshape(len(numbers), -1).all(axis=1)
    if not finite.all():
        row = int(np.argmin(finite))
        place = np.argwhere(~np.isfinite(numbers[row]))[0].tolist()
        value = array[row][tuple(place)]
        raise BadRow(
            f"x has NaN or infinite values in {np.count_nonzero(~finite)} samples, the first is {value}",
            row,
            f", column {place[0] if len(place) == 1 else place}; only finite numbers are valid.",
        )
    return numbers


def check_labels(
    y: ArrayLike, samples: int, classes: int | None = None, class_names: Sequence[str] | None = None
) -> tuple[NDArray[np.int64], int, tuple[str, ...]]:
    """Return int64 labels 0 .. classes-1, the number of classes, and their names where those are not 0, 1, 2, ….

    Parameters
    ----------
    y
        Whole numbers or strings.
    samples
        How many there must be.
    classes
        `y` holds 0 .. classes-1 already, though not every class need occur; `class_names` may name them.
    class_names
        Without `classes`: the only labels that are valid. Without both, the labels that occur are the classes.
    """
    array = _vector(y, "y", samples)
    if array.dtype.kind == "f":
        array = _whole(array)
    if array.dtype.kind not in "iubU":
        raise BadInput(f"y has the type {array.dtype}; whole numbers and strings are valid labels.")
    if class_names is not None and len(set(class_names)) < len(class_names):
        raise BadInput(f"class_names names a class twice: {listed(class_names)}.")
    if classes is not None and class_names is not None and len(class_names) != classes:
        raise BadInput(f"class_names has {len(class_names)} names for {classes} classes; one each is valid.")
    if classes is not None:
        return _numbered(array, classes), classes, unless_plain(class_names or ())
    found, first, rows = np.unique(array, return_index=True, return_inverse=True)
    if array.dtype.kind == "i" and found[0] < 0:
        raise BadRow(
            f"y has the label {found[0]}", int(first[0]), "; 0, 1, 2 ... or strings are valid, and -1 is no class."
        )
    names = [str(label) for label in found]
    if array.dtype.kind == "U" and are_numbers(names):  # 2 before 10, as with integers
        order = np.argsort([int(name) for name in names])
        names, first, rows = [names[place] for place in order], first[order], np.argsort(order)[rows]
    if "" in names:
        raise BadRow("y has an empty label", int(first[names.index("")]), "; every sample needs one.")
    if class_names is None:
        _warn(array.dtype.kind, found, samples)
        return rows.astype(np.int64), len(names), unless_plain(names)
    place = {name: number for number, name in enumerate(class_names)}
    for name, row in zip(names, first, strict=True):
        if name not in place:
            raise BadRow(f"y has the label {name!r}", int(row), f"; the classes are {listed(class_names)}.")
    return np.array([place[name] for name in names], np.int64)[rows], len(place), unless_plain(class_names)


def _whole(array: NDArray[Any]) -> NDArray[Any]:
    """Return whole numbers that are stored as floats as integers."""
    wrong = ~(np.mod(array, 1) == 0) | (np.abs(array) >= 2.0**53)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise BadRow(
            f"y has values that are not whole numbers, such as {array[row]}",
            row,
            "; whole numbers and strings are valid labels.",
        )
    return array.astype(np.int64)


def _numbered(array: NDArray[Any], classes: int) -> NDArray[np.int64]:
    if classes < 1:
        raise BadInput(f"classes is {classes}; at least 1 is valid.")
    if array.dtype.kind == "U":
        raise BadInput(f"y holds strings, but with classes={classes} it must hold 0 to {classes - 1}.")
    outside = (array < 0) | (array >= classes)
    if outside.any():
        row = int(np.argmax(outside))
        raise BadRow(f"y has the label {array[row]}", row, f"; 0 to {classes - 1} are valid.")
    return array.astype(np.int64)


def unless_plain(names: Sequence[str]) -> tuple[str, ...]:
    """Return names of classes; nothing where they only count from 0."""
    plain = all(name == str(number) for number, name in enumerate(names))
    return () if plain else tuple(names)


def _warn(kind: str, found: NDArray[Any], samples: int) -> None:
    """Warn in one line about labels that may be a mistake."""
    doubts = []
    if len(found) == 1:
        doubts.append("there is only one class")
    if len(found) > samples / 10:
        doubts.append(f"there are {len(found)} classes for {samples} samples")
    if kind in "iu" and len(found) > 1:
        missing = int(found[-1]) - int(found[0]) + 1 - len(found)
        if missing:
            example = next(int(a) + 1 for a, b in itertools.pairwise(found) if int(b) > int(a) + 1)
            doubts.append(f"{missing} numbers in between do not occur, such as {example}")
        if len(found) >= _QUANTITY and (missing or found[0] > 1):
            doubts.append("they look like a quantity, and fedrema predicts classes")
    if doubts:
        log.warning("Warning: y has the labels %s: %s.", listed([str(label) for label in found]), "; ".join(doubts))


def listed(names: Sequence[str]) -> str:
    """Return names for a sentence; of many the first and the last."""
    if len(names) <= _SHOWN:
        return ", ".join(names)
    return f"{', '.join(names[: _SHOWN - 1])}, … {names[-1]} ({len(names)} in all)"


def check_clients(
    client: ArrayLike, samples: int, names: Sequence[str] | None
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Rows [N] and names: in ascending order of the identifiers, or in the order of `names` if given."""
    array = _vector(client, "client", samples)
    if array.dtype.kind == "f":
        odd = ~(np.mod(array, 1) == 0)
        if odd.any():
            row = int(np.argmax(odd))
            raise BadRow(f"client has {array[row]}", row, "; whole numbers or strings are valid.")
        raise BadInput(
            f"client has the type {array.dtype}; whole numbers or strings are valid: client.astype(int) makes "
            f"{int(array[0])} of {array[0]}."
        )
    if array.dtype.kind not in "iuU":
        raise BadInput(f"client has the type {array.dtype}; whole numbers or strings are valid.")
    identifiers, rows = np.unique(array, return_inverse=True)
    found = tuple(str(identifier) for identifier in identifiers)
    if names is None:
        return rows.astype(np.int64), found
    if len(set(names)) != len(names):
        raise BadInput(f"names has {len(names)} entries, some of them twice; unique names are valid.")
    if unknown := set(found) - set(names):
        raise BadInput(f"client has {min(unknown)!r}, which is not among the {len(names)} names.")
    if idle := set(names) - set(found):
        raise BadInput(f"client {min(idle)!r} has no samples; every client needs at least one.")
    place = {name: row for row, name in enumerate(names)}
    return np.array([place[name] for name in found], np.int64)[rows], tuple(names)


def are_numbers(names: Iterable[str]) -> bool:
    """Whether every name is a whole number as Python writes it (not 007), small enough for an int64."""
    return all(name.isdecimal() and len(name) < 19 and str(int(name)) == name for name in names)


def check_split(split: ArrayLike, samples: int) -> NDArray[np.bool_]:
    """Whether each sample is a test sample."""
    array = _vector(split, "split", samples)
    if array.dtype.kind == "U":
        known, test = np.isin(array, ("train", "test")), np.asarray(array == "test")
    elif array.dtype.kind in "biu":
        known, test = np.isin(array, (0, 1)), np.asarray(array == 1)
    else:
        known, test = np.zeros(samples, np.bool_), np.zeros(samples, np.bool_)
    if not known.all():
        row = int(np.argmin(known))
        raise BadRow(
            f"split has the value {array[row]}", row, "; 'train' and 'test', or 0 and 1 (1 = test), are valid."
        )
    return test


def check_draw(data_seed: int, test_share: float) -> None:
    """Raise unless a test part can be drawn with these."""
    if data_seed < 0:
        raise BadInput(f"--data-seed {data_seed} is negative; 0 or more is valid.")
    if not 0 < test_share < 1:
        raise BadInput(f"--test-share {test_share} is outside 0 to 1; valid is for example 0.2.")


def _vector(values: ArrayLike, name: str, samples: int) -> NDArray[Any]:
    array = as_array(values, name)
    if array.ndim != 1:
        raise BadInput(f"{name} has the shape {array.shape}; one value per sample is valid.")
    if len(array) != samples:
        raise BadInput(f"{name} has {len(array)} entries but x has {samples} samples; they must be equally many.")
    return array


def as_array(values: ArrayLike, name: str) -> NDArray[Any]:
    """Make an array of whatever the user gave, and refuse Python objects other than strings."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:  # ragged lists, tensors that need a gradient
        raise BadInput(f"{name} is no array of equally long rows ({error}).") from error
    if array.dtype.kind == "O" and array.ndim == 1 and all(isinstance(value, str) for value in array):
        return array.astype(np.str_)  # as pandas hands out a column of text
    if array.dtype.kind == "O":
        raise BadInput(f"{name} holds Python objects; plain numbers or strings are valid.")
    return array
