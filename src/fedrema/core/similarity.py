"""Similarity of classifiers: their soft predictions for random features (the paper's relativity matrix S)."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedrema.core import Moment
from fedrema.models.body_and_head import Net, Tensors


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
