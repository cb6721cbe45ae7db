"""FedALA: the weights of the merge, against steps computed by hand."""

import numpy as np
import pytest
import torch

from fedrema.methods.fedala import FedALA
from tests.fixtures import BACKENDS
from tests.methods.by_hand import LR, assert_same, begun, local, logits, mean, plus, slopes

TOP = ("head.weight", "head.bias")


def merged(w_global, own, weights):
    return {**w_global, **{name: own[name] + (w_global[name] - own[name]) * weights[name] for name in TOP}}


def learnt(weights, w_global, own, x, y, steps, rate):
    for _ in range(steps):
        slope = slopes(merged(w_global, own, weights), x, y)
        weights = {
            name: np.clip(weights[name] - rate * slope[name] * (w_global[name] - own[name]), 0, 1) for name in TOP
        }
    return weights


@pytest.mark.parametrize("backend", BACKENDS)
def test_three_rounds_equal_a_calculation_by_hand(backend):
    rate = 30.0  # large, so that some weights reach 0
    method = FedALA(weight_lr=rate, first_epochs=3)
    simulator, state, w, data = begun(method, backend, local(epochs=2))
    own = [dict(w) for _ in data]
    weights = [{name: np.ones_like(w[name]) for name in TOP} for _ in data]
    for number in (1, 2, 3):
        simulator.run_round(state)
        for row, (x, y) in enumerate(data):
            model = w
            if number > 1:
                weights[row] = learnt(weights[row], w, own[row], x, y, 3 if number == 2 else 1, rate)
                model = merged(w, own[row], weights[row])
            for _ in range(2):
                model = plus(model, slopes(model, x, y), -LR)
            own[row] = model
        w = mean(own, data)
    assert_same(state.params.common, w)
    for row in range(2):
        assert_same(state.params.row(row), weights[row], "weight.")
    every = np.concatenate([each[name].ravel() for each in weights for name in TOP])
    assert ((every > 0) & (every < 1)).any()  # weights are learnt and stay in [0, 1]
    assert every.min() >= 0
    assert every.max() <= 1

    # Scored after merging the received model; the weights of that merge are learnt on a copy.
    cohort = simulator.adapted(method, simulator.cohort(state, torch.arange(2)), simulator.moment(3))
    for row, (x, y) in enumerate(data):
        final = merged(w, own[row], learnt(weights[row], w, own[row], x, y, 1, rate))
        found = method.predict(simulator.net, cohort.one(row), torch.from_numpy(x))
        assert found.numpy() == pytest.approx(logits(final, x), abs=1e-12)


def test_with_weights_of_1_it_equals_fedavg():
    simulator, state, w, data = begun(FedALA(merged_tensors=4, weight_lr=1e-30), "stacked", local())
    for _ in range(2):
        simulator.run_round(state)
        w = mean([plus(w, slopes(w, x, y), -LR) for x, y in data], data)
    assert_same(state.params.common, w)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_are_learnt_longer_in_a_clients_first_merge_in_any_round(backend):
    method, rate = FedALA(weight_lr=30.0, first_epochs=4), 30.0
    simulator, state, w, data = begun(method, backend, local(), rounds=5)
    own = [dict(w) for _ in data]
    weights = [{name: np.ones_like(w[name]) for name in TOP} for _ in data]
    merges = [0, 0]
    # While client 0 is alone, the mean is its own model: it first merges in round 4, client 1 in round 3.
    plan = [[0], [0], [0, 1], [0, 1], [0]]
    simulator.participation.choose = lambda number: (plan[number - 1], [])
    for present in plan:
        simulator.run_round(state)
        for row in present:
            x, y = data[row]
            model = w
            if any((w[name] != own[row][name]).any() for name in TOP):
                steps = 1 if merges[row] else 4
                weights[row] = learnt(weights[row], w, own[row], x, y, steps, rate)
                model = merged(w, own[row], weights[row])
                merges[row] += 1
            own[row] = plus(model, slopes(model, x, y), -LR)
        w = mean(own, data) if len(present) == 2 else own[0]
    assert merges == [2, 2]
    assert_same(state.params.common, w)
    for row in range(2):
        assert_same(state.params.row(row), weights[row], "weight.")


def test_a_client_without_its_own_model_does_not_merge():
    method = FedALA(first_epochs=7)
    simulator, state, _, _ = begun(method, "stacked", local())
    cohort = simulator.cohort(state, torch.arange(2))
    assert [int(method.learning_epochs(cohort.one(row))) for row in range(2)] == [0, 0]
    simulator.run_round(state)
    cohort = simulator.cohort(state, torch.arange(2))
    assert [int(method.learning_epochs(cohort.one(row))) for row in range(2)] == [7, 7]
    simulator.run_round(state)
    cohort = simulator.cohort(state, torch.arange(2))
    assert [int(method.learning_epochs(cohort.one(row))) for row in range(2)] == [1, 1]
