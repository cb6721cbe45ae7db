"""FedBN: batch-norm parameters stay on the client."""

import functools

import numpy as np
import pytest
import torch

from fedrema.core import LocalTraining
from fedrema.methods.fedavg import FedAvg
from fedrema.methods.fedbn import FedBN
from fedrema.models.networks import Network, build_net
from fedrema.runs.checkpoint import load_state, save_state
from tests.fixtures import make_simulator
from tests.methods.by_hand import begun, local

LOCAL = LocalTraining(epochs=1, batch=1000, lr=0.1, momentum=0.0, clip=0.0)
NORM = {f"body.2.{name}" for name in ("weight", "bias", "running_mean", "running_var")}


fedbn_simulator = functools.partial(make_simulator, local=LOCAL, net="mlp-bn", hidden=5, seed=0, backend="auto")


def test_batch_norm_layers_are_found_by_their_type():
    net = fedbn_simulator(FedBN()).net
    assert net.batch_norm == NORM
    roles = {name: FedBN().role(net, name) for name in net.initial}
    assert {name for name, role in roles.items() if role == "private"} == NORM
    assert build_net(Network(net="cnn-bn"), (1, 28, 28), 10, seed=0).batch_norm == {
        f"body.{place}.{name}" for place in (1, 5) for name in ("weight", "bias", "running_mean", "running_var")
    }


@pytest.mark.parametrize("backend", ["loop", "stacked"])
def test_a_round_equals_a_calculation_by_hand(backend):
    simulator = fedbn_simulator(FedBN(), backend=backend)
    state = simulator.start()
    before = {name: value.numpy().copy() for name, value in simulator.net.initial.items()}
    simulator.run_round(state)
    weights, counts = [], []
    for row in range(4):
        data = simulator.train.of(row)
        x, y, n = data.x.numpy(), data.y.numpy(), len(data.y)
        hidden = x @ before["body.1.weight"].T + before["body.1.bias"]
        middle, spread = hidden.mean(axis=0), hidden.var(axis=0)
        own = state.params.row(row)
        # Running statistics move by a tenth towards those of the batch, with the unbiased variance.
        assert own["body.2.running_mean"].numpy() == pytest.approx(0.1 * middle, abs=1e-12)
        assert own["body.2.running_var"].numpy() == pytest.approx(0.9 + 0.1 * spread * n / (n - 1), abs=1e-12)
        even = (hidden - middle) / np.sqrt(spread + 1e-5)
        features = np.maximum(even, 0)  # initially scale 1 and shift 0
        scores = features @ before["head.weight"].T + before["head.bias"]
        chances = np.exp(scores - scores.max(axis=1, keepdims=True))
        wrong = (chances / chances.sum(axis=1, keepdims=True) - np.eye(4)[y]) / n
        inner = (wrong @ before["head.weight"]) * (even > 0)
        assert own["body.2.weight"].numpy() == pytest.approx(1 - 0.1 * (inner * even).sum(axis=0), abs=1e-12)
        assert own["body.2.bias"].numpy() == pytest.approx(-0.1 * inner.sum(axis=0), abs=1e-12)
        weights.append(before["head.weight"] - 0.1 * wrong.T @ features)
        counts.append(n)
    expected = sum(n * weight for n, weight in zip(counts, weights, strict=True)) / sum(counts)
    assert state.params.common["head.weight"].numpy() == pytest.approx(expected, abs=1e-12)
    assert set(state.params.own) == NORM


@pytest.mark.parametrize("backend", ["loop", "stacked"])
def test_a_run_with_batch_norm_can_be_resumed(backend, tmp_path):
    whole = fedbn_simulator(FedBN(), backend=backend)
    state = whole.start()
    list(whole.run(state))
    first = fedbn_simulator(FedBN(), backend=backend)
    taken = first.start()
    first.run_round(taken)
    save_state(taken, tmp_path / "state.safetensors", "test")
    taken = load_state(tmp_path / "state.safetensors", "test")
    list(fedbn_simulator(FedBN(), backend=backend).run(taken))
    for row in range(4):
        for name, value in state.params.row(row).items():
            assert torch.equal(value, taken.params.row(row)[name]), name


def test_without_batch_norm_it_equals_fedavg():
    states = []
    for method in (FedBN(), FedAvg()):
        simulator, state, _, _ = begun(method, "stacked", local())
        list(simulator.run(state))
        states.append(state.params.common)
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
