"""Clients that train in parallel on a CPU's cores: the same results as sequential training."""

import threading
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import fedrema
from fedrema.core import LocalTraining
from fedrema.engine import backends
from fedrema.engine.backends import parallel_clients
from fedrema.errors import BadInput
from fedrema.methods.fedavg import FedAvg
from fedrema.methods.fedrema import FedReMa
from fedrema.methods.local import Local
from fedrema.methods.moon import MOON
from fedrema.models.body_and_head import BodyAndHead, Net
from tests.fixtures import make_federation, make_simulator, run_all


@pytest.fixture
def four_threads(monkeypatch):
    monkeypatch.setattr(backends, "SMALL_STEP", 0)  # as if these networks were large
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(1)


def run_simulation(method, *layers: nn.Module, federation=None, **settings):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        linear = nn.Linear(6, 9), nn.Linear(9, 4)
    net = Net(BodyAndHead(nn.Sequential(linear[0], nn.Tanh(), *layers), linear[1]), torch.ones(1, 6))
    simulator = make_simulator(method, federation, net=net, backend="loop", seed=0, **settings)
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


class ThreadsUsed(FedAvg):
    """Notes the threads in which losses are computed."""

    threads: ClassVar[set[int]] = set()

    def loss(self, net, client, batch):
        self.threads.add(threading.get_ident())
        return super().loss(net, client, batch)


class Layer(nn.Module):
    """Calls a function."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x, self.training)


class Channels(nn.Module):
    """Applies a layer to features [n, d] as channels [n, d, 1, 1, ...]."""

    def __init__(self, layer, dimensions) -> None:
        super().__init__()
        self.layer, self.shape = layer, [1] * dimensions

    def forward(self, x):
        return self.layer(x.reshape(*x.shape, *self.shape)).flatten(1)


def noise(x: Tensor, training: bool) -> Tensor:
    return x + 0.3 * torch.randn_like(x) + 0.1 * torch.rand(x.shape, dtype=x.dtype) if training else x


def noise_in_place(x: Tensor, training: bool) -> Tensor:
    return x * torch.empty_like(x).uniform_(0.5, 1.5) if training else x


def distribution(x: Tensor, training: bool) -> Tensor:
    return torch.distributions.Normal(x, 0.2).rsample() if training else x


RANDOM = {
    "dropout": nn.Dropout(0.4),
    "dropout2d": Channels(nn.Dropout2d(0.4), 2),
    "dropout3d": Channels(nn.Dropout3d(0.4), 3),
    "alpha dropout": nn.AlphaDropout(0.4),
    "feature alpha dropout": Channels(nn.FeatureAlphaDropout(0.4), 2),
    "torch.dropout": Layer(lambda x, training: torch.dropout(x, 0.4, training)),
    "rrelu": nn.RReLU(),
    "noise": Layer(noise),
    "noise in place": Layer(noise_in_place),
    "distribution": Layer(distribution),
}


def assert_equal_results(found, other):
    (_, state, records), (_, other_state, other_records) = found, other
    assert records == other_records
    for row in range(4):
        assert all(
            torch.equal(value, other_state.params.row(row)[name]) for name, value in state.params.row(row).items()
        )


@pytest.mark.parametrize("layer", RANDOM.values(), ids=RANDOM.keys())
def test_clients_with_random_layers_train_in_parallel_with_the_same_results(layer, four_threads):
    ThreadsUsed.threads.clear()
    several = run_simulation(ThreadsUsed(), layer)
    assert several[0].engine.parallel > 1
    assert len(ThreadsUsed.threads) > 1
    torch.set_num_threads(1)
    assert_equal_results(several, run_simulation(ThreadsUsed(), layer))
    _, without, _ = run_simulation(ThreadsUsed())
    trained, plain = several[1].params.row(0), without.params.row(0)
    assert not all(torch.equal(value, plain[name]) for name, value in trained.items())


@pytest.mark.parametrize("layer", [RANDOM["rrelu"], RANDOM["noise"]], ids=["rrelu", "noise"])
def test_what_a_client_draws_does_not_depend_on_the_order_of_clients(layer):
    federation, order = make_federation(), [2, 0, 3, 1]
    _, state, _ = run_simulation(Local(), layer, federation=federation)
    _, reordered, _ = run_simulation(Local(), layer, federation=federation.reorder(order))
    for row, before in enumerate(order):
        for name, value in reordered.params.row(row).items():
            assert torch.equal(value, state.params.row(before)[name])


def test_a_loss_that_draws_random_numbers_is_keyed_too(four_threads):
    class Noisy(ThreadsUsed):
        def loss(self, net, client, batch):
            return super().loss(net, client, batch) * (0.5 + torch.rand(()))

    Noisy.threads.clear()
    several = run_simulation(Noisy())
    assert len(Noisy.threads) > 1
    torch.set_num_threads(1)
    assert_equal_results(several, run_simulation(Noisy()))


def test_what_cannot_be_keyed_uses_all_threads_for_one_client(four_threads):
    gumbel = Layer(lambda x, training: functional.gumbel_softmax(x) if training else functional.softmax(x, dim=-1))
    ThreadsUsed.threads.clear()
    simulator, *_ = found = run_simulation(ThreadsUsed(), gumbel)
    assert (simulator.engine.parallel, simulator.threads) == (1, 4)
    assert len(ThreadsUsed.threads) == 1
    torch.rand(5)  # moves torch's own generator
    assert_equal_results(found, run_simulation(ThreadsUsed(), gumbel))


class Images(nn.Module):
    """A convolution, and a way to flatten what it returns."""

    def __init__(self, flatten) -> None:
        super().__init__()
        self.convolution, self.flatten, self.head = nn.Conv2d(2, 3, 2), flatten, nn.Linear(12, 4)

    def forward(self, x):
        return self.head(self.flatten(functional.relu(self.convolution(x))))


def images():
    generator = np.random.default_rng(0)
    x = generator.normal(size=(60, 2, 3, 3)).astype(np.float32)
    return fedrema.Federation.from_arrays(x, generator.integers(4, size=60), np.arange(60) % 4)


WAYS = {
    "reshape": lambda x: x.reshape(len(x), -1),
    "view": lambda x: x.view(x.size(0), -1),
    "strides": lambda x: x.as_strided((len(x), 12), (12, 1)),
}


def trained_images(way, backend) -> dict[str, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Net(Images(WAYS[way]), torch.ones(1, 2, 3, 3))
    state, _ = run_all(make_simulator(FedAvg(), images(), net=net, backend=backend))
    return state.params.row(0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("parallel", [False, True])
def test_networks_that_rely_on_the_layout_of_activations_are_trained_as_they_are(way, parallel, monkeypatch):
    if parallel:
        monkeypatch.setattr(backends, "SMALL_STEP", 0)
    wanted = trained_images("reshape", "loop")
    found = trained_images(way, "loop")
    assert all(torch.allclose(value, wanted[name], rtol=0, atol=1e-12) for name, value in found.items())


def test_clients_with_many_samples_start_first(four_threads):
    class Order(FedAvg):
        started: ClassVar[list[int]] = []

        def loss(self, net, client, batch):
            self.started.append(int(client.count))
            return super().loss(net, client, batch)

    torch.set_num_threads(2)
    simulator, state, _ = run_simulation(Order(), federation=make_federation((9, 12, 80, 40)), rounds=1)
    assert simulator.engine.parallel == 2
    Order.started.clear()  # in the first round, the first client shows whether the loss draws random numbers
    simulator.local_training(simulator.cohort(state, torch.arange(4)), simulator.moment(2))
    assert {*Order.started[:2]} <= {*sorted(simulator.train.counts.tolist())[2:]}


@pytest.mark.parametrize("backend", ["loop", "stacked"])
def test_without_momentum_no_client_has_memory_for_it(backend):
    for momentum, wanted in ((0.0, 0), (0.5, 4)):
        local = LocalTraining(epochs=1, batch=5, lr=0.05, momentum=momentum, keep_momentum=False)
        simulator = make_simulator(FedAvg(), local=local, backend=backend)
        cohort = simulator.cohort(simulator.start(), torch.arange(4))
        trained, _ = simulator.local_training(cohort, simulator.moment(1))
        assert len(trained.velocity) == wanted


def test_a_run_records_how_many_clients_train_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(backends, "SMALL_STEP", 0)
    torch.set_num_threads(2)
    run = fedrema.run(
        "fedavg", federation=make_federation(), backend="loop", rounds=1, progress=False, out=tmp_path / "r"
    )
    assert run.manifest.ran_on.parallel_clients == 2
    assert run.manifest.ran_on.threads_per_operation == 1


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
