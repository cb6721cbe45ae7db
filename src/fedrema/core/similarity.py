"""Similarity of classifiers: their soft predictions for random features (the paper's relativity matrix S)."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from fedrema.core import Moment
from fedrema.models.body_and_head import Net, Tensors

NO_GAP = 1e-6
"""Smaller gaps are rounding errors: similarities do not distinguish the clients, so all of them are relevant."""


def draw_probes(net: Net, moment: Moment, count: int, high: float, names: Sequence[str] = ()) -> Tensor:
    """Return random features h̃ ~ U[0, high)^d of a round [1, count, d], or separate ones per name [k, count, d]."""
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
        logits = net.classify_all(heads, probes[0])  # [k, probes, C]
        own, peers = (_soft_predictions(logits, m).flatten(1) for m in temperatures)
        for block in torch.split(own, _rows_per_block(clients)):
            yield block @ peers.T / count
        return
    indices = torch.arange(clients, device=probes.device)
    for block in torch.split(indices, _rows_per_block(clients * count * net.classes)):
        logits = net.classify_all(heads, probes[block].flatten(0, 1))
        logits = logits.reshape(clients, len(block), count, -1)  # [k, b, probes, C]
        own = _soft_predictions(logits[block, indices[: len(block)]], temperatures[0])
        peers = _soft_predictions(logits, temperatures[1])
        yield torch.einsum("bpc,kbpc->bk", own, peers) / count


def _soft_predictions(logits: Tensor, temperature: float) -> Tensor:
    return torch.nn.functional.normalize(torch.softmax(logits / temperature, dim=-1), dim=-1)


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
