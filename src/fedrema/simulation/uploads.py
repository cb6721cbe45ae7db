"""The uploads of a round, collected group by group; the state changes only after the whole round has succeeded."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedrema.core import Mean, Role, Uploads
from fedrema.engine import Cohort
from fedrema.errors import Diverged
from fedrema.models.body_and_head import Net, Tensors, size
from fedrema.simulation.row_storage import Rows, RowStorage


class RoundUploads:
    """The results of all clients that trained in a round; shared parameters are added to a running mean at once."""

    def __init__(self, clients: Tensor, counts: Tensor, storage: RowStorage, keep_heads: bool) -> None:
        self.clients, self.counts = clients, counts
        self.weights = counts / counts.sum()
        memory = RowStorage(counts.device)
        self.mean = Mean()
        self.seen = Rows(len(clients), memory)
        """Parameters that the server sees for each client: personal and collected ones."""
        self.extras = Rows(len(clients), memory)
        self.heads = Rows(len(clients), memory) if keep_heads else None
        self.kept = Rows(len(clients), storage)
        """Private parameters."""
        self.memory = Rows(len(clients), storage)
        self.velocity = Rows(len(clients), storage)
        self.losses: list[Tensor] = []
        self.names: list[str] = []
        self.tallies: list[tuple[np.ndarray, np.ndarray]] = []
        """Correct predictions of each group right after local training."""
        self.bytes_up = 0

    def add(self, cohort: Cohort, extras: Tensors, losses: Tensor, roles: Mapping[str, Role]) -> None:
        """Add the next group after its training."""
        first, trained = len(self.names), cohort.params.own
        of = {role: {name: value for name, value in trained.items() if roles[name] is role} for role in Role}
        self.mean.add(of[Role.SHARED], self.weights[first : first + len(cohort)])
        self.seen.put(first, {**of[Role.COLLECTED], **of[Role.PERSONAL]})
        self.kept.put(first, of[Role.PRIVATE])
        self.extras.put(first, extras)
        self.memory.put(first, cohort.memory.own)
        self.velocity.put(first, cohort.velocity)
        if self.heads is not None:
            self.heads.put(first, {name: value for name, value in trained.items() if Net.in_head(name)})
        self.losses.append(losses)
        self.names += cohort.names
        self.bytes_up += size(trained) - size(of[Role.PRIVATE]) + size(extras)

    def for_server(self) -> Uploads:
        """Return what the server receives."""
        rows = self.clients.to(self.counts.device)
        seen, extras = self.seen.tensors, self.extras.tensors
        return Uploads(rows, seen, extras, self.counts, tuple(self.names), self.mean.total)

    def client_losses(self) -> Tensor:
        """Return the mean training loss of each client."""
        return torch.cat(self.losses)


def check_finite(cohort: Cohort, losses: Tensor, extras: Tensors, number: int) -> None:
    """Raise an error that names the clients whose training has diverged."""
    values = (*cohort.params.own.values(), *extras.values())
    sums = [value.sum(dim=tuple(range(1, value.dim()))) if value.dim() > 1 else value for value in values]
    finite = torch.isfinite(torch.stack([losses, *(total.to(losses) for total in sums)])).all(dim=0).tolist()
    if not all(finite):
        names = ", ".join(name for name, fine in zip(cohort.names, finite, strict=True) if not fine)
        raise Diverged(
            f"Training diverged in round {number}: the loss or weights of client {names} are not finite;"
            " a smaller --lr, or a smaller --clip above 0, may help."
        )
