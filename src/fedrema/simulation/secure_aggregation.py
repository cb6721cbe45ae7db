"""What secure aggregation covers for a method: derived from the roles of its parameters and from its server step."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedrema.core import Method, Moment, Role, Uploads
from fedrema.core.checks import calling
from fedrema.core.fixed_point import FixedPoint, QuantisedSum
from fedrema.errors import BadInput
from fedrema.models.body_and_head import Net, Tensors
from fedrema.simulation.records import SumRecord

if TYPE_CHECKING:
    from fedrema.simulation.simulator import Simulator
    from fedrema.simulation.state import SimulationState

SAME_TOTAL = ((1.0, 2.0, 9.0), (4.0, 4.0, 4.0))
"""Two lists of sample counts with the same total."""


@dataclass(frozen=True)
class Coverage:
    """What the server learns of each client, if shared parameters are summed under masks."""

    summed: tuple[str, ...]
    """Parameters of which the server learns the sum only."""
    params: tuple[str, ...]
    """Parameters that it still receives from each client: personal and collected ones."""
    extras: tuple[str, ...]
    """Tensors that clients send in addition to parameters, which it receives from each client."""
    needs_counts: bool
    """Whether the result of the server step depends on the sample counts of single clients."""

    @property
    def is_complete(self) -> bool:
        """Whether the server receives no tensor of a single client."""
        return bool(self.summed) and not self.params and not self.extras

    @property
    def hides_counts(self) -> bool:
        """Whether the server learns only the sum of the sample counts."""
        return self.is_complete and not self.needs_counts

    def check(self, method: Method) -> None:
        """Raise `BadInput` if there is nothing to sum."""
        if not self.summed:
            raise BadInput(
                f"--secure-aggregation protects parameters of which the server uses only the mean, but clients of"
                f" {method.called()} send none: choose another method (fedrema methods shows which)."
            )

    @property
    def kind(self) -> str:
        """How much is covered: complete, partial, or refused."""
        return "complete" if self.is_complete else "partial" if self.summed else "refused"

    def seen(self, net: Net) -> list[str]:
        """Return what the server still receives from each client, in words."""
        counts = [] if self.hides_counts else ["the number of samples"]
        return [*parts(self.params, net), *(f"`{name}`" for name in self.extras), *counts]

    def described(self, net: Net) -> str:
        """Return in one line what is covered."""
        if not self.summed:
            return f"{self.kind}, because no parameter is only averaged"
        seen = ", ".join(self.seen(net))
        return f"{self.kind}; the server still receives from each client: {seen}" if seen else self.kind


def parts(names: Iterable[str], net: Net) -> list[str]:
    """Return names of parameters as parts of models: body, batch norm, head, and what the method adds."""
    found: dict[str, None] = {}
    for name in names:
        where = re.search(r"(?:^|\.)(body|head)\.", name)
        if where is None:
            found[f"`{name}`"] = None
            continue
        part = "batch norm" if name[where.start(1) :] in net.batch_norm else where[1]
        owner = name[: where.start(1)].strip(".")
        found[f"`{owner}` {part}" if owner else part] = None
    return list(found)


def coverage_of(simulator: "Simulator", state: "SimulationState") -> Coverage:
    """Return what is covered for a simulator's method; a client takes one step to find out what it sends."""
    roles = simulator.roles(state.params)
    summed = tuple(name for name, role in roles.items() if role is Role.SHARED)
    visible = tuple(name for name, role in roles.items() if role in (Role.PERSONAL, Role.COLLECTED))
    first = simulator.cohort(state, torch.tensor([0]))
    extras = tuple(simulator.example_extras(first, simulator.moment(1)))
    if not summed or visible or extras:
        return Coverage(summed, visible, extras, needs_counts=bool(summed))
    shared = {name: state.params.common[name] for name in summed}
    moments = [simulator.moment(number) for number in (1, 2)]
    return Coverage(summed, (), (), _depends_on_counts(simulator.method, simulator.net, shared, moments))


def _depends_on_counts(method: Method, net: Net, shared: Tensors, moments: Sequence[Moment]) -> bool:
    """Return whether the answers to the same means change with the counts of single clients."""
    mean = {name: value + 0.01 for name, value in shared.items()}
    found: list[list[Mapping[str, object]]] = []
    for counts in SAME_TOTAL:
        weights = torch.tensor(counts, dtype=torch.float64, device=next(iter(shared.values())).device)
        clients = torch.arange(len(counts), device=weights.device)
        names = tuple(f"client {row}" for row in range(len(counts)))
        uploads = Uploads(clients, {}, {}, weights, names, mean, shared, len(counts))
        state = method.server(net, len(counts))
        answers: list[Mapping[str, object]] = []
        for moment in moments:
            with calling(method, "aggregate"):
                answer = method.aggregate(net, state, uploads, moment)
            answers += [answer.shared, answer.personal, answer.state]
            state = answer.state
        found.append(answers)
    return any(
        not _same(one[name], other[name]) for one, other in zip(*found, strict=True) for name in {**one, **other}
    )


def _same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return one == other


def with_equal_counts(uploads: Uploads, samples: int) -> Uploads:
    """Return uploads of which only the total number of samples is known: every client has an equal share of it."""
    share = samples / len(uploads.counts)
    return replace(uploads, counts=torch.full_like(uploads.counts, share))


def empty_sum(fixed_point: FixedPoint, net: Net, common: Tensors, roles: Mapping[str, Role]) -> QuantisedSum:
    """Return a sum without contributions, of the changes since the shared parameters in `common`."""
    before = {name: value for name, value in common.items() if roles[name] is Role.SHARED}
    variances = frozenset(name for name in net.batch_norm if name.endswith("running_var"))
    return QuantisedSum(fixed_point, before, variances)


def sum_record(summed: QuantisedSum | None) -> SumRecord | None:
    """Return what is recorded of a sum; None without secure aggregation."""
    return None if summed is None else SumRecord(summed.samples, summed.clipped_clients)
