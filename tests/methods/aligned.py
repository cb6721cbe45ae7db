"""Helpers of tests of methods that align features: a small client, and a simulator that keeps intermediate results."""

import functools

import pytest
import torch
from torch import nn

from fedrema.core import Client
from fedrema.models.body_and_head import BodyAndHead, Net
from fedrema.simulation.simulator import Simulator
from tests.fixtures import make_simulator, tensor

CLASSES, FEATURES, BYTES = 4, 7, 8


def make_net() -> Net:
    """Two inputs, two features, three classes."""
    return Net(BodyAndHead(nn.Linear(2, 2), nn.Linear(2, 3)).double(), torch.zeros(1, 2, dtype=torch.float64))


def client(count=3.0, **inbox) -> Client:
    """Return a client whose features are its inputs, and whose classifier has zero weights."""
    params = {
        "body.weight": torch.eye(2, dtype=torch.float64),
        "body.bias": tensor([0.0, 0.0]),
        "head.weight": torch.zeros(3, 2, dtype=torch.float64),
        "head.bias": torch.zeros(3, dtype=torch.float64),
    }
    return Client(params, params, {}, {name: tensor(value) for name, value in inbox.items()}, tensor(count))


class WatchedSimulator(Simulator):
    """A simulator that keeps the clients' initial and trained models, the common inbox and the uploads of a round."""

    def end(self, cohort, moment):
        ended, extras = super().end(cohort, moment)
        self.trained = ended.params.own
        return ended, extras

    def run_round(self, state):
        self.before = [{name: value.clone() for name, value in state.params.row(row).items()} for row in range(4)]
        self.inbox = dict(state.inbox.common)
        original = type(self.method).aggregate

        def aggregate(method, net, state, uploads, moment):
            self.uploads = uploads
            return original(method, net, state, uploads, moment)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(self.method), "aggregate", aggregate)
            return super().run_round(state)


watched_simulator = functools.partial(make_simulator, kind=WatchedSimulator)


def training_data(simulator, row):
    data = simulator.federation.split("train")
    real = slice(0, data.count[row])
    return torch.from_numpy(data.x[row, real]).double(), torch.from_numpy(data.y[row, real])
