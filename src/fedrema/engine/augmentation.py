"""Random changes of training images, keyed like dropout: the same in both backends, on every device, after a resume."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from fedrema.base.random import BITS, random_integers
from fedrema.core import Batch

NOISE = 0.1
"""Standard deviation of the noise."""

Draw = Callable[[int, int], Tensor]
"""Returns uniformly distributed integers: how many, and how many different ones from 0 on."""


def augmented(batch: Batch, names: tuple[str, ...]) -> Batch:
    """Return a batch whose images [n, channels, height, width] are changed in the given ways, one after the other."""
    if not names or batch.key is None:
        return batch
    key, draws = batch.key, 0

    def draw(count: int, below: int) -> Tensor:
        nonlocal draws
        draws -= 1  # layers of the network count their draws upwards from 1
        return random_integers(key, draws, count).to(torch.int64) * below >> BITS

    x = batch.x
    for name in names:
        x = AUGMENTATIONS[name](x, draw)
    return replace(batch, x=x)


def flip(x: Tensor, draw: Draw) -> Tensor:
    """Mirror images left to right with probability 1/2."""
    mirrored = draw(len(x), 2) == 1
    return torch.where(mirrored[:, None, None, None], x.flip(-1), x)


def crop(x: Tensor, draw: Draw) -> Tensor:
    """Shift images by up to an eighth of their height and width; zeros move in (padding and random cropping)."""
    height, width = x.shape[2:]
    most = [math.ceil(length / 8) for length in (height, width)]
    rows, columns = (draw(len(x), 2 * each + 1) for each in most)
    padded = functional.pad(x, (most[1], most[1], most[0], most[0]))
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # views: an image for each shift
    return windows[torch.arange(len(x), device=x.device), :, rows, columns]


def cutout(x: Tensor, draw: Draw) -> Tensor:
    """Set a square with half the height of the image, around a random pixel, to zero (DeVries and Taylor, 2017)."""
    height, width = x.shape[2:]
    side = height // 2
    covered = []
    for length in (height, width):
        first = draw(len(x), length) - side // 2
        place = torch.arange(length, device=x.device)
        covered.append((place >= first[:, None]) & (place < first[:, None] + side))
    rows, columns = covered
    square = rows[:, None, :, None] & columns[:, None, None, :]
    return x * (~square).to(x.dtype)


def noise(x: Tensor, draw: Draw) -> Tensor:
    """Add Gaussian noise (by the transform of Box and Muller)."""
    count, scale = x.numel(), 2.0**-BITS
    radius = (-2 * torch.log((draw(count, 1 << BITS) + 1) * scale)).sqrt()  # of (0, 1], because log 0 is infinite
    angle = draw(count, 1 << BITS) * (2 * math.pi * scale)
    return x + (NOISE * radius * torch.cos(angle)).reshape(x.shape).to(x.dtype)


AUGMENTATIONS: dict[str, Callable[[Tensor, Draw], Tensor]] = {
    "flip": flip, "crop": crop, "cutout": cutout, "noise": noise
}  # fmt: skip
"""By their names in `LocalTraining.augment`."""
