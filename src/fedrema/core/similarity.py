"""Similarity of heads: their soft predictions for random features (the paper's relativity matrix S)."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from fedrema.core import Moment
from fedrema.models.body_and_head import Net, Tensors

NO_GAP = 1e-6
"""Smaller gaps are rounding errors: similarities do not distinguish the clients, so all of them are relevant."""
LEAST_PROBES = 16
"""Random features for tasks without a softmax: a single one gives each head only one number to be compared by."""


def draw_probes(net: Net, moment: Moment, count: int, high: float, names: Sequence[str] = ()) -> Tensor:
    """Return random features h̃ ~ U[0, high)^d of a round [1, count, d], or separate ones per name [k, count, d].

    For tasks without a softmax, there are at least `LEAST_PROBES`.
    """
    count = count if net.task.has_softmax else max(count, LEAST_PROBES)
    purposes = [f"probe of {name}" for name in names] or ["probe"]
    draws = [
        torch.rand(count, net.features_count, generator=moment.generator(purpose), dtype=torch.float64)
        for purpose in purposes
    ]
    like = next(iter(net.initial.values()))
    return high * torch.stack(draws).to(like.device, like.dtype)


def head_similarity(
    net: Net, heads: Tensors, probes: Tensor, temperature: float, peer_temperature: float | None = None
) -> Tensor:
    """Return S [k, k]: cosines between stacked heads' soft predictions p = softmax(φ(h̃)/M), averaged over probes.

    With one row of probes, all clients use the same random features and S is symmetric; with k rows, row i of S uses
    client i's. `peer_temperature` is the temperature of the other clients' predictions if it differs from
    `temperature`.
    """
    return torch.cat(list(similarity_rows(net, heads, probes, temperature, peer_temperature)))


def similarity_rows(
    net: Net, heads: Tensors, probes: Tensor, temperature: float, peer_temperature: float | None = None
) -> Iterator[Tensor]:
    """Yield S in blocks of rows [b, k], in order; with thousands of clients the whole S would need too much memory."""
    temperatures = temperature, peer_temperature or temperature
    clients = next(iter(heads.values())).shape[0]
    rows, count, _ = probes.shape
    if rows == 1:
        outputs = net.classify_all(heads, probes[0])  # [k, probes, C]
        own, peers = (net.task.soft_predictions(outputs, m) for m in temperatures)
        if own is None or peers is None:
            for block in torch.split(outputs, _rows_per_block(clients * count)):
                yield _density_cosines(block[:, None], outputs[None], *temperatures)
            return
        for block in torch.split(own.flatten(1), _rows_per_block(clients)):
            yield block @ peers.flatten(1).T / count
        return
    indices = torch.arange(clients, device=probes.device)
    for block in torch.split(indices, _rows_per_block(clients * count * net.classes)):
        outputs = net.classify_all(heads, probes[block].flatten(0, 1))
        outputs = outputs.reshape(clients, len(block), count, -1)  # [k, b, probes, C]
        of_block = outputs[block, indices[: len(block)]]
        own = net.task.soft_predictions(of_block, temperatures[0])
        peers = net.task.soft_predictions(outputs, temperatures[1])
        if own is None or peers is None:
            yield _density_cosines(of_block[:, None], outputs.transpose(0, 1), *temperatures)
        else:
            yield torch.einsum("bpc,kbpc->bk", own, peers) / count


def _density_cosines(own: Tensor, peers: Tensor, variance: float, peer_variance: float) -> Tensor:
    """Return the cosines between normal densities around outputs [..., probes, 1], averaged over probes.

    The scalar product of two densities is their integral ∫ p_i p_j, as a sum over classes is for soft predictions.
    """
    total = variance + peer_variance
    height = (2 * math.sqrt(variance * peer_variance) / total) ** 0.5
    cosines: Tensor = height * torch.exp(-(own - peers).square() / (2 * total)).mean(dim=(-1, -2))
    return cosines


def _rows_per_block(numbers_per_row: int) -> int:
    """Return the number of rows that fit into 64 MB."""
    return max(1, 2**24 // numbers_per_row)


def maximum_difference_segmentation(
    similarity: Tensor, gap_to_self: bool = True, include_below_gap: bool = True, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Cut each row of S at its largest gap (MDS, Algorithm 1).

    `similarity` [b, k] holds the rows of b consecutive clients, starting with client `first`.

    Returns
    -------
    relevant
        [b, k] whether client j is in A_i; a client is always in its own set. Of equal similarities, that of the client
        with the larger index ranks higher; of equal gaps, the lowest counts.
    gaps
        [b] the largest difference Δs*; 0 if it is smaller than rounding errors, and then all clients are relevant.
    """
    clients = torch.arange(similarity.shape[1], device=similarity.device)
    is_self = clients == (first + torch.arange(len(similarity), device=similarity.device))[:, None]
    # Without the gap to the client itself only the peers are ranked: the client sorts first and is skipped.
    skipped = 0 if gap_to_self else 1
    ranked = similarity if gap_to_self else similarity.masked_fill(is_self, -torch.inf)
    if len(clients) - skipped < 2:
        return torch.ones_like(is_self), similarity.new_zeros(len(similarity))
    ascending = _ascending(ranked)[:, skipped:]  # s_idx1 ≤ … ≤ s_idxK
    gaps, place = ascending.diff(dim=1).max(dim=1)  # m = argmax Δs_idx, Δs* = Δs_idxm
    below = ascending.gather(1, place[:, None])  # s_idxm
    chosen = ranked > below  # idx_m+1, …, idx_K
    if include_below_gap:
        last = torch.where(ranked == below, clients, -1).max(dim=1, keepdim=True).values
        chosen |= clients == last  # A = {idx_m, …, idx_K}
    no_gap = gaps < NO_GAP
    return chosen | is_self | no_gap[:, None], torch.where(no_gap, 0.0, gaps)


def _ascending(rows: Tensor) -> Tensor:
    # On a CPU, NumPy sorts rows several times faster than torch.
    return torch.from_numpy(np.sort(rows.numpy(), axis=1)) if rows.device.type == "cpu" else rows.sort(dim=1).values
