"""Read `.npz` files safely: nothing is unpickled, and sizes are checked before NumPy allocates memory."""

import math
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedrema.base.files import regular_file
from fedrema.base.memory import amount, check_fits
from fedrema.errors import BadInput

MAXIMUM_RATIO = 200
"""Largest compression ratio of large files; images and tables compress by less than a factor of 50."""
UNCHECKED_SIZE = 100 * 10**6
"""Decompressed bytes up to which the compression ratio is not checked."""


def read_npz(path: Path, required: Sequence[str], optional: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Read the named arrays of a `.npz` file without unpickling."""
    if not path.is_file():
        raise BadInput(f"{path} does not exist or is not a file; give a .npz file with {', '.join(required)}.")
    try:
        with regular_file(path).open("rb") as stream:
            if not zipfile.is_zipfile(stream):
                raise BadInput(f"{path} is not a .npz file or is truncated; create it with numpy.savez.")
            check_archive(stream, path)
            with np.load(stream, allow_pickle=False) as archive:
                missing = [key for key in required if key not in archive.files]
                # A misspelt 'splits' must not be ignored: the test split would silently be drawn at random.
                unknown = [key for key in archive.files if key not in (*required, *optional)]
                if missing or unknown:
                    raise BadInput(
                        f"{path} {f'lacks {missing[0]!r}' if missing else f'holds {unknown[0]!r}'}: it must "
                        f"hold {', '.join(required)} and may hold {', '.join(optional)}, nothing else."
                    )
                arrays = {key: archive[key] for key in (*required, *optional) if key in archive.files}
        # NumPy returns the raw bytes of a member that is not an array.
        if not all(isinstance(array, np.ndarray) for array in arrays.values()):
            raise ValueError("a member is not an array")
        return arrays
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
        reason = "it holds Python objects" if "allow_pickle" in str(error) else "altered or incomplete"
        raise BadInput(f"{path} cannot be read ({reason}): save plain arrays again with numpy.savez.") from error
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}.") from error


def check_archive(stream: BinaryIO, path: Path) -> None:
    """Refuse an archive whose arrays do not fit into memory, or are not as large as their headers announce."""
    with zipfile.ZipFile(stream) as archive:
        members = archive.infolist()
        compressed, decompressed = (
            sum(sizes) for sizes in zip(*((each.compress_size, each.file_size) for each in members), strict=True)
        )
        if decompressed > UNCHECKED_SIZE and decompressed > MAXIMUM_RATIO * compressed:
            raise BadInput(
                f"{path} of {amount(compressed)} would grow to {amount(decompressed)}: if this is intended, save it"
                " uncompressed, with numpy.savez."
            )
        check_fits(decompressed, f"{path} needs")
        for member in members:
            if member.filename.endswith(".npy"):
                _check_header(archive, member)
    stream.seek(0)


def _check_header(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    """Refuse an array whose header announces another size than it has; NumPy would allocate that size."""
    try:
        with archive.open(member) as stream:
            version = npy.read_magic(stream)
            read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, _, kind = read_header(stream)
            announced_size = stream.tell() + math.prod(shape) * kind.itemsize
    except OSError:
        raise
    except Exception as error:  # NumPy evaluates the header as a Python literal, which can raise many errors
        raise ValueError(str(error)) from error
    if not kind.hasobject and announced_size != member.file_size:
        raise ValueError(f"{member.filename} announces {announced_size} bytes but has {member.file_size}")
