"""Clients that train in parallel on a CPU's cores: the same results as sequential training."""

import pytest
import torch
from torch import nn

from fedrema.engine import backends
from fedrema.engine.backends import parallel_clients
from fedrema.errors import BadInput
from fedrema.methods.fedavg import FedAvg
from fedrema.methods.fedrema import FedReMa
from fedrema.methods.moon import MOON
from fedrema.models.body_and_head import BodyAndHead, Net
from tests.fixtures import make_federation, make_simulator, run_all


@pytest.fixture
def four_threads(monkeypatch):
    monkeypatch.setattr(backends, "SMALL_STEP", 0)  # as if these networks were large
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(1)


def run_simulation(method, dropout=0.0, federation=None):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = BodyAndHead(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Dropout(dropout)), nn.Linear(9, 4))
    net = Net(module if dropout else BodyAndHead(module.body[:2], module.head), torch.ones(1, 6))
    simulator = make_simulator(method, federation, net=net, backend="loop", seed=0)
    state, records = run_all(simulator)
    return simulator, state, [{name: record[name] for name in ("loss", "client_accuracy")} for record in records]


@pytest.mark.parametrize("method", [FedAvg(), FedReMa(align=1.0), MOON()])
def test_parallel_training_gives_the_same_results_as_sequential_training(method, four_threads):
    several, state, records = run_simulation(method)
    assert several.engine.parallel > 1
    assert torch.get_num_threads() == 4
    torch.set_num_threads(1)
    one, other_state, other_records = run_simulation(method)
    assert one.engine.parallel == 1
    for row in range(4):
        for name, value in state.params.row(row).items():
            assert torch.allclose(value, other_state.params.row(row)[name], rtol=0, atol=1e-12), name
    for record, other in zip(records, other_records, strict=True):
        assert record["loss"] == pytest.approx(other["loss"], abs=1e-12)
        assert record["client_accuracy"] == other["client_accuracy"]


def test_clients_with_random_layers_are_trained_sequentially(four_threads):
    _, state, records = run_simulation(FedAvg(), dropout=0.4)
    torch.set_num_threads(1)
    _, other_state, other_records = run_simulation(FedAvg(), dropout=0.4)
    assert records == other_records
    assert all(torch.equal(value, other_state.params.common[name]) for name, value in state.params.common.items())


def test_an_error_in_a_thread_reaches_the_caller(four_threads):
    class Broken(FedAvg):
        def predict(self, net, client, x):
            if len(x) == 2:
                raise RuntimeError("broken for one of them")
            return super().predict(net, client, x)

    federation = make_federation(counts=(12, 20, 12, 20))
    assert set(federation.split("test").count.tolist()) == {2, 4}
    with pytest.raises(
        BadInput, match=r"Broken.predict failed at .*test_parallel_clients.py:\d+: RuntimeError: broken for one"
    ):
        run_simulation(Broken(), federation=federation)
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize(
    ("threads", "clients", "wanted"), [(1, 20, 1), (2, 20, 2), (2, 1, 1), (4, 20, 4), (8, 1, 1), (64, 1000, 8)]
)
def test_the_number_of_clients_trained_in_parallel(threads, clients, wanted):
    assert parallel_clients(threads, clients) == wanted
