"""Storage of tensors with a row for every client: in memory, or in files if they do not fit."""

import math
import mmap
import os
import tempfile
import weakref
from pathlib import Path

import torch
from torch import Tensor

from fedrema.engine.cohort import RowIndex
from fedrema.errors import BadInput
from fedrema.models.body_and_head import Tensors


class RowStorage:
    """Allocates rows in memory or in memory-mapped files, which are ordinary tensors too.

    The files are temporary and have no names, so that none is left behind when the program ends.
    """

    def __init__(self, device: torch.device, on_disk: bool = False, folder: Path | None = None) -> None:
        self.device = torch.device("cpu") if on_disk else device
        self.on_disk = on_disk
        self.folder = folder
        self._maps: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()

    def zeros(self, rows: int, like: Tensor) -> Tensor:
        """Return zeros [rows, ...], each row in the shape of `like`."""
        shape = (rows, *like.shape)
        if not self.on_disk or not math.prod(shape):
            return torch.zeros(shape, dtype=like.dtype, device=self.device)
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                os.ftruncate(file.fileno(), math.prod(shape) * like.element_size())
                mapped = mmap.mmap(file.fileno(), 0)
        except OSError as error:
            where = self.folder or tempfile.gettempdir()
            raise BadInput(f"--scratch {where} cannot hold what does not fit into memory: {error}.") from error
        self._maps.add(mapped)
        return torch.frombuffer(mapped, dtype=like.dtype).view(shape)

    def keep(self, value: Tensor) -> Tensor:
        """Return rows in this storage; copies them if they are elsewhere."""
        if not self.on_disk:
            return value.to(self.device)
        stored = self.zeros(len(value), value[0]) if len(value) else value
        stored.copy_(value)
        return stored

    def release(self) -> None:
        """Release the memory that caches the files; their content is kept."""
        for mapped in list(self._maps):
            if hasattr(mapped, "madvise"):  # not on Windows
                mapped.madvise(mmap.MADV_DONTNEED)


class Rows:
    """Named tensors [count, ...] that are filled group by group."""

    def __init__(self, count: int, storage: RowStorage) -> None:
        self.count, self.storage = count, storage
        self.tensors: Tensors = {}

    def put(self, first: int, values: Tensors) -> None:
        """Write the rows of a group of clients, beginning with row `first`."""
        for name, value in values.items():
            if len(value) == self.count and not self.storage.on_disk:
                self.tensors[name] = value
                continue
            kept = self.tensors.get(name)
            if kept is None or kept.shape[1:] != value.shape[1:]:
                # Tensors with an entry per sample are as long as those of the largest client so far.
                kept = self._widened(kept, value)
            assign(kept, slice(first, first + len(value)), value)
            self.tensors[name] = kept

    def _widened(self, kept: Tensor | None, value: Tensor) -> Tensor:
        if kept is None:
            return self.storage.zeros(self.count, value[0])
        width = max(kept.shape[1], value.shape[1])
        wide = self.storage.zeros(self.count, value.new_empty(width, *value.shape[2:]))
        assign(wide, slice(None), kept)
        return wide


def assign(stored: Tensor, rows: RowIndex, values: Tensor) -> None:
    """Write some clients' rows in place; rows that are shorter (with an entry per sample) are padded with 0."""
    if stored.shape[1:] == values.shape[1:]:
        stored[rows] = values.to(stored)
    else:
        stored[rows] = 0
        stored[rows, : values.shape[1]] = values.to(stored)
