"""Inputs of tables: columns of numbers, and columns of category codes that are embedded."""

import torch
from torch import Tensor, nn

LARGEST_EMBEDDING = 16


class EmbedColumns(nn.Module):
    """Replaces each column of category codes by a learnt vector; columns of numbers are passed on.

    Parameters
    ----------
    codes
        Number of codes of each column; 0 for a column of numbers.
    """

    def __init__(self, codes: tuple[int, ...]) -> None:
        super().__init__()
        self.codes = codes
        self.numbers = [place for place, count in enumerate(codes) if not count]
        self.coded = [place for place, count in enumerate(codes) if count]
        self.embeddings = nn.ModuleList(nn.Embedding(codes[place], width_of(codes[place])) for place in self.coded)

    @property
    def width(self) -> int:
        """Number of outputs."""
        return len(self.numbers) + sum(width_of(self.codes[place]) for place in self.coded)

    def forward(self, x: Tensor) -> Tensor:
        """Return numbers and embeddings [n, width] of a table's rows [n, columns]."""
        parts = [x[:, self.numbers]] if self.numbers else []
        for place, embedding in zip(self.coded, self.embeddings, strict=True):
            parts.append(embedding(x[:, place].long()))
        return torch.cat([part.to(parts[-1].dtype) for part in parts], dim=1)


def width_of(codes: int) -> int:
    """Return the size of the vector for a column with this many codes: half as many, at most 16."""
    return min(LARGEST_EMBEDDING, (codes + 1) // 2)
