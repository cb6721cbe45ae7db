"""Methods whose settings differ between runs that are trained jointly: each client computes with those of its run."""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedrema.core import Batch, Client, Method
from fedrema.engine.cohort import Cohort
from fedrema.models.body_and_head import Net

PREFIX = "setting of the run: "
"""Names of the settings among a client's tensors; a method cannot use such a name."""


def common_part(method: Method) -> tuple[Any, ...]:
    """Return what must agree between methods that are trained jointly: the class, and settings without `joint`."""
    fields = [field.name for field in dataclasses.fields(method) if not field.metadata.get("joint")]
    return (type(method), *((name, getattr(method, name)) for name in fields))


@dataclass(frozen=True)
class MethodOfRuns(Method):
    """The loss and the predictions of a method; some settings are those of each client's run."""

    name: ClassVar[str] = "joint"
    title: ClassVar[str] = "Joint runs"
    paper: ClassVar[str] = ""

    base: Method
    """The method of the first run."""
    differing: tuple[str, ...]
    """Names of the settings that are read from the client."""

    def loss(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return the loss with the settings of the client's run."""
        method, client = self.of_client(client)
        return method.loss(net, client, batch)

    def predict(self, net: Net, client: Client, x: Tensor) -> Tensor:
        """Return the outputs with the settings of the client's run."""
        method, client = self.of_client(client)
        return method.predict(net, client, x)

    def of_client(self, client: Client) -> tuple[Method, Client]:
        """Return the method with the settings of a client's run, and the client as the method knows it."""
        method = copy.copy(self.base)
        for name in self.differing:  # not `replace`, which would validate tensors
            object.__setattr__(method, name, client.inbox[PREFIX + name])
        inbox = {name: value for name, value in client.inbox.items() if not name.startswith(PREFIX)}
        return method, client.having(inbox=inbox)


@dataclass(frozen=True)
class LossOfRuns:
    """Another loss of the method, for a phase."""

    method: MethodOfRuns
    function: Callable[[Method, Net, Client, Batch], Tensor]

    def __call__(self, net: Net, client: Client, batch: Batch) -> Tensor:
        """Return the loss with the settings of the client's run."""
        method, client = self.method.of_client(client)
        return self.function(method, net, client, batch)


def join_methods(methods: Sequence[Method], cohorts: Sequence[Cohort]) -> tuple[Method, dict[str, Tensor]] | None:
    """Return several methods as one, with the tensors [k] that all their clients need; None if they differ in more."""
    first = methods[0]
    if all(method == first for method in methods):
        return first, {}
    if any(common_part(method) != common_part(first) for method in methods):
        return None
    names = [field.name for field in dataclasses.fields(first)]
    differing = tuple(name for name in names if len({getattr(method, name) for method in methods}) > 1)
    values = {
        PREFIX + name: torch.cat(
            [
                torch.full_like(cohort.counts, getattr(method, name))
                for method, cohort in zip(methods, cohorts, strict=True)
            ]
        )
        for name in differing
    }
    return MethodOfRuns(first, differing), values
