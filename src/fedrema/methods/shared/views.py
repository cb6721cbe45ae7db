"""Random views of a sample for contrastive learning: shifted, with changed brightness and contrast."""

import torch
from torch import Tensor

from fedrema.core import Moment

VIEWS = 997
"""Number of views drawn per round; a prime, so that neighbouring samples of clients of any size use different ones."""


def draw_views(moment: Moment, shift: float, jitter: float) -> Tensor:
    """Draw the views of a round [2, VIEWS, 4]: relative shifts down and right, factor and offset of the values."""
    drawn = 2 * torch.rand(2, VIEWS, 4, generator=moment.generator("views"), dtype=torch.float64) - 1
    return drawn * torch.tensor([shift, shift, jitter, jitter]) + torch.tensor([0.0, 0.0, 1.0, 0.0])


def apply_views(x: Tensor, index: Tensor, views: Tensor) -> Tensor:
    """Return the view of each sample [n, ...], chosen by its position among the client's samples.

    Images [n, c, h, w] are shifted, with repeated borders. Other floating-point samples are only scaled and offset.
    Integers, which index an embedding, are unchanged.
    """
    if not x.is_floating_point():
        return x
    chosen = views[index % len(views)]
    if x.dim() == 4:
        for axis, shifts in ((2, chosen[:, 0]), (3, chosen[:, 1])):
            side = x.shape[axis]
            positions = torch.arange(side, device=x.device) - (shifts * side).round()[:, None].long()
            positions = positions.clamp(0, side - 1)
            indices = positions[:, None, :, None] if axis == 2 else positions[:, None, None, :]
            x = torch.take_along_dim(x, indices, dim=axis)
    shape = (-1, *[1] * (x.dim() - 1))
    return x * chosen[:, 2].reshape(shape) + chosen[:, 3].reshape(shape)
