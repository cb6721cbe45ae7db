"""What tests of methods that align features share: a client to compute by hand, a simulator that can be watched."""

import pytest
import torch
from torch import nn

from fedrema.core import Batch, Client
from fedrema.models.body_and_head import BodyAndHead, Net
from fedrema.simulation.simulator import Simulator
from tests import fixtures
from tests.fixtures import LOCAL

CLASSES, FEATURES, BYTES = 4, 7, 8


def make_net() -> Net:
    """Two inputs, two features, three classes."""
    return Net(BodyAndHead(nn.Linear(2, 2), nn.Linear(2, 3)).double(), torch.zeros(1, 2, dtype=torch.float64))


def doubles(value) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


def client(count=3.0, **inbox) -> Client:
    """Return a client whose features are its inputs, and whose classifier prefers nothing."""
    params = {
        "body.weight": torch.eye(2, dtype=torch.float64),
        "body.bias": doubles([0.0, 0.0]),
        "head.weight": torch.zeros(3, 2, dtype=torch.float64),
        "head.bias": torch.zeros(3, dtype=torch.float64),
    }
    return Client(params, params, {}, {name: doubles(value) for name, value in inbox.items()}, doubles(count))


def batch(x, labels, mask=None) -> Batch:
    real = torch.ones(len(labels), dtype=torch.float64) if mask is None else doubles(mask)
    return Batch(doubles(x), torch.tensor(labels), real, torch.arange(len(labels)))


class Watched(Simulator):
    """A simulator that keeps what clients had when the round began, what they trained, and what the server saw."""

    def end(self, cohort, moment):
        ended, extras = super().end(cohort, moment)
        self.trained = ended.params.own
        return ended, extras

    def run_round(self, state):
        self.before = [{name: value.clone() for name, value in state.params.row(row).items()} for row in range(4)]
        self.mail = dict(state.inbox.common)
        original = type(self.method).aggregate

        def aggregate(method, net, state, uploads, moment):
            self.uploads = uploads
            return original(method, net, state, uploads, moment)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(self.method), "aggregate", aggregate)
            return super().run_round(state)


def simulator(method, local=LOCAL, **settings) -> Watched:
    return fixtures.simulator(method, local=local, kind=Watched, **settings)


def training_data(played, row):
    data = played.federation.split("train")
    real = slice(0, data.count[row])
    return torch.from_numpy(data.x[row, real]).double(), torch.from_numpy(data.y[row, real])
