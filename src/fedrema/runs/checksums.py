"""Checksums over what a run's folder holds, so that damage and edits by hand are noticed before they are read back."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from fedrema.base.files import atomic_file
from fedrema.data.npz import check_archive
from fedrema.errors import BadInput

CHECKSUM = "checksum"
CHANGED = "was altered or damaged since fedrema wrote it"
REMEDY = "restore it from a backup, or run again in another folder"


def checksum_of(*parts: str | bytes | memoryview) -> str:
    """Return 32 hexadecimal digits that stand for the parts."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()


def sealed(content: dict[str, Any], belongs_to: str = "") -> dict[str, Any]:
    """Return a JSON object with its checksum; `belongs_to` names the run, where the content does not."""
    return {**content, CHECKSUM: _of_object(content, belongs_to)}


def unsealed(content: dict[str, Any], file: Path, belongs_to: str = "", remedy: str = REMEDY) -> dict[str, Any]:
    """Return a JSON object without its checksum; refuses one that does not fit it."""
    plain = {name: value for name, value in content.items() if name != CHECKSUM}
    if content.get(CHECKSUM) != _of_object(plain, belongs_to):
        raise BadInput(f"{file} {CHANGED}: {remedy}.")
    return plain


def _of_object(content: dict[str, Any], belongs_to: str) -> str:
    return checksum_of(belongs_to, json.dumps(json.loads(json.dumps(content)), sort_keys=True))


def write_arrays(file: Path, arrays: dict[str, np.ndarray], belongs_to: str) -> None:
    """Write a `.npz` with a checksum, whole or not at all."""
    with atomic_file(file) as temporary, temporary.open("wb") as stream:
        checksum = np.array(_of_arrays(arrays, belongs_to))
        np.savez_compressed(stream, allow_pickle=False, **arrays, **{CHECKSUM: checksum})


def read_arrays(file: Path, belongs_to: str, sealed: bool, remedy: str) -> dict[str, np.ndarray]:
    """Read all arrays of a `.npz` that `write_arrays` wrote; `sealed` is false for those of older versions."""
    try:
        with file.open("rb") as stream:
            check_archive(stream, file)
            with np.load(stream, allow_pickle=False) as archive:
                arrays = {name: np.asarray(archive[name]) for name in archive.files}
    except OSError as error:
        raise BadInput(f"{file} cannot be read: {error.strerror or error}; {remedy}.") from error
    except Exception as error:  # zipfile, zlib and numpy raise a dozen kinds, which change with their versions
        raise BadInput(f"{file} {CHANGED}: {remedy}.") from error
    checksum = arrays.pop(CHECKSUM, None)
    if sealed and (checksum is None or str(checksum) != _of_arrays(arrays, belongs_to)):
        raise BadInput(f"{file} {CHANGED}: {remedy}.")
    return arrays


def _of_arrays(arrays: dict[str, np.ndarray], belongs_to: str) -> str:
    parts: list[str | memoryview] = [belongs_to]
    for name, array in sorted(arrays.items()):
        parts += [json.dumps([name, array.dtype.str, array.shape]), np.ascontiguousarray(array).data]
    return checksum_of(*parts)
