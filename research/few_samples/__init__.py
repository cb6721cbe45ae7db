"""Experiments with 100 samples per client, on a network that a CPU can train."""

from collections import OrderedDict

from torch import nn


def narrow_alexnet(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Return the paper's AlexNet with a quarter of its channels and hidden units; the head has three linear layers."""
    body = nn.Sequential(
        nn.Conv2d(shape[0], 8, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1),
        nn.MaxPool2d(3, 2), nn.ReLU(), nn.Flatten(),
    )  # fmt: skip
    head = nn.Sequential(nn.Linear(576, 256), nn.Linear(256, 128), nn.Linear(128, classes))
    return nn.Sequential(OrderedDict(body=body, head=head))
