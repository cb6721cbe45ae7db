"""What layers need to know about the batch that a network computes on: padding, trained tensors, random numbers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from fedrema.errors import BadInput


class BatchContext:
    """The batch that a network is computing on, shared by all its layers."""

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        """[n] 1 for real samples and 0 for padding; None if all samples are real."""
        self.trained: Mapping[int, Tensor] = {}
        """The tensors of the client that is being trained, by their `id`; their statistics are updated."""
        self.samples: int | None = None
        """Number of samples n of the batch, with padding; None outside training."""
        self.key: Tensor | None = None
        """Keys the random numbers of this client and step; None outside training."""
        self.draws = 0
        """How often layers have drawn random numbers for this batch."""
        self._generators: dict[torch.device, torch.Generator] = {}
        """By device; made when a layer first needs one for this batch."""

    @contextmanager
    def batch(
        self, mask: Tensor | None, trained: Mapping[int, Tensor], key: Tensor | None, samples: int | None
    ) -> Iterator[None]:
        """Set the batch while the context lasts; the count of its draws starts again."""
        previous = self.key, self.samples, self.draws, self._generators
        self.key, self.samples, self.draws, self._generators = key, samples, 0, {}
        try:
            with self.entered(mask, trained):
                yield
        finally:
            self.key, self.samples, self.draws, self._generators = previous

    @contextmanager
    def entered(self, mask: Tensor | None, trained: Mapping[int, Tensor]) -> Iterator[None]:
        """Set the mask of a batch and the tensors of the training client while the context lasts."""
        previous = self.mask, self.trained
        self.mask, self.trained = mask, trained
        try:
            yield
        finally:
            self.mask, self.trained = previous

    def mask_of(self, x: Tensor) -> Tensor:
        """Return which of the samples in x [n, ...] are real."""
        if self.mask is None:
            return x.new_ones(len(x))
        if len(self.mask) != len(x):
            raise BadInput(
                f"Batch norm received {len(x)} samples but the batch has {len(self.mask)}, so it does not know which of"
                " them are padding: pass a mask in the loss, net(params, x, mask), or use --backend loop."
            )
        return self.mask

    def generator(self, device: torch.device) -> torch.Generator:
        """Return the generator of this batch, for functions that have no keyed replacement."""
        assert self.key is not None
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(int(self.key))
        return self._generators[device]

    def next_draw(self) -> int:
        """Return the number of the next draw; calls of layers are counted in the order of the network's `forward`."""
        self.draws += 1
        return self.draws
