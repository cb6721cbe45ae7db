"""Classes that are so rare that accuracy says little, and random splits leave clients without them."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from fedrema.base.terminal import safe_logger

SHARE = 0.1
"""A class is rare if its share of the federation's samples is below this and below half of an equal share."""

log = safe_logger("fedrema")


def has_rare_class(counts: NDArray[np.integer]) -> bool:
    """Whether one of the classes that occur is rare, given the number of samples of each class."""
    present = counts[counts > 0]
    return len(present) >= 2 and bool(present.min() < min(SHARE, 0.5 / len(present)) * present.sum())


def decide(rare: bool | None, y: NDArray[np.integer], names: tuple[str, ...]) -> bool:
    """Return whether to treat a class as rare, by default if one is; log once per process what follows from it.

    `names` is empty where classes have no names.
    """
    present, counts = np.unique(y, return_counts=True)  # there may be billions of classes
    if rare is False or not has_rare_class(counts):
        return bool(rare)
    total = int(counts.sum())
    rarest, common = int(np.argmin(counts)), int(np.argmax(counts))
    called = [names[label] if names else str(label) for label in present]
    _log_once(
        f"Note: class {called[rarest]!r} is rare ({counts[rarest]:,} of {total:,} samples, "
        f"{100 * counts[rarest] / total:.1f} %), so log loss is the primary metric and test splits are stratified by "
        f"class; always predicting {called[common]!r} has an accuracy of {100 * counts[common] / total:.1f} %."
    )
    return True


@cache
def _log_once(text: str) -> None:
    log.warning(text)
