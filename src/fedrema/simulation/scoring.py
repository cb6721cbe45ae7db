"""Count correct predictions, from which metrics are computed."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def count_correct(predicted: Tensor, labels: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return how many predictions are correct, and how many samples there are: [k, 2] each, by half.

    `predicted` [k, n] is -1 where there is no sample. Test samples are in random order, so every second sample makes
    a fair half.
    """
    is_sample = predicted >= 0
    is_correct = (predicted == labels) & is_sample
    counts = [flags[:, start::2].sum(1) for flags in (is_correct, is_sample) for start in (0, 1)]
    found = torch.stack(counts, dim=1).cpu().numpy()  # one transfer: each one waits for the GPU
    return found[:, :2], found[:, 2:]


def concatenate_counts(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the counts of several groups of clients as those of one group."""
    correct, samples = zip(*parts, strict=True)
    return np.concatenate(correct), np.concatenate(samples)
