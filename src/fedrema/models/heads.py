"""Attach a classifier to a body, after a projection if requested."""

import itertools
from collections.abc import Callable

from torch import nn

from fedrema.base.memory import check_fits
from fedrema.models.body_and_head import BodyAndHead

Shape = tuple[int, ...]

COPIES_IN_MEMORY = 4
"""Copies of a network in memory before training: the module, the whole, the body with its head, the initial values."""


def check_size(what: str, *widths: int) -> None:
    """Raise `BadInput` if consecutive linear layers of these widths do not fit into memory."""
    numbers = sum((inputs + 1) * outputs for inputs, outputs in itertools.pairwise(widths))
    check_fits(COPIES_IN_MEMORY * 4 * numbers, f"A network with {what} needs")


def with_head(
    body: nn.Sequential, features: int, projection: int, widths: Shape, head: Callable[[int], nn.Module]
) -> BodyAndHead:
    """Return a body with a head whose layers have these widths, after a two-layer projection if requested.

    Parameters
    ----------
    body
        The feature extractor.
    features
        The width of its output.
    projection
        The width of the projection; 0: none.
    widths
        The widths of the head's layers; the last is the number of classes.
    head
        Returns the head for inputs of a width.
    """
    projected = (features, projection) if projection else ()
    check_size(f"--projection {projection} and {widths[-1]} classes", features, *projected, *widths)
    if projection:
        body.extend([nn.Linear(features, features), nn.ReLU(), nn.Linear(features, projection)])
    return BodyAndHead(body, head(projection or features))


def with_linear_head(body: nn.Sequential, features: int, projection: int, classes: int) -> BodyAndHead:
    """Return a body with one linear layer as the head, after a two-layer projection if requested."""
    return with_head(body, features, projection, (classes,), lambda inputs: nn.Linear(inputs, classes))
