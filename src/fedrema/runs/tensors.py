"""Writes safetensors files row by row, which the library cannot do, and verifies them when they are read.

This way tensors that are larger than memory can be saved.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fedrema.base.files import regular_file
from fedrema.models.body_and_head import Tensors

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DIGEST_BYTES = 16
CHUNK_BYTES = 2**26
"""Bytes that are copied at a time."""


class Incomplete(Exception):
    """The file is truncated, or was not written by `write_tensors`."""


class Altered(Exception):
    """The file does not match its digests."""


def write_tensors(file: Path, tensors: Tensors, metadata: Mapping[str, str]) -> None:
    """Write tensors with digests, which are computed while writing and then put into the header.

    The metadata gets `digests`, one per tensor over its name, type, shape and bytes, and `digest`, over all metadata: a
    part of the file can be verified without reading the whole.
    """
    names = sorted(tensors)
    digests = dict.fromkeys(names, "0" * 2 * DIGEST_BYTES)
    with file.open("wb") as out, ThreadPoolExecutor(1) as hashing:
        out.write(_header(tensors, _sealed(metadata, digests)))
        for name in names:
            digest = _new_digest(name, tensors[name])
            for piece in _pieces(tensors[name]):
                hashed = hashing.submit(digest.update, piece)
                out.write(piece)
                hashed.result()
            digests[name] = digest.hexdigest()
        out.seek(0)
        out.write(_header(tensors, _sealed(metadata, digests)))


def read_metadata(file: Path) -> dict[str, str]:
    """Return the metadata of a file, which only `read_tensors` verifies."""
    with _opened(file) as content:
        return dict(content.metadata() or {})


def read_tensors(file: Path, wanted: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Return all tensors of a file, or those wanted that it has; the metadata is verified with them.

    Raises
    ------
    Incomplete
        If the file is truncated, or was not written by `write_tensors`.
    Altered
        If the file does not match its digests.
    """
    with _opened(file) as content:
        metadata = dict(content.metadata() or {})
        names = list(content.keys())
        tensors = {name: content.get_tensor(name) for name in names if wanted is None or name in wanted}
    if metadata.pop("digest", None) != _of_metadata(metadata):
        raise Altered
    digests = json.loads(metadata["digests"])
    if digests.keys() != set(names) or any(digest_of(name, value) != digests[name] for name, value in tensors.items()):
        raise Altered
    return tensors


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(regular_file(file), framework="pt") as content:
            yield content
    except OSError as error:
        raise Incomplete(error.strerror or str(error)) from error
    except SafetensorError as error:
        raise Incomplete(str(error)) from error


def digest_of(name: str, value: Tensor) -> str:
    """Return the digest of a tensor under its name."""
    digest = _new_digest(name, value)
    for piece in _pieces(value):
        digest.update(piece)
    return digest.hexdigest()


def _new_digest(name: str, value: Tensor) -> "hashlib.blake2b":
    facts = json.dumps([name, NAMES[value.dtype], list(value.shape)])
    return hashlib.blake2b(facts.encode(), digest_size=DIGEST_BYTES)


def _sealed(metadata: Mapping[str, str], digests: Mapping[str, str]) -> dict[str, str]:
    found = {**metadata, "digests": json.dumps(digests)}
    return {**found, "digest": _of_metadata(found)}


def _of_metadata(metadata: Mapping[str, str]) -> str:
    content = json.dumps(metadata, sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=DIGEST_BYTES).hexdigest()


def _header(tensors: Tensors, metadata: Mapping[str, str]) -> bytes:
    """Return the header of the format: the length of a JSON object, and the object."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in sorted(tensors):
        value = tensors[name]
        begin, end = end, end + value.numel() * value.element_size()
        entries[name] = {"dtype": NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of eight bytes
    return len(text).to_bytes(8, "little") + text


def _pieces(value: Tensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes, some rows at a time."""
    rows = value.detach() if value.dim() else value.detach()[None]
    each = max(1, rows[0].numel() * rows.element_size()) if len(rows) else 1
    for part in torch.split(rows, max(1, CHUNK_BYTES // each)):
        if part.numel():
            yield part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
