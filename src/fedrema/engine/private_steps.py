"""Gradients of differentially private SGD: clipped for each sample, summed, and noised; for one or all clients."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from fedrema.base.random import random_normals
from fedrema.core import Batch, Client, Loss
from fedrema.core.aggregation import per_client
from fedrema.core.checks import check_loss
from fedrema.engine.augmentation import augmented
from fedrema.models.body_and_head import Net, Tensors

SAMPLE_STEP = 0x5851F42D4C957F2D
"""Between the keys of consecutive samples of a batch; an odd number, so that all of them differ."""
FIRST_DRAW = 1 << 32
"""Number of the first draw for noise. Layers and augmentations use draws near 0."""

SampleGradients = Callable[[Loss, Client, Batch, tuple[str, ...]], tuple[Tensors, Tensor]]
"""Returns the gradients of each sample of a batch [..., n, ...] for the named parameters, and the losses [..., n]."""


@dataclass(frozen=True)
class SampleNoise:
    """How each sample's gradient is clipped, and their sum noised."""

    clip: float
    """Norm of a sample's gradient over all parameters that the phase trains."""
    multiplier: float
    """Standard deviation of the noise on the sum, as a multiple of `clip`."""

    def private_gradient(self, gradients: Tensors, batch: Batch, expected: Tensor, axes: int) -> Tensors:
        """Return the sum of the clipped gradients plus noise, divided by the expected number of samples.

        Parameters
        ----------
        gradients
            Of each sample [n, ...], or of each client's samples [k, n, ...] if `axes` is 1.
        batch
            The batch; its `mask` says which samples are real, and its `key` keys the noise.
        expected
            Expected number of samples of a batch: one number, or one per client.
        axes
            1 if tensors have a leading client axis, else 0.
        """
        flat = [value.reshape(*value.shape[: axes + 1], -1) for value in gradients.values()]
        # In double precision, so that squares do not overflow.
        norms = torch.linalg.vector_norm(torch.cat(flat, dim=-1), dim=-1, dtype=torch.float64)
        factors = (self.clip / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1)  # with norm 0 it is 1
        # A gradient that is not finite cannot be clipped and counts as 0: to stop instead would depend on one sample.
        left_out = (batch.mask == 0) | ~torch.isfinite(norms)
        found: Tensors = {}
        for number, (name, value) in enumerate(gradients.items()):
            clipped = (value * per_client(factors.to(value), value)).masked_fill(per_client(left_out, value), 0)
            total = clipped.sum(dim=axes)
            noise = self._noise(batch.key, FIRST_DRAW + number, total, axes)
            found[name] = (total + noise) / per_client(expected, total)
        return found

    def _noise(self, key: Tensor | None, draw: int, like: Tensor, axes: int) -> Tensor:
        assert key is not None
        count = like[0].numel() if axes else like.numel()

        def normals(one: Tensor) -> Tensor:
            return random_normals(one, draw, count)

        drawn = vmap(normals)(key) if axes else normals(key)
        return (self.multiplier * self.clip * drawn).reshape(like.shape).to(like.dtype)


def sample_gradients(
    net: Net, loss: Loss, client: Client, batch: Batch, names: tuple[str, ...], augmentations: tuple[str, ...]
) -> tuple[Tensors, Tensor]:
    """Return the gradients of each sample of one client's batch [n, ...], and the losses [n].

    The loss of a sample is that of a batch which contains only this sample. Random layers draw numbers of their own for
    each sample.
    """
    key = torch.zeros((), dtype=torch.int64, device=batch.x.device) if batch.key is None else batch.key
    keys = key + SAMPLE_STEP * torch.arange(1, len(batch.y) + 1, device=key.device)

    def loss_of_sample(trained: Tensors, x: Tensor, y: Tensor, mask: Tensor, index: Tensor, one: Tensor) -> Tensor:
        its = augmented(Batch(x[None], y[None], torch.ones_like(mask)[None], index[None], one), augmentations)
        params = {**client.params, **trained}
        with net.batch_context(None, params, one, 1):
            return check_loss(loss, loss(net, client.having(params=params), its))

    trained = {name: client.params[name] for name in names}
    each = vmap(grad_and_value(loss_of_sample), in_dims=(None, 0, 0, 0, 0, 0))
    found: tuple[Tensors, Tensor] = each(trained, batch.x, batch.y, batch.mask, batch.index, keys)
    return found
