"""The `.npz` files of a run: arrays with a checksum, and the matrices between clients by round."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from fedrema.base.files import atomic_file, regular_file
from fedrema.data.npz import check_archive
from fedrema.errors import BadInput
from fedrema.runs.checksums import BELONGS, CHANGED, CHECKSUM, FOREIGN, checksum_of

Relations = dict[int, dict[str, np.ndarray]]
"""Matrices between clients [K, K]: by round, then by name."""


def write_arrays(file: Path, arrays: dict[str, np.ndarray], belongs_to: str, compress: bool = True) -> None:
    """Write a `.npz` with a checksum and what it belongs to, completely or not at all."""
    arrays = {**arrays, BELONGS: np.array(belongs_to)}
    save = np.savez_compressed if compress else np.savez
    with atomic_file(file) as temporary, temporary.open("wb") as stream:
        checksum = np.array(_checksum(arrays))
        # NumPy would pickle arrays of objects; only its newer versions can be told not to.
        if objects := [name for name, array in arrays.items() if array.dtype.hasobject]:
            raise TypeError(f"arrays {objects} hold Python objects")
        contents: dict[str, Any] = {**arrays, CHECKSUM: checksum}
        save(stream, **contents)


def read_arrays(file: Path, belongs_to: str, remedy: str) -> dict[str, np.ndarray]:
    """Read all arrays of a `.npz` that `write_arrays` wrote for the same `belongs_to`."""
    arrays, owner = read_owned(file, remedy)
    if owner != belongs_to:
        raise BadInput(f"{file} {FOREIGN}: {remedy}.")
    return arrays


def read_owned(file: Path, remedy: str) -> tuple[dict[str, np.ndarray], str]:
    """Read all arrays of a `.npz` that `write_arrays` wrote, and what it belongs to."""
    try:
        with regular_file(file).open("rb") as stream:
            check_archive(stream, file)
            with np.load(stream, allow_pickle=False) as archive:
                arrays = {name: np.asarray(archive[name]) for name in archive.files}
    except OSError as error:
        raise BadInput(f"{file} cannot be read: {error.strerror or error}; {remedy}.") from error
    except Exception as error:  # zipfile, zlib and numpy raise a dozen kinds, which change with their versions
        raise BadInput(f"{file} {CHANGED}: {remedy}.") from error
    checksum = arrays.pop(CHECKSUM, None)
    if checksum is None or BELONGS not in arrays or str(checksum) != _checksum(arrays):
        raise BadInput(f"{file} {CHANGED}: {remedy}.")
    return arrays, str(arrays.pop(BELONGS))


def relation_arrays(relations: Relations) -> dict[str, np.ndarray]:
    """Return the arrays of relations.npz: `rounds` [R] and a stack [R, K, K] of each matrix; NaN where missing."""
    rounds = sorted(relations)
    names = sorted({name for found in relations.values() for name in found})
    shape = next(iter(relations[rounds[0]].values())).shape
    missing = np.full(shape, np.nan, np.float32)
    stacks = {name: np.stack([relations[number].get(name, missing) for number in rounds]) for name in names}
    return {"rounds": np.array(rounds), **stacks}


def relations_of(arrays: dict[str, np.ndarray], last: int | None = None) -> Relations:
    """Return the matrices in the arrays of a relations.npz, up to a round."""
    rounds = [int(number) for number in arrays.pop("rounds", np.array([]))]
    return {
        number: {name: stack[place] for name, stack in arrays.items() if not np.isnan(stack[place]).all()}
        for place, number in enumerate(rounds)
        if last is None or number <= last
    }


def _checksum(arrays: dict[str, np.ndarray]) -> str:
    parts: list[str | memoryview] = []
    for name, array in sorted(arrays.items()):
        parts += [json.dumps([name, array.dtype.str, array.shape]), np.ascontiguousarray(array).data]
    return checksum_of(*parts)
