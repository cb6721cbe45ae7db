"""Read the publishers' file formats, and verify the content of every file."""

import gzip
import hashlib
import struct
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import numpy as np
from numpy.typing import NDArray

from fedrema.base.files import regular_file
from fedrema.data.sources import SOURCES, Source, SourceFile
from fedrema.errors import BadInput

REMEDY = "delete it to download it again, or replace it by an intact copy"
_IMAGES_MAGIC, _LABELS_MAGIC = 0x0803, 0x0801


def read_source(source: Source, files: Mapping[str, Path]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return pixels [N, C, H, W] and labels [N] from `files`, in the publisher's order."""
    contents = read_contents(source, files)
    if source.layout == "rows":
        parts = [read_rows(contents[file.name], file.name, source.shape) for file in source.files]
    else:
        images, labels = source.files[0::2], source.files[1::2]
        parts = [
            (read_idx(contents[image.name], image.name, 3), read_idx(contents[label.name], label.name, 1))
            for image, label in zip(images, labels, strict=True)
        ]
    x = np.concatenate([pixels.reshape(-1, *source.shape) for pixels, _ in parts])
    y = np.concatenate([labels for _, labels in parts]).astype(np.int64)
    if len(x) != len(y) or (len(y) and y.max() >= source.classes):
        raise BadInput(
            f"dataset {source.name}: {len(x)} images and {len(y)} labels up to {y.max(initial=0)} do not "
            f"match; the numbers must be equal, and labels must be between 0 and {source.classes - 1}."
        )
    return x, y


def read_contents(source: Source, files: Mapping[str, Path]) -> dict[str, bytes]:
    """Return the verified, decompressed content of each file of `source`."""
    if source.archive is not None and source.archive in files:
        return read_archive(files[source.archive], source)
    return {file.name: read_file(files[file.name], file) for file in source.files}


def read_file(path: Path, expected: SourceFile) -> bytes:
    """Return the content of a plain or gzipped file; raise if it differs from the published file."""
    try:
        # Detected by content, because a file may have been decompressed without changing its name.
        with regular_file(path).open("rb") as probe:
            zipped = probe.read(2) == b"\x1f\x8b"
        with path.open("rb") as stream:
            content = _read_at_most(gzip.GzipFile(fileobj=stream) if zipped else stream, expected.size)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _altered(path, f"it does not decompress ({error})") from error
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}.") from error
    verify(content, path, expected)
    return content


def read_archive(path: Path, source: Source) -> dict[str, bytes]:
    """Return the members of a tar archive that belong to `source`, without extracting them to disk."""
    expected = {file.name: file for file in source.files}
    contents: dict[str, bytes] = {}
    try:
        with tarfile.open(regular_file(path), "r|*") as archive:
            for member in archive:
                file = expected.get(Path(member.name).name)
                stream = archive.extractfile(member) if file is not None and member.isfile() else None
                if file is not None and stream is not None:
                    contents[file.name] = _read_at_most(stream, file.size)
                    verify(contents[file.name], path, file)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile, TypeError, ValueError) as error:
        # tarfile raises TypeError and ValueError for some truncated headers.
        raise _altered(path, f"it does not unpack ({error})") from error
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror or error}.") from error
    missing = [name for name in expected if name not in contents]
    if missing:
        raise _altered(path, f"{missing[0]} is not in it")
    return contents


def verify(content: bytes, path: Path, expected: SourceFile) -> None:
    """Raise unless `content` is identical to the published file."""
    digest = hashlib.sha256(content).hexdigest()
    if digest == expected.sha256:
        return
    for other in SOURCES.values():
        if any(file.sha256 == digest for file in other.files):
            raise BadInput(f"{path} is a file of the dataset {other.name}, not the {expected.name} expected here.")
    if len(content) < expected.size:
        detail = f"{expected.name} has {len(content):,} of {expected.size:,} bytes"
    else:
        detail = f"the content of {expected.name} differs from the published file"
    raise _altered(path, detail)


def read_idx(content: bytes, name: str, dimensions: int) -> NDArray[np.uint8]:
    """Parse a byte array in the idx format: a magic number, one size per dimension, the values."""
    magic = _IMAGES_MAGIC if dimensions == 3 else _LABELS_MAGIC
    header = 4 * (1 + dimensions)
    if len(content) < header or struct.unpack(">I", content[:4])[0] != magic:
        raise BadInput(f"{name} is not an idx file of {dimensions} dimensions: it must start with 0x{magic:08x}.")
    shape: tuple[int, ...] = struct.unpack(f">{dimensions}I", content[4:header])
    if len(content) - header != int(np.prod(shape, dtype=object)):
        raise BadInput(
            f"{name} is altered or incomplete: it announces {' x '.join(map(str, shape))} values "
            f"but holds {len(content) - header}; {REMEDY}."
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def read_rows(content: bytes, name: str, shape: tuple[int, int, int]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Parse rows of one label byte followed by the pixels of each channel."""
    width = 1 + shape[0] * shape[1] * shape[2]
    if len(content) == 0 or len(content) % width:
        raise BadInput(
            f"{name} is altered or incomplete: {len(content)} bytes are not a multiple of the row length {width};"
            f" {REMEDY}."
        )
    rows = np.frombuffer(content, np.uint8).reshape(-1, width)
    return rows[:, 1:].reshape(-1, *shape), rows[:, 0]


def _read_at_most(stream: IO[bytes] | gzip.GzipFile, size: int) -> bytes:
    # One extra byte reveals that a file is too long without decompressing all of it.
    return stream.read(size + 1)


def _altered(path: Path, detail: str) -> BadInput:
    return BadInput(f"{path} is altered or incomplete: {detail}; {REMEDY}.")
