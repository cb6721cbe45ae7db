"""Writes a safetensors file row by row: what is larger than memory can be saved, which the library cannot do."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from fedrema.net import Tensors

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
AT_ONCE = 2**26
"""Bytes that are copied at a time."""


def write_tensors(file: Path, tensors: Tensors, metadata: Mapping[str, str]) -> None:
    """Write tensors with their digest, which is found on the way and then put into the header."""
    digest = hashlib.blake2b(digest_size=16)
    with file.open("wb") as out, ThreadPoolExecutor(1) as beside:
        out.write(_header(tensors, {**metadata, "digest": digest.hexdigest()}))
        for name in sorted(tensors):
            digest.update(name.encode())
            for piece in _pieces(tensors[name]):
                hashed = beside.submit(digest.update, piece)
                out.write(piece)
                hashed.result()
        out.seek(0)
        out.write(_header(tensors, {**metadata, "digest": digest.hexdigest()}))


def digest_of(tensors: Tensors) -> str:
    """Return what `write_tensors` found while writing these."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(name.encode())
        for piece in _pieces(tensors[name]):
            digest.update(piece)
    return digest.hexdigest()


def _header(tensors: Tensors, metadata: Mapping[str, str]) -> bytes:
    """Return the format's beginning: the length of a JSON object, and the object."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in sorted(tensors):
        value = tensors[name]
        begin, end = end, end + value.numel() * value.element_size()
        entries[name] = {"dtype": NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of eight bytes
    return len(text).to_bytes(8, "little") + text


def _pieces(value: Tensor) -> Iterator[memoryview]:
    """Yield a tensor's bytes, some rows at a time."""
    rows = value.detach() if value.dim() else value.detach()[None]
    each = max(1, rows[0].numel() * rows.element_size()) if len(rows) else 1
    for part in torch.split(rows, max(1, AT_ONCE // each)):
        if part.numel():
            yield part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
