"""The narrow AlexNet with another boundary between body and head."""

from collections import OrderedDict

from torch import nn


def narrow_alexnet(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the paper's AlexNet with a quarter of its channels and hidden units; the head is the last layer."""
    body = nn.Sequential(
        nn.Conv2d(shape[0], 8, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1),
        nn.MaxPool2d(3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(576, 256), nn.Linear(256, 128),
    )  # fmt: skip
    return nn.Sequential(OrderedDict(body=body, head=nn.Linear(128, classes)))
