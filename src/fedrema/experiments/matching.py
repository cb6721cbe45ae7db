"""How well similarities find the clients of the same group: precision and recall of the most similar peers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedrema.core.similarity import maximum_difference_segmentation
from fedrema.data.partitions import group_of


def true_groups(settings: Mapping[str, Any], clients: int) -> list[int] | None:
    """Return the group of each client; None where the data was not partitioned in groups."""
    grouped = settings.get("partition") == "grouped" and not settings.get("federation")
    if not grouped or settings.get("partition-file"):
        return None
    return [group_of(client, clients, int(settings["groups"])) for client in range(clients)]


def precision_and_recall(similarity: np.ndarray, groups: Sequence[int]) -> tuple[float | None, float | None]:
    """Compare the peers above the largest gap in each row of S with the true groups, without the client itself.

    Precision is the share of chosen peers that are in the client's own group, recall the share of that group that is
    chosen; both are averaged over clients, precision over those that chose anyone. None if there is nothing to average,
    or if a client was absent.
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
