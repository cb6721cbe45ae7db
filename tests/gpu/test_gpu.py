"""On a real GPU: CUDA graphs, kernels, joint training, runs in turns. `make test-gpu`; skipped without a GPU."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from torch import nn

from fedrema.core import Answer, LocalTraining, Role, average, cross_entropy, mix
from fedrema.core.similarity import head_similarity
from fedrema.data import Federation
from fedrema.engine import JointTraining, kernels, run_in_turns
from fedrema.methods.ditto import Ditto
from fedrema.methods.fedavg import FedAvg
from fedrema.methods.fedbn import FedBN
from fedrema.methods.fedpac import FedPAC
from fedrema.methods.fedprior import FedPrior
from fedrema.methods.fedprox import FedProx
from fedrema.methods.fedrema import FedReMa
from fedrema.methods.per_fedavg import PerFedAvg
from fedrema.models.body_and_head import BodyAndHead, Net
from fedrema.models.networks import Network, build_net
from tests import fixtures
from tests.contract.test_methods import METHODS
from tests.fixtures import LOCAL, label, make_federation, run_all, snapshot

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


def run_simulation(method, federation, local=LOCAL, network=None, **settings):
    chosen = {"device": "cuda", "precision": "float32", **settings}
    simulation = fixtures.make_simulator(method, federation, local, network() if network else "mlp", **chosen)
    return simulation, *run_all(simulation)


def apart(first, second):
    """Return the largest difference between two states' tensors."""
    one, other = snapshot(first), snapshot(second)
    assert one.keys() == other.keys()
    return max(float((one[name].cpu().double() - other[name].cpu().double()).abs().max()) for name in one)


@pytest.mark.parametrize("method", METHODS, ids=label)
def test_every_method_computes_the_same_as_on_a_cpu(method):
    federation = make_federation()
    for settings in ({}, {"participation": 0.75, "rounds": 4}):
        simulator, state, records = run_simulation(method, federation, **settings)
        assert simulator.engine.graphs.captured, "no step was captured"
        _, expected, expected_records = run_simulation(method, federation, device="cpu", **settings)
        assert apart(state, expected) < 2e-3
        for record, other in zip(records, expected_records, strict=True):
            assert record["loss"] == pytest.approx(other["loss"], rel=1e-3)


@pytest.mark.parametrize("method", [FedBN(), Ditto(), PerFedAvg()], ids=label)
def test_batch_norm_is_captured_in_a_graph_and_computes_the_same_as_on_a_cpu(method):
    def network():
        return build_net(Network(net="mlp-bn", hidden=7), federation.sample_shape, federation.classes, seed=3)

    federation = make_federation()  # of unequal clients: some finish early
    simulator, state, _ = run_simulation(method, federation, network=network, rounds=4)
    assert simulator.engine.name == "stacked"
    assert simulator.engine.graphs.captured, "no step was captured"
    _, expected, _ = run_simulation(method, federation, network=network, rounds=4, device="cpu")
    assert apart(state, expected) < 2e-3


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_batch_norm_between_convolutions_computes_the_same_as_the_loop(precision):
    # Steps so small that rounding errors do not grow: with parameters 0.4 % off, losses differ by 0.4 % at most.
    federation, local = images(), LocalTraining(epochs=3, batch=10, lr=0.002)

    def network():
        return build_net(Network(net="cnn-bn"), federation.sample_shape, federation.classes, seed=3)

    _, _, looped = run_simulation(FedBN(), federation, local, network, rounds=6, backend="loop", device="cpu")
    _, state, records = run_simulation(FedBN(), federation, local, network, rounds=6, precision=precision)
    assert [each["loss"] for each in records] == pytest.approx([each["loss"] for each in looped], rel=0.02)
    assert records[-1]["accuracy"] == pytest.approx(looped[-1]["accuracy"], abs=0.1)
    assert all(value.dtype == torch.float32 for value in state.params.row(0).values())


@pytest.mark.parametrize("schedule", ["exponential", "cosine"])
@pytest.mark.parametrize("fused", [True, False])
def test_a_captured_step_uses_the_current_learning_rate(schedule, fused, monkeypatch):
    if not fused:
        monkeypatch.setattr(kernels, "usable", lambda *_: False)
    local = dataclasses.replace(LOCAL, schedule=schedule, lr_decay=0.5, weight_decay=0.01, clip=0.5)
    _, state, _ = run_simulation(FedAvg(), make_federation(), local, rounds=5)
    _, expected, _ = run_simulation(FedAvg(), make_federation(), local, rounds=5, device="cpu")
    assert apart(state, expected) < 1e-4


def test_steps_that_cannot_be_captured_run_without_a_graph():
    class Looks(FedAvg):
        def loss(self, net, client, batch):
            value = cross_entropy(net(client.params, batch.x), batch)
            torch.cuda.synchronize()  # not allowed during graph capture
            return value

    simulator, state, _ = run_simulation(Looks(), make_federation())
    assert not any(result is None for _, _, result in simulator.engine.graphs.captured.values())
    _, expected, _ = run_simulation(FedAvg(), make_federation(), device="cpu")
    assert apart(state, expected) < 1e-4


@pytest.mark.parametrize("method", [FedPAC(), FedPrior()], ids=label)
def test_feature_statistics_are_captured(method):
    simulator, _, _ = run_simulation(method, make_federation(), rounds=4)
    captured = [what[0] for _, what, _ in simulator.engine.graphs.captured]
    for hook in ("begin", "end"):
        assert (method, getattr(type(method), hook), simulator.net) in captured, hook


def images(clients=5, samples=40, size=16, channels=3, seed=0):
    generator = np.random.default_rng(seed)
    y = generator.integers(0, 4, clients * samples)
    x = generator.integers(0, 90, (len(y), channels, size, size)) + 40 * y[:, None, None, None]
    return Federation.from_arrays(
        x.astype(np.uint8), y, np.repeat(np.arange(clients), samples), classes=4, test_share=0.25
    )


class Mixed(nn.Module):
    """Layers that our kernels replace, and some that they do not."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, stride=2), nn.GroupNorm(4, 32), nn.Tanh(),
            nn.Conv2d(32, 32, 3, padding=1, groups=4), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.head = nn.Linear(128, 4)

    def forward(self, x):
        return self.head(self.body(x))


def mixed():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net(Mixed(), torch.zeros(1, 3, 16, 16))


def covered():
    """Layers that our kernels replace: results do not depend on the number of stacked clients."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        body = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten())
        return Net(BodyAndHead(body, nn.Linear(1024, 4)), torch.zeros(1, 3, 16, 16))


@pytest.mark.parametrize("method", [FedAvg(), FedReMa(align=1.0)], ids=["fedavg", "fedrema"])
def test_bf16_learns_as_well_as_float32(method):
    federation = images()
    local = LocalTraining(epochs=3, batch=10, lr=0.02)
    _, _, exact = run_simulation(method, federation, local, mixed, rounds=6)
    simulator, state, records = run_simulation(method, federation, local, mixed, rounds=6, precision="bf16")
    assert simulator.engine.fused
    assert records[0]["loss"] == pytest.approx(exact[0]["loss"], rel=0.02)
    assert records[-1]["accuracy"] == pytest.approx(exact[-1]["accuracy"], abs=0.1)
    assert all(value.dtype == torch.float32 for value in state.params.row(0).values())


def test_all_layers_compute_the_same_in_both_backends():
    federation = images()
    local = LocalTraining(epochs=1, batch=10, lr=0.02)
    _, stacked, _ = run_simulation(FedReMa(), federation, local, mixed)
    _, looped, _ = run_simulation(FedReMa(), federation, local, mixed, backend="loop", device="cpu")
    assert apart(stacked, looped) < 5e-3


def test_results_in_groups_and_on_disk_are_the_same():
    federation = make_federation(counts=np.random.default_rng(0).integers(4, 12, 75).tolist())
    for method in (FedAvg(), FedReMa()):
        _, whole, _ = run_simulation(method, federation)
        cut, chunked, _ = run_simulation(method, federation, chunk=32, memory=1e-6)
        assert cut.storage.on_disk
        assert apart(whole, chunked) < 1e-4


def run_jointly(simulators):
    """Run simulations again, jointly, and return their last states."""

    def again(simulator, engine):
        simulator.engine = engine
        state = simulator.start()
        list(simulator.run(state))
        return snapshot(state)

    return JointTraining(simulators[0].engine).run([functools.partial(again, simulator) for simulator in simulators])


def test_seeds_trained_jointly_have_the_same_results_as_alone():
    federation = images()
    local = LocalTraining(epochs=2, batch=10, lr=0.02)
    alone, simulators = [], []
    for seed in range(3):
        simulator, state, _ = run_simulation(FedReMa(), federation, local, covered, precision="bf16", seed=seed)
        alone.append(snapshot(state))
        simulators.append(simulator)

    found = run_jointly(simulators)
    for expected, other in zip(alone, found, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in expected.items())


@pytest.mark.parametrize("method", [FedAvg(), FedReMa(), FedPAC()], ids=lambda method: method.name)
def test_runs_on_other_partitions_trained_jointly_have_the_same_results_as_alone(method):
    local = LocalTraining(epochs=2, batch=10, lr=0.02)
    alone, simulators = [], []
    for seed in range(3):
        federation = images(seed=seed)
        simulator, state, _ = run_simulation(method, federation, local, covered, precision="bf16", seed=seed)
        alone.append(snapshot(state))
        simulators.append(simulator)

    found = run_jointly(simulators)
    for expected, other in zip(alone, found, strict=True):
        for name, value in expected.items():
            assert torch.allclose(value.double(), other[name].double(), rtol=1e-3, atol=1e-4), name


@pytest.mark.parametrize("method", [FedAvg(), FedReMa(), FedPAC()], ids=lambda method: method.name)
def test_runs_that_take_turns_have_the_same_results_as_alone(method):
    local = LocalTraining(epochs=2, batch=10, lr=0.02)
    alone, simulators = [], []
    for seed in range(3):
        simulator, state, _ = run_simulation(method, images(seed=seed), local, covered, precision="bf16", seed=seed)
        alone.append(snapshot(state))
        simulators.append(simulator)

    def again(simulator):
        state = simulator.start()
        list(simulator.run(state))
        return snapshot(state)

    found = run_in_turns([functools.partial(again, simulator) for simulator in simulators], simulators[0].device)
    for expected, other in zip(alone, found, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in expected.items())


def test_settings_that_differ_between_joint_runs_are_those_of_each_run():
    federation, local = images(), LocalTraining(epochs=2, batch=10, lr=0.02)
    alone, simulators = [], []
    for mu in (0.1, 1.0, 10.0):
        simulator, state, _ = run_simulation(FedProx(mu=mu), federation, local, covered, precision="float32")
        alone.append(snapshot(state))
        simulators.append(simulator)

    found = run_jointly(simulators)
    for expected, other in zip(alone, found, strict=True):
        for name, value in expected.items():
            assert torch.allclose(value.double(), other[name].double(), rtol=1e-3, atol=1e-4), name


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
def test_the_server_computes_in_float32_for_every_training_precision(precision):
    federation = make_federation()
    simulator, _, _ = run_simulation(FedReMa(), federation, precision=precision)
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(20, 20, generator=generator)
    tensors = {"a": torch.randn(20, 64, 1000, generator=generator), "b": torch.randn(20, 300, generator=generator)}
    heads = {
        name: torch.randn(20, *value.shape, generator=generator)
        for name, value in simulator.net.initial.items() if simulator.net.in_head(name)
    }  # fmt: skip
    probes = torch.rand(1, 64, simulator.net.features_count, generator=generator)

    def results(net, device, dtype):
        def placed(tensors):
            return {name: value.to(device, dtype) for name, value in tensors.items()}

        net = net.to(torch.device(device), dtype)
        found = {f"mixed {name}": value for name, value in mix(placed(tensors), weights.to(device, dtype)).items()}
        means = average(placed(tensors), weights[0].to(device, dtype))
        found |= {f"mean {name}": value for name, value in means.items()}
        return found | {"S": head_similarity(net, placed(heads), probes.to(device, dtype), temperature=0.5)}

    found = results(simulator.net, "cuda", torch.float32)
    for name, exact in results(simulator.net, "cpu", torch.float64).items():
        error = (found[name].cpu().double() - exact).norm() / exact.norm()
        assert error < 1e-6, f"{name}: {error:.1e}"


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_the_mean_of_a_round_is_computed_from_its_uploads_in_float32(precision):
    errors = []

    class Collected(FedAvg):
        def role(self, net, name):
            return Role.SHARED if net.in_body(name) else Role.COLLECTED

        def aggregate(self, net, state, uploads, moment):
            heads = average(uploads.params, uploads.counts)
            for name, value in uploads.params.items():
                shares = (uploads.counts.double() / uploads.counts.double().sum()).cpu()
                exact = torch.tensordot(shares, value.cpu().double(), dims=1)
                errors.append(float((heads[name].cpu().double() - exact).norm() / exact.norm()))
            return Answer(shared={**uploads.mean, **heads}, state=state)

    run_simulation(Collected(), make_federation(), precision=precision)
    assert errors
    assert max(errors) < 1e-6
