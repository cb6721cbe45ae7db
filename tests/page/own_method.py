"""A user's own method that reports a trace, a period and weights between clients."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedrema.core import Answer, Matrix, Method, Period, Reports, Role, Trace, mix


@dataclass(frozen=True)
class Neighbours(Method):
    """Average each client's model with those of its neighbours, less and less its own."""

    name: ClassVar[str] = "neighbours"
    title: ClassVar[str] = "Neighbours"
    paper: ClassVar[str] = "a test"
    reports: ClassVar[Reports] = Reports(
        traces=(Trace("own", "own weight", percent=True, description="Weight of a client's own model."),),
        period=Period("alone", "solo phase", "alone", "with neighbours", measure="own", threshold="least"),
        matrices=(Matrix("weights", "Weights of models", "weights", description="Weight of the column's client."),),
    )

    least: float = 0.4
    """The solo phase ends once a client's own weight has fallen to this."""

    def role(self, net, name):
        """Everything is personal."""
        return Role.PERSONAL

    def aggregate(self, net, state, uploads, moment):
        """Mix every model with those of the two clients next to it."""
        own = 1 / (1 + moment.round / 4)
        weights = own * torch.eye(len(uploads.clients))
        for shift in (-1, 1):
            weights += (1 - own) / 2 * torch.eye(len(weights)).roll(shift, dims=1)
        trace = {"own": own, "alone": own > self.least, "weights": weights}
        return Answer(shared={}, personal=mix(uploads.params, weights.to(uploads.counts)), state=state, trace=trace)
