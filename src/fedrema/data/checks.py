"""Checks of a user's arrays: each returns them in the one form that the rest of the product uses."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedrema.errors import BadInput


def check_samples(x: ArrayLike) -> NDArray[Any]:
    """uint8 stays as it is; every other number becomes a finite float32."""
    array = as_array(x, "x")
    if array.dtype.kind not in "biuf":
        raise BadInput(f"x has the type {array.dtype}; numbers are valid: uint8 for pixels, else float32.")
    if array.ndim < 2 or 0 in array.shape:
        raise BadInput(f"x has the shape {array.shape}; one row per sample and at least one value each are valid.")
    if array.dtype == np.uint8:
        return array
    with np.errstate(over="ignore"):
        # Judged after the conversion, so that what float32 cannot hold is found too.
        numbers = array.astype(np.float32)
    finite = np.isfinite(numbers).reshape(len(numbers), -1).all(axis=1)
    if not finite.all():
        raise BadInput(
            f"x has NaN or infinite values in {np.count_nonzero(~finite)} samples, the first at index "
            f"{int(np.argmin(finite))}; only finite numbers are valid."
        )
    return numbers


def check_labels(y: ArrayLike, classes: int | None, samples: int) -> tuple[NDArray[np.int64], int]:
    """int64 labels and the number of classes; without `classes` that is the highest label plus one."""
    array = _vector(y, "y", samples)
    if array.dtype.kind not in "iuf" or (array.dtype.kind == "f" and not (np.mod(array, 1) == 0).all()):
        raise BadInput(f"y has values that are not whole numbers (type {array.dtype}); labels 0, 1, 2 ... are valid.")
    if classes is not None and classes < 1:
        raise BadInput(f"classes is {classes}; at least 1 is valid.")
    outside = (array < 0) | (array >= (np.iinfo(np.int32).max if classes is None else classes))
    if outside.any():
        index = int(np.argmax(outside))
        limit = "0, 1, 2 ..." if classes is None else f"0 to {classes - 1}"
        raise BadInput(f"y has the label {array[index]} at index {index}; {limit} are valid.")
    labels = array.astype(np.int64)
    return labels, int(labels.max()) + 1 if classes is None else classes


def check_clients(
    client: ArrayLike, samples: int, names: Sequence[str] | None
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Rows [N] and names: in ascending order of the identifiers, or in the order of `names` if given."""
    array = _vector(client, "client", samples)
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
        value = array[int(np.argmin(known))]
        raise BadInput(f"split has the value {value}; 'train' and 'test', or 0 and 1 (1 = test), are valid.")
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
    """Make an array of whatever the user gave, and refuse Python objects."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:  # ragged lists, tensors that need a gradient
        raise BadInput(f"{name} is no array of equally long rows ({error}).") from error
    if array.dtype.kind == "O":
        raise BadInput(f"{name} holds Python objects; plain numbers or strings are valid.")
    return array
