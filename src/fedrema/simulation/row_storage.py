"""Where tensors with a row for every client are kept: in memory or, where there are too many, in files."""

import math
import mmap
import os
import tempfile
import weakref
from pathlib import Path

import torch
from torch import Tensor

from fedrema.errors import BadInput
from fedrema.models.body_and_head import Tensors


class RowStorage:
    """Makes room for rows; on disk they are ordinary tensors too, whose pages the system fetches and writes.

    The files have no names: whatever ends the program, nothing of them is left.
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
        """Put rows here, unless they are here already."""
        if not self.on_disk:
            return value.to(self.device)
        kept = self.zeros(len(value), value[0]) if len(value) else value
        kept.copy_(value)
        return kept

    def release(self) -> None:
        """Let go of the memory that files take at the moment; their content stays."""
        for mapped in list(self._maps):
            if hasattr(mapped, "madvise"):  # not on Windows
                mapped.madvise(mmap.MADV_DONTNEED)


class Rows:
    """Named tensors [count, ...] that are put together from groups of clients."""

    def __init__(self, count: int, storage: RowStorage) -> None:
        self.count, self.storage = count, storage
        self.tensors: Tensors = {}

    def put(self, first: int, values: Tensors) -> None:
        """Add the rows of some clients, the first of which has this place."""
        for name, value in values.items():
            if len(value) == self.count and not self.storage.on_disk:
                self.tensors[name] = value
                continue
            kept = self.tensors.get(name)
            if kept is None or kept.shape[1:] != value.shape[1:]:
                # What has an entry per sample is as long as the longest client so far.
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


def assign(everyone: Tensor, rows: Tensor | slice, values: Tensor) -> None:
    """Write some clients' rows, in place; where theirs are shorter (an entry per sample), the rest becomes 0."""
    if everyone.shape[1:] == values.shape[1:]:
        everyone[rows] = values.to(everyone)
    else:
        everyone[rows] = 0
        everyone[rows, : values.shape[1]] = values.to(everyone)
