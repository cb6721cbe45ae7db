"""How alike classifiers are: their soft predictions on random features (the paper's relativity matrix S)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedrema.core import Moment
from fedrema.net import Net, Tensors


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
    rows, count, width = probes.shape
    logits = net.classify_all(heads, probes.reshape(rows * count, width))
    logits = logits.reshape(-1, rows, count, logits.shape[-1])  # [k, rows, probes, C]
    own, peers = (
        torch.nn.functional.normalize(torch.softmax(logits / m, dim=-1), dim=-1)
        for m in (temperature, peer_temperature or temperature)
    )
    if rows == 1:
        return torch.einsum("ipc,jpc->ijp", own[:, 0], peers[:, 0]).mean(-1)
    asked = own.diagonal(dim1=0, dim2=1)  # client i's answers to its own questions: [probes, C, k]
    return torch.einsum("pci,jipc->ijp", asked, peers).mean(-1)
