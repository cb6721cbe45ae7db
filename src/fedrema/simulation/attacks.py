"""Simulated attackers: clients that train on wrong labels, or send something else than they should."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedrema.base.random import torch_generator
from fedrema.core import Moment, Role, Simulation
from fedrema.core.aggregation import per_client
from fedrema.engine import ClientTensors, Cohort, Samples
from fedrema.engine.sgd import gradient_norms
from fedrema.errors import BadInput
from fedrema.models.body_and_head import Tensors
from fedrema.simulation.keyed_draws import KeyedDraws
from fedrema.simulation.privacy import changes, sent_names
from fedrema.tasks import Task


@dataclass(frozen=True)
class Attackers:
    """The attackers of a simulation, and what they do."""

    rows: Tensor
    """Their rows in the federation, ascending; empty without an attack."""
    attack: str = "none"
    strength: float = 1.0

    @classmethod
    def drawn(cls, names: Sequence[str], settings: Simulation) -> "Attackers":
        """Draw the attackers by the seed and the clients' names."""
        if settings.attack == "none":
            return cls(torch.empty(0, dtype=torch.long))
        wanted = max(1, round(settings.attackers * len(names)))
        if wanted >= len(names):
            raise BadInput(
                f"--attackers {settings.attackers:g} of {len(names)} clients leaves no honest one, and only these are"
                " scored: use a smaller share."
            )
        draws = KeyedDraws(names, "attackers").uniform(settings.seed)[:, 0]
        rows = torch.from_numpy(np.sort(np.argsort(draws, kind="stable")[:wanted]))
        return cls(rows, settings.attack, settings.strength)

    def honest(self, clients: Sequence[int]) -> list[int]:
        """Return those of some clients that are no attackers."""
        attackers = set(self.rows.tolist())
        return [row for row in clients if row not in attackers]

    def among(self, clients: Tensor) -> Tensor:
        """Return which of some clients are attackers."""
        return torch.isin(clients, self.rows)

    def samples(self, train: Samples, task: Task) -> Samples:
        """Return the training samples; attackers that flip labels have wrong ones."""
        if self.attack != "label-flip":
            return train
        y = train.y.clone()
        for row in self.rows.tolist():
            count = int(train.counts[row])
            y[row, :count] = flipped(y[row, :count], task)
        return replace(train, y=y)

    def counts(self, clients: Tensor, counts: Tensor) -> Tensor:
        """Return the sample counts that clients report."""
        if self.attack != "counts":
            return counts
        return torch.where(self.among(clients).to(counts.device), counts * self.strength, counts)

    def tampered(self, cohort: Cohort, before: ClientTensors, roles: Mapping[str, Role], moment: Moment) -> Cohort:
        """Return clients with the parameters that the attackers among them send; `before` are those of the server."""
        if self.attack not in ("scale", "noise", "free-ride"):
            return cohort
        attacking = self.among(cohort.clients)
        names = sent_names(cohort, roles)
        updates = changes(cohort, before, names)
        if self.attack == "noise":
            replaced = self._noise(cohort, updates, moment)
        else:
            factor = self.strength if self.attack == "scale" else 0.0
            replaced = {name: factor * value for name, value in updates.items()}
        start, own = before.merged(), dict(cohort.params.own)
        for name in names:
            mask = per_client(attacking.to(own[name].device), own[name])
            own[name] = torch.where(mask, start[name] + replaced[name], own[name])
        return replace(cohort, params=ClientTensors(own, cohort.params.common))

    def _noise(self, cohort: Cohort, updates: Tensors, moment: Moment) -> Tensors:
        """Return Gaussian noise whose norm over all tensors is that of each client's update, times the strength."""
        rows: dict[str, list[Tensor]] = {name: [] for name in updates}
        for client in cohort.names:
            generator = torch_generator(moment.seed, moment.round, client, "attack")
            for name in sorted(updates):
                value = updates[name]
                rows[name].append(torch.randn(value.shape[1:], generator=generator, dtype=value.dtype))
        drawn = {name: torch.stack(each).to(updates[name]) for name, each in rows.items()}
        factors = self.strength * gradient_norms(updates, axes=1) / gradient_norms(drawn, axes=1)
        return {name: value * per_client(factors, value) for name, value in drawn.items()}


def flipped(y: Tensor, task: Task) -> Tensor:
    """Return wrong targets of one client: class c becomes C − 1 − c, and numbers are mirrored at their mean.

    Labels are inverted. Counts are mirrored between their smallest and their largest, so that none is negative.
    """
    if task.name == "multilabel":
        return 1 - y
    if task.has_classes:
        return task.classes - 1 - y
    if task.name == "count":
        return y.min() + y.max() - y
    return 2 * y.mean() - y
