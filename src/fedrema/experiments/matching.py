"""How well similarities find the clients that truly belong together: precision and recall of the sets A_k."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fedrema.data.partitions import group_of
from fedrema.methods.fedrema import maximum_difference_segmentation


def true_groups(settings: dict[str, Any], clients: int) -> list[int] | None:
    """Return which group each client was dealt to; None where the data was not dealt in groups."""
    dealt = settings.get("partition") == "grouped" and not settings.get("federation")
    if not dealt or settings.get("partition-file"):
        return None
    return [group_of(client, clients, int(settings["groups"])) for client in range(clients)]


def precision_and_recall(similarity: np.ndarray, groups: Sequence[int]) -> tuple[float | None, float | None]:
    """Compare the sets that MDS cuts out of S with the true groups; oneself does not count.

    Precision is the share of chosen peers that are of one's own group, recall the share of one's group that is
    chosen; both are averaged over clients, precision over those that chose anybody. None where there is nothing to
    average, or where someone was absent.
    """
    if np.isnan(similarity).any():
        return None, None
    chosen, _ = maximum_difference_segmentation(torch.as_tensor(similarity))
    peers = ~np.eye(len(groups), dtype=bool)
    picked = chosen.numpy() & peers
    related = (np.asarray(groups)[:, None] == np.asarray(groups)) & peers
    right = (picked & related).sum(axis=1)
    return _mean(right, picked.sum(axis=1)), _mean(right, related.sum(axis=1))


def _mean(right: np.ndarray, of: np.ndarray) -> float | None:
    known = of > 0
    return float((right[known] / of[known]).mean()) if known.any() else None
