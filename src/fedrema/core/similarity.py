"""How alike classifiers are: their soft predictions on random features (the paper's relativity matrix S)."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from fedrema.core import Moment
from fedrema.models.body_and_head import Net, Tensors

NO_GAP = 1e-6
"""Differences below this are rounding: nobody can be told apart, so everyone is relevant."""


def draw_probes(net: Net, moment: Moment, count: int, high: float, names: Sequence[str] = ()) -> Tensor:
    """Return random features h̃ ~ U[0, high)^d of this round [1, count, d], or others for each name [k, count, d]."""
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

    With one row of probes all clients answer the same questions and S is symmetric; with k rows client i's row of S
    uses its own. `peer_temperature` softens the others' predictions differently from one's own.
    """
    return torch.cat(list(similarity_rows(net, heads, probes, temperature, peer_temperature)))


def similarity_rows(
    net: Net, heads: Tensors, probes: Tensor, temperature: float, peer_temperature: float | None = None
) -> Iterator[Tensor]:
    """Yield S in blocks of rows [b, k], in order: for thousands of clients it is never there as a whole."""
    temperatures = temperature, peer_temperature or temperature
    clients = next(iter(heads.values())).shape[0]
    rows, count, _ = probes.shape
    if rows == 1:
        logits = net.classify_all(heads, probes[0])  # [k, probes, C]
        own, peers = (_soft(logits, m).flatten(1) for m in temperatures)
        for block in torch.split(own, _block(clients)):
            yield block @ peers.T / count
        return
    place = torch.arange(clients, device=probes.device)
    for asking in torch.split(place, _block(clients * count * net.classes)):
        logits = net.classify_all(heads, probes[asking].flatten(0, 1))
        logits = logits.reshape(clients, len(asking), count, -1)  # [k, b, probes, C]
        own, peers = _soft(logits[asking, place[: len(asking)]], temperatures[0]), _soft(logits, temperatures[1])
        yield torch.einsum("bpc,kbpc->bk", own, peers) / count


def _soft(logits: Tensor, temperature: float) -> Tensor:
    return torch.nn.functional.normalize(torch.softmax(logits / temperature, dim=-1), dim=-1)


def _block(numbers_per_row: int) -> int:
    """Return how many rows fit into 64 MB."""
    return max(1, 2**24 // numbers_per_row)


def maximum_difference_segmentation(
    similarity: Tensor, gap_to_self: bool = True, include_below_gap: bool = True, first: int = 0
) -> tuple[Tensor, Tensor]:
    """Cut each row of S at its largest gap (MDS, Algorithm 1); the rows [b, k] are those of clients `first`, ….

    Returns
    -------
    relevant
        [b, k] whether client j is in A_i; oneself always is. Among equal similarities the later client ranks
        higher, among equal gaps the lowest counts.
    gaps
        [b] the largest difference Δs*; 0 where it is below rounding, and then everyone is relevant.
    """
    everyone = torch.arange(similarity.shape[1], device=similarity.device)
    itself = everyone == (first + torch.arange(len(similarity), device=similarity.device))[:, None]
    # Without the gap below oneself only the peers are ranked: oneself comes first and is left out.
    skipped = 0 if gap_to_self else 1
    ranked = similarity if gap_to_self else similarity.masked_fill(itself, -torch.inf)
    if len(everyone) - skipped < 2:
        return torch.ones_like(itself), similarity.new_zeros(len(similarity))
    ascending = _ascending(ranked)[:, skipped:]  # s_idx1 ≤ … ≤ s_idxK
    gaps, place = ascending.diff(dim=1).max(dim=1)  # m = argmax Δs_idx, Δs* = Δs_idxm
    below = ascending.gather(1, place[:, None])  # s_idxm
    chosen = ranked > below  # idx_m+1, …, idx_K
    if include_below_gap:
        last = torch.where(ranked == below, everyone, -1).max(dim=1, keepdim=True).values
        chosen |= everyone == last  # A = {idx_m, …, idx_K}
    indistinct = gaps < NO_GAP
    return chosen | itself | indistinct[:, None], torch.where(indistinct, 0.0, gaps)


def _ascending(rows: Tensor) -> Tensor:
    # NumPy sorts the numbers of a row several times as fast as torch does on a CPU.
    return torch.from_numpy(np.sort(rows.numpy(), axis=1)) if rows.device.type == "cpu" else rows.sort(dim=1).values
