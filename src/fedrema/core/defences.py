"""Robust replacements of the mean over clients: of stacked updates, some of which attackers may have sent."""

import math
from typing import Literal

import torch
from torch import Tensor

from fedrema.core.aggregation import average, per_client
from fedrema.models.body_and_head import Tensors

Defence = Literal["none", "median", "trimmed-mean", "krum", "norm-bound"]


def assumed_attackers(share: float, clients: int) -> int:
    """Return how many of some clients a share is, rounded up."""
    return math.ceil(share * clients - 1e-9)


def coordinate_median(rows: Tensors) -> Tensors:
    """Return the median of each coordinate over the clients (Yin et al., 2018); of two middle values, their mean."""
    found = {}
    for name, value in rows.items():
        ordered, clients = value.sort(dim=0).values, len(value)
        found[name] = (ordered[(clients - 1) // 2] + ordered[clients // 2]) / 2
    return found


def trimmed_mean(rows: Tensors, trimmed: int) -> Tensors:
    """Return the mean of each coordinate without its `trimmed` smallest and largest values (Yin et al., 2018)."""
    found = {}
    for name, value in rows.items():
        cut = min(trimmed, (len(value) - 1) // 2)  # with very few clients, at least one value is left
        found[name] = value.sort(dim=0).values[cut : len(value) - cut].mean(dim=0)
    return found


def krum(rows: Tensors, attackers: int) -> int:
    """Return the row of the client whose update is closest to others (Blanchard et al., 2017).

    The score of a client is the sum of its squared distances to the k − f − 2 closest of the other clients; the lowest
    score is chosen. k is the number of clients, f the number of attackers that are tolerated.
    """
    distances = squared_distances(rows)
    clients = len(distances)
    closest = max(1, clients - attackers - 2)
    others = distances.fill_diagonal_(math.inf).sort(dim=1).values[:, :closest]
    return int(others.sum(dim=1).argmin()) if clients > 1 else 0


def squared_distances(rows: Tensors) -> Tensor:
    """Return the squared distance between the updates of each two clients [k, k], in float64."""
    clients = len(next(iter(rows.values())))
    found = torch.zeros(clients, clients, dtype=torch.float64, device=next(iter(rows.values())).device)
    for row in range(clients):  # one row at a time, so that no [k, k, ...] tensor is needed
        for value in rows.values():
            difference = (value - value[row]).flatten(1) if value.dim() > 1 else (value - value[row])[:, None]
            found[row] += difference.double().square().sum(dim=1)
    return found


def norm_bounded_mean(rows: Tensors, before: Tensors, weights: Tensor, bound: float) -> Tensors:
    """Return the weighted mean after scaling each client's change down to a norm (Sun et al., 2019).

    A bound of 0 uses the median of the norms of this round.
    """
    updates = {name: value - before[name] for name, value in rows.items()}
    squares = [value.double().square().reshape(len(value), -1).sum(dim=1) for value in updates.values()]
    norms = torch.stack(squares).sum(dim=0).sqrt()
    most = bound or float(coordinate_median({"norm": norms})["norm"])
    factors = (most / norms.clamp(min=1e-300)).clamp(max=1)
    scaled = {name: value * per_client(factors.to(value), value) for name, value in updates.items()}
    return {name: before[name] + value for name, value in average(scaled, weights).items()}


def robust_mean(
    defence: Defence, rows: Tensors, before: Tensors, weights: Tensor, share: float, bound: float
) -> Tensors:
    """Return what a defence uses in place of the weighted mean.

    Parameters
    ----------
    defence
        Its name.
    rows
        [k, ...] the parameters that each client sent.
    before
        The parameters before the round.
    weights
        [k] the clients' weights; only norm-bound uses them, because clients could report any count.
    share
        Share of attackers that trimmed-mean and krum tolerate.
    bound
        Norm of norm-bound; 0: the median norm.
    """
    clients = len(weights)
    if defence == "median":
        return coordinate_median(rows)
    if defence == "trimmed-mean":
        return trimmed_mean(rows, assumed_attackers(share, clients))
    if defence == "krum":
        chosen = krum(rows, assumed_attackers(share, clients))
        return {name: value[chosen].clone() for name, value in rows.items()}
    return norm_bounded_mean(rows, before, weights, bound)
