"""Clients side by side on a CPU's cores: the same as one after the other."""

import pytest
import torch
from torch import nn

from fedrema.core import LocalTraining, Simulation
from fedrema.engine import backends
from fedrema.engine.backends import parallel_clients
from fedrema.errors import BadInput
from fedrema.methods.fedavg import FedAvg
from fedrema.methods.fedrema import FedReMa
from fedrema.methods.moon import MOON
from fedrema.models.body_and_head import Net
from fedrema.models.networks import Split
from fedrema.simulation.simulator import Simulator
from tests.conftest import make_federation


@pytest.fixture
def four_threads(monkeypatch):
    monkeypatch.setattr(backends, "SMALL_STEP", 0)  # else networks as small as these go one after the other
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(1)


def play(method, dropout=0.0, federation=None):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Split(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Dropout(dropout)), nn.Linear(9, 4))
    net = Net(module if dropout else Split(module.body[:2], module.head), torch.ones(1, 6))
    settings = Simulation(rounds=3, device="cpu", precision="float64", backend="loop")
    simulator = Simulator(
        method, net, federation or make_federation(), LocalTraining(epochs=2, batch=5, lr=0.05), settings
    )
    state = simulator.start()
    records = [played.record for played in simulator.run(state)]
    return simulator, state, [{name: record[name] for name in ("loss", "client_accuracy")} for record in records]


@pytest.mark.parametrize("method", [FedAvg(), FedReMa(align=1.0), MOON()])
def test_side_by_side_is_the_same_as_one_after_the_other(method, four_threads):
    several, state, records = play(method)
    assert several.engine.parallel > 1
    assert torch.get_num_threads() == 4
    torch.set_num_threads(1)
    one, other_world, other_records = play(method)
    assert one.engine.parallel == 1
    for row in range(4):
        for name, value in state.params.row(row).items():
            assert torch.allclose(value, other_world.params.row(row)[name], rtol=0, atol=1e-12), name
    for record, other in zip(records, other_records, strict=True):
        assert record["loss"] == pytest.approx(other["loss"], abs=1e-12)
        assert record["client_accuracy"] == other["client_accuracy"]


def test_layers_that_draw_go_one_after_the_other(four_threads):
    _, state, records = play(FedAvg(), dropout=0.4)
    torch.set_num_threads(1)
    _, other_world, other_records = play(FedAvg(), dropout=0.4)
    assert records == other_records
    assert all(torch.equal(value, other_world.params.common[name]) for name, value in state.params.common.items())


def test_an_error_in_a_thread_reaches_the_caller(four_threads):
    class Broken(FedAvg):
        def predict(self, net, client, x):
            if len(x) == 2:
                raise RuntimeError("broken for one of them")
            return super().predict(net, client, x)

    federation = make_federation(counts=(12, 20, 12, 20))
    assert set(federation.split("test").count.tolist()) == {2, 4}
    with pytest.raises(BadInput, match=r"Broken.predict failed at .*test_lanes.py:\d+: RuntimeError: broken for one"):
        play(Broken(), federation=federation)
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize(
    ("threads", "clients", "wanted"), [(1, 20, 1), (2, 20, 2), (2, 1, 1), (4, 20, 4), (8, 1, 1), (64, 1000, 8)]
)
def test_how_many_go_side_by_side(threads, clients, wanted):
    assert parallel_clients(threads, clients) == wanted
