"""Digits whose clients differ in something else than class frequencies: `--federation research.limits:turned`."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

import fedrema

GROUP = 4
"""So many of the 20 clients are alike."""
Samples = tuple[NDArray[Any], NDArray[np.int64], NDArray[np.int64]]


def dealt_digits() -> fedrema.Federation:
    """Deal digits so that all clients have all classes alike."""
    return fedrema.make_federation(dataset="digits", s=1.0)


def even() -> Samples:
    """Return x, y and client as they were dealt: nothing differs."""
    dealt = dealt_digits()
    return dealt.x, dealt.y, dealt.client


def other_names() -> Samples:
    """Return x, y and client: every group calls the same digit differently."""
    dealt = dealt_digits()
    return dealt.x, (dealt.y + 2 * (dealt.client // GROUP)) % dealt.classes, dealt.client


def turned() -> Samples:
    """Return x, y and client: every group writes on paper that lies differently, by quarters of a turn."""
    dealt = dealt_digits()
    quarters = dealt.client // GROUP
    x = np.stack([np.rot90(image, each, axes=(-2, -1)) for image, each in zip(dealt.x, quarters, strict=True)])
    return x, dealt.y, dealt.client
