"""Random views of a sample: shifted, brighter or darker, with more or less contrast."""

import torch
from torch import Tensor

from fedrema.core import Moment

VARIETY = 997
"""How many views are drawn; a prime, so that neighbouring samples of clients of any size see different ones."""


def draw_views(moment: Moment, shift: float, jitter: float) -> Tensor:
    """Return two tables [2, VARIETY, 4] of a round: shares to shift down and right, factor and offset of the values."""
    drawn = 2 * torch.rand(2, VARIETY, 4, generator=moment.generator("views"), dtype=torch.float64) - 1
    return drawn * torch.tensor([shift, shift, jitter, jitter]) + torch.tensor([0.0, 0.0, 1.0, 0.0])


def seen(x: Tensor, index: Tensor, views: Tensor) -> Tensor:
    """Return samples [n, ...] as a table of views shows them, by their places among the client's.

    Images [n, c, h, w] are shifted, with their border continued; other numbers are only scaled, and integers, which
    a network looks up, stay as they are.
    """
    if not x.is_floating_point():
        return x
    chosen = views[index % len(views)]
    if x.dim() == 4:
        for axis, by in ((2, chosen[:, 0]), (3, chosen[:, 1])):
            side = x.shape[axis]
            places = torch.arange(side, device=x.device) - (by * side).round()[:, None].long()
            places = places.clamp(0, side - 1)
            where = places[:, None, :, None] if axis == 2 else places[:, None, None, :]
            x = torch.take_along_dim(x, where, dim=axis)
    shape = (-1, *[1] * (x.dim() - 1))
    return x * chosen[:, 2].reshape(shape) + chosen[:, 3].reshape(shape)
