"""Checks of `.npz` files before numpy reads them: numpy allocates whatever a header announces."""

import math
import zipfile
from pathlib import Path
from typing import BinaryIO

from numpy.lib import format as npy

from fedrema.base.memory import amount, check_fits
from fedrema.errors import BadInput

LARGEST_RATIO = 200
"""Compressed data that grows by more is refused if it is large; images and tables grow by less than 50."""
SMALL = 100 * 10**6
"""Bytes that may come out of any file."""


def check_archive(stream: BinaryIO, path: Path) -> None:
    """Refuse an archive whose arrays do not fit into memory, or are not as large as their headers say."""
    with zipfile.ZipFile(stream) as archive:
        members = archive.infolist()
        stored, held = (
            sum(sizes) for sizes in zip(*((each.compress_size, each.file_size) for each in members), strict=True)
        )
        if held > SMALL and held > LARGEST_RATIO * stored:
            raise BadInput(
                f"{path} of {amount(stored)} would grow to {amount(held)}: if that is meant, save it uncompressed,"
                " with numpy.savez."
            )
        check_fits(held, f"{path} needs")
        for member in members:
            if member.filename.endswith(".npy"):
                _check_header(archive, member)
    stream.seek(0)


def _check_header(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> None:
    try:
        with archive.open(member) as stream:
            version = npy.read_magic(stream)
            read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
            shape, _, kind = read_header(stream)
            announced = stream.tell() + math.prod(shape) * kind.itemsize
    except OSError:
        raise
    except Exception as error:  # numpy reads the header as Python source, which fails in many ways
        raise ValueError(str(error)) from error
    if not kind.hasobject and announced != member.file_size:
        raise ValueError(f"{member.filename} announces {announced} bytes and has {member.file_size}")
