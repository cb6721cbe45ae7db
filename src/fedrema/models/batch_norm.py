"""Batch norm for clients of unequal size: it looks at real samples only, and changes the client's own statistics only.

A network's layers are turned into these where they stand; their tensors keep their names. In training, mean and
variance are those of the batch's real samples. Running statistics move where they are the client's own (the very
tensors of its `params`, so also those of a second model among them), with every gradient that is taken there and
whichever part of the network a phase trains. Those of models that the client only looks at (what it received, a copy
in its memory, detached tensors) never change. A batch of a single value per channel has no variance: it becomes the
layer's shift, and like no sample at all it leaves the statistics alone.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from fedrema.errors import BadInput


class Sight:
    """What a network looks at: all its layers ask this."""

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        """[n] 1 for real samples and 0 for padding; None where all are real."""
        self.own: Mapping[int, Tensor] = {}
        """By their `id`, the tensors whose client trains."""

    @contextmanager
    def on(self, mask: Tensor | None, own: Mapping[int, Tensor]) -> Iterator[None]:
        """Look at samples, with a client that owns some tensors."""
        before = self.mask, self.own
        self.mask, self.own = mask, own
        try:
            yield
        finally:
            self.mask, self.own = before

    def of(self, x: Tensor) -> Tensor:
        """Return which of the samples in x [n, ...] are real."""
        if self.mask is None:
            return x.new_ones(len(x))
        if len(self.mask) != len(x):
            raise BadInput(
                f"Batch norm was given {len(x)} samples where the batch has {len(self.mask)}, so that it cannot tell"
                " which are real: use --backend loop, or say so in the loss, as net(params, x, mask)."
            )
        return self.mask


class RealSamples(_BatchNorm):
    """Batch norm over the real samples of a batch."""

    sight: Sight

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name: it may be given by keyword)
        """Normalise [n, channels, ...]: by the running statistics in use, by the batch's in training."""
        mean, variance = self.running_mean, self.running_var
        if self.training or mean is None or variance is None:
            return self._by_batch(input)
        if self.sight.mask is None:
            return functional.batch_norm(input, mean, variance, self.weight, self.bias, eps=self.eps)
        return self._normalised(input, mean, variance)

    def _by_batch(self, x: Tensor) -> Tensor:
        own = id(self.running_mean) in self.sight.own
        if self.sight.mask is None and self.momentum is not None and x.numel() > x.shape[1]:
            # Nothing is padded: on a CPU torch's own takes a third of the time.
            running = (self.running_mean, self.running_var) if own else (None, None)
            return functional.batch_norm(x, *running, self.weight, self.bias, True, self.momentum, self.eps)
        wide = _wide(x)
        mask = self.sight.of(x).to(wide.dtype)
        mean, variance = moments(wide, mask)
        if own:
            self._count(mean, variance, mask.sum() * math.prod(x.shape[2:]))
        return self._normalised(x, mean, variance)

    def _normalised(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        scale = torch.rsqrt(variance + self.eps)
        scale = _along(scale if self.weight is None else scale * self.weight, x)
        apart = _wide(x) - _along(mean, x)
        y = apart * scale if self.bias is None else torch.addcmul(_along(self.bias, x), apart, scale)
        return y.to(x.dtype)

    @torch.no_grad()
    def _count(self, mean: Tensor, variance: Tensor, values: Tensor) -> None:
        """Move the running statistics towards those of so many values per channel."""
        found = {"running_mean": mean, "running_var": variance * values / (values - 1).clamp(min=1)}
        running = {name: self.get_buffer(name) for name in found}
        share: Tensor | float | None = self.momentum
        if share is None:  # they are the mean over all batches so far
            batches = self.get_buffer("num_batches_tracked")
            share = 1 / (batches + 1)
            _put(batches, batches + 1, values > 1)
        for name, place in running.items():
            _put(place, place + share * (found[name] - place), values > 1)


class BatchNorm1d(RealSamples, nn.BatchNorm1d):
    """Of [n, channels] or [n, channels, length]."""


class BatchNorm2d(RealSamples, nn.BatchNorm2d):
    """Of [n, channels, height, width]."""


class BatchNorm3d(RealSamples, nn.BatchNorm3d):
    """Of [n, channels, depth, height, width]."""


OURS: dict[type[nn.Module], type[RealSamples]] = {
    nn.BatchNorm1d: BatchNorm1d,
    nn.BatchNorm2d: BatchNorm2d,
    nn.BatchNorm3d: BatchNorm3d,
}


def moments(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and (biased) variance of each channel of x [n, channels, ...] over real samples; 0 of none."""
    inside = tuple(range(2, x.dim()))
    # Each sample's own first: that reads everything once, and padding is left out where there is little to read.
    variances, means = torch.var_mean(x, inside, correction=0) if inside else (torch.zeros_like(x), x)
    share = (mask / mask.sum().clamp(min=1))[:, None]
    mean = (share * means).sum(dim=0)
    return mean, (share * (variances + (means - mean).square())).sum(dim=0)


def adopt(module: nn.Module, sight: Sight) -> None:
    """Turn the batch norms of a module into ours, in place."""
    for layer in module.modules():
        if type(layer) in OURS:
            layer.__class__ = OURS[type(layer)]
            assert isinstance(layer, RealSamples)
            layer.sight = sight
            if layer.momentum is None and layer.track_running_stats:
                # The number of batches that a mean is of belongs to a client's model, all of which is floats.
                layer.num_batches_tracked = layer.get_buffer("num_batches_tracked").to(layer.running_mean)


def release(module: nn.Module) -> nn.Module:
    """Turn ours into torch's again, in place."""
    theirs: dict[type[nn.Module], type[nn.Module]] = {ours: kind for kind, ours in OURS.items()}
    for layer in module.modules():
        if isinstance(layer, RealSamples):
            del layer.sight
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked = layer.num_batches_tracked.long()
            layer.__class__ = theirs[type(layer)]  # type: ignore[assignment]
    return module


def _along(channels: Tensor, x: Tensor) -> Tensor:
    return channels.reshape((-1, *[1] * (x.dim() - 2)))


def _wide(x: Tensor) -> Tensor:
    """Return x in 32 bits at least: a layer before may hand on sixteen."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _put(place: Tensor, value: Tensor, where: Tensor) -> None:
    place.copy_(torch.where(where, value, place))
