"""SCAFFOLD: corrected steps, and control variates by the paper's formula."""

import numpy as np
import pytest
import torch

from fedrema.core import Moment, Simulation, Uploads
from fedrema.methods.scaffold import SCAFFOLD
from fedrema.simulation.simulator import Simulator
from tests.fixtures import BACKENDS, make_federation, tensor
from tests.methods.by_hand import LR, assert_same, begun, linear_net, local, mean, plus, slopes


@pytest.mark.parametrize("backend", BACKENDS)
def test_three_rounds_equal_a_calculation_by_hand(backend):
    steps, server_lr = 2, 0.8
    simulator, state, x, data = begun(SCAFFOLD(server_lr=server_lr), backend, local(epochs=steps))
    c = {name: np.zeros_like(value) for name, value in x.items()}
    own = [dict(c) for _ in data]
    for _ in range(3):
        simulator.run_round(state)
        trained, fresh = [], []
        for row, (inputs, labels) in enumerate(data):
            y = x
            for _ in range(steps):
                y = plus(y, plus(plus(slopes(y, inputs, labels), own[row], -1.0), c), -LR)
            trained.append(y)
            # Option II of the paper: c_k⁺ = c_k − c + (x − y)/(S η)
            fresh.append(plus(plus(own[row], c, -1.0), plus(x, y, -1.0), 1 / (steps * LR)))
        changes = [plus(new, old, -1.0) for new, old in zip(fresh, own, strict=True)]
        x = plus(x, plus(mean(trained, data), x, -1.0), server_lr)
        c = plus(c, mean(changes, data))
        own = fresh
    assert_same(state.params.common, x)
    assert_same(state.params.common, c, "control.")
    for row in range(2):
        assert_same({name: value[row] for name, value in state.memory.items()}, own[row], "control.")


def test_with_momentum_a_control_is_still_the_mean_of_the_gradients():
    simulator, state, x, data = begun(SCAFFOLD(), "stacked", local(epochs=2, momentum=0.9))
    simulator.run_round(state)
    inputs, labels = data[1]
    first = slopes(x, inputs, labels)
    second = slopes(plus(x, first, -LR), inputs, labels)
    expected = {name: (first[name] + second[name]) / 2 for name in first}
    assert_same({name: value[1] for name, value in state.memory.items()}, expected, "control.")


def test_the_servers_control_changes_less_with_absent_clients():
    net = linear_net()
    before = {"head.bias": tensor([1.0, 1.0, 1.0]), "control.head.bias": tensor([2.0, 2.0, 2.0])}
    mean_of = {"head.bias": tensor([3.0, 3.0, 3.0]), "control.head.bias": tensor([6.0, 6.0, 6.0])}
    uploads = Uploads(torch.tensor([0, 3]), {}, {}, tensor([1.0, 1.0]), ("a", "b"), mean_of, before, everyone=8)
    method = SCAFFOLD(server_lr=0.5)
    answer = method.aggregate(net, method.server(net, 8), uploads, Moment(1, 2, 0))
    assert answer.shared["head.bias"].tolist() == [2.0] * 3  # half-way from 1 to 3
    assert answer.shared["control.head.bias"].tolist() == [3.0] * 3  # two of eight clients: a quarter of the change


@pytest.mark.parametrize("late", [0.0, 0.5])
def test_the_servers_control_is_the_mean_over_all_clients_also_with_absent_unequal_clients(late):
    federation = make_federation(counts=(12, 6, 30, 9), classes=3, features=2)
    settings = Simulation(9, 5, participation=0.5, late=late, late_round=4, device="cpu", precision="float64")
    simulator = Simulator(SCAFFOLD(), linear_net(), federation, local(), settings)
    state = simulator.start()
    seen, partly = set(), 0
    for result in simulator.run(state):
        seen |= set(result.record["participants"])
        joined = [row for row, joins in enumerate(simulator.participation.joins) if joins <= state.round]
        counts = simulator.counts.clone()
        unseen = [row for row in range(4) if row not in seen]
        counts[unseen] = counts[sorted(seen)].mean()  # the server's assumption; their controls are 0
        partly += len(result.record["participants"]) < len(seen)
        for name, own in state.memory.items():
            expected = torch.tensordot(counts[joined] / counts[joined].sum(), own[joined], dims=1)
            torch.testing.assert_close(state.params.common[name], expected, rtol=0, atol=1e-12)
    assert seen == {0, 1, 2, 3}
    assert partly
    assert any(state.params.common[name].abs().max() > 1e-3 for name in state.memory)
