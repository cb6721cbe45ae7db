"""Batch norm for padded batches: only real samples count, and only the training client's statistics are updated.

The batch-norm layers of a network are replaced in place by these; their tensors keep their names. In training, mean and
variance are those of the real samples of the batch. Running statistics are updated only if they are tensors of the
client's `params` (including those of a second model), with every gradient that is computed and whichever part of the
network a phase trains. Statistics of other models (the received one, a copy in the client's memory, detached tensors)
never change. A batch with a single value per channel has no variance: its output is the layer's bias, and, like a batch
without samples, it does not update the statistics.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from fedrema.models.batch_context import BatchContext


class MaskedBatchNorm(_BatchNorm):
    """Batch norm over the real samples of a batch."""

    context: BatchContext

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name; it may be passed by keyword)
        """Normalise [n, channels, ...]: in training by the batch, otherwise by the running statistics."""
        mean, variance = self.running_mean, self.running_var
        if self.training or mean is None or variance is None:
            return self._normalise_by_batch(input)
        if self.context.mask is None:
            return functional.batch_norm(input, mean, variance, self.weight, self.bias, eps=self.eps)
        return self._normalise(input, mean, variance)

    def _normalise_by_batch(self, x: Tensor) -> Tensor:
        updates = id(self.running_mean) in self.context.trained
        if self.context.mask is None and self.momentum is not None and x.numel() > x.shape[1]:
            # Without padding, torch's own function is usable; on a CPU it takes a third of the time.
            running = (self.running_mean, self.running_var) if updates else (None, None)
            return functional.batch_norm(x, *running, self.weight, self.bias, True, self.momentum, self.eps)
        values = _at_least_float32(x)
        mask = self.context.mask_of(x).to(values.dtype)
        mean, variance = masked_moments(values, mask)
        if updates:
            self._update_statistics(mean, variance, mask.sum() * math.prod(x.shape[2:]))
        return self._normalise(x, mean, variance)

    def _normalise(self, x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        scale = torch.rsqrt(variance + self.eps)
        scale = _per_channel(scale if self.weight is None else scale * self.weight, x)
        centred = _at_least_float32(x) - _per_channel(mean, x)
        y = centred * scale if self.bias is None else torch.addcmul(_per_channel(self.bias, x), centred, scale)
        return y.to(x.dtype)

    @torch.no_grad()
    def _update_statistics(self, mean: Tensor, variance: Tensor, values: Tensor) -> None:
        """Update the running statistics with those of a batch of `values` real values per channel."""
        batch = {"running_mean": mean, "running_var": variance * values / (values - 1).clamp(min=1)}
        running = {name: self.get_buffer(name) for name in batch}
        share: Tensor | float | None = self.momentum
        if share is None:  # a cumulative average over all batches
            batches = self.get_buffer("num_batches_tracked")
            share = 1 / (batches + 1)
            _assign_where(batches, batches + 1, values > 1)
        for name, buffer in running.items():
            _assign_where(buffer, buffer + share * (batch[name] - buffer), values > 1)


# The subclasses have the names of torch's layers, because these appear in messages about a user's network.


class BatchNorm1d(MaskedBatchNorm, nn.BatchNorm1d):
    """For inputs [n, channels] or [n, channels, length]."""


class BatchNorm2d(MaskedBatchNorm, nn.BatchNorm2d):
    """For inputs [n, channels, height, width]."""


class BatchNorm3d(MaskedBatchNorm, nn.BatchNorm3d):
    """For inputs [n, channels, depth, height, width]."""


MASKED_LAYERS: dict[type[nn.Module], type[MaskedBatchNorm]] = {
    nn.BatchNorm1d: BatchNorm1d,
    nn.BatchNorm2d: BatchNorm2d,
    nn.BatchNorm3d: BatchNorm3d,
}


def masked_moments(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and (biased) variance of each channel of x [n, channels, ...] over the real samples; 0 if none."""
    inside = tuple(range(2, x.dim()))
    # Per sample first: this reads x once, and the mask is applied to the small result.
    variances, means = torch.var_mean(x, inside, correction=0) if inside else (torch.zeros_like(x), x)
    share = (mask / mask.sum().clamp(min=1))[:, None]
    mean = (share * means).sum(dim=0)
    return mean, (share * (variances + (means - mean).square())).sum(dim=0)


def mask_batch_norm(module: nn.Module, context: BatchContext) -> None:
    """Replace the batch-norm layers of a module by masked ones, in place."""
    for layer in module.modules():
        if type(layer) in MASKED_LAYERS:
            layer.__class__ = MASKED_LAYERS[type(layer)]
            assert isinstance(layer, MaskedBatchNorm)
            layer.context = context
            if layer.momentum is None and layer.track_running_stats:
                # The number of averaged batches is part of a client's model, whose tensors are all floats.
                layer.num_batches_tracked = layer.get_buffer("num_batches_tracked").to(layer.running_mean)


def restore_batch_norm(module: nn.Module) -> nn.Module:
    """Replace masked batch-norm layers by torch's, in place."""
    originals: dict[type[nn.Module], type[nn.Module]] = {masked: kind for kind, masked in MASKED_LAYERS.items()}
    for layer in module.modules():
        if isinstance(layer, MaskedBatchNorm):
            del layer.context
            if layer.num_batches_tracked is not None:
                layer.num_batches_tracked = layer.num_batches_tracked.long()
            layer.__class__ = originals[type(layer)]  # type: ignore[assignment]
    return module


def _per_channel(channels: Tensor, x: Tensor) -> Tensor:
    return channels.reshape((-1, *[1] * (x.dim() - 2)))


def _at_least_float32(x: Tensor) -> Tensor:
    """Return x in at least 32 bits; the previous layer may compute in 16."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _assign_where(target: Tensor, value: Tensor, condition: Tensor) -> None:
    target.copy_(torch.where(condition, value, target))
