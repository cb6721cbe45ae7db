"""FedDBE against gradients written out in NumPy, and its first round."""

import numpy as np
import pytest
import torch

from fedrema.methods.fedavg import FedAvg
from fedrema.methods.feddbe import FedDBE
from tests.fixtures import BACKENDS, make_federation, make_simulator, run_all
from tests.methods.by_hand import LR, assert_same, back, begun, features, local, mean, plus, slopes, softmax


def shifted_slopes(w, shift, x, y, global_mean, strength):
    """Return the gradients of the network and of the shift."""
    h = features(w, x)
    z = (h + shift) @ w["head.weight"].T + w["head.bias"]
    wrong = (softmax(z) - np.eye(3)[y]) / len(y)
    pull = strength * (h.mean(axis=0) - global_mean) / h.shape[1] / len(y)
    found = back(w, x, wrong, pull)
    found["head.weight"] = wrong.T @ (h + shift)
    return found, (wrong @ w["head.weight"]).sum(axis=0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("strength", [50.0, 0.0])
def test_three_rounds_equal_a_calculation_by_hand(backend, strength):
    simulator, state, w, data = begun(FedDBE(mean_strength=strength), backend, local(epochs=2))
    # The first round determines the global mean only.
    simulator.run_round(state)
    means = []
    for x, y in data:
        model = w
        for _ in range(2):
            model = plus(model, slopes(model, x, y), -LR)
        means.append(features(model, x).mean(axis=0))
    counts = [len(y) for _, y in data]
    global_mean = np.average(means, axis=0, weights=counts)
    assert state.inbox.common["global_mean"].numpy() == pytest.approx(global_mean, abs=1e-12)
    assert_same(state.params.common, w)
    assert (state.params.own["shift"] == 0).all()

    shifts = [np.zeros(3) for _ in data]
    for _ in range(2):
        simulator.run_round(state)
        trained = []
        for row, (x, y) in enumerate(data):
            model = w
            for _ in range(2):
                slope, by_shift = shifted_slopes(model, shifts[row], x, y, global_mean, strength)
                model, shifts[row] = plus(model, slope, -LR), shifts[row] - LR * by_shift
            trained.append(model)
        w = mean(trained, data)
    assert_same(state.params.common, w)
    for row, (x, _) in enumerate(data):
        assert state.params.row(row)["shift"].numpy() == pytest.approx(shifts[row], abs=1e-12)
        client = simulator.cohort(state, torch.arange(2)).one(row)
        for method, shift in ((simulator.method, shifts[row]), (simulator.method.beside()["unshifted"], 0.0)):
            expected = (features(w, x) + shift) @ w["head.weight"].T + w["head.bias"]
            found = method.predict(simulator.net, client, torch.from_numpy(x)).numpy()
            assert found == pytest.approx(expected, abs=1e-12)


def test_a_client_sends_the_network_and_its_mean_feature_in_every_round():
    _, fedavg = run_all(make_simulator(FedAvg(), make_federation()))
    _, records = run_all(make_simulator(FedDBE(), make_federation()))
    extra = [record["bytes_up"] - plain["bytes_up"] for record, plain in zip(records, fedavg, strict=True)]
    assert extra == [4 * 8 * 7] * 3  # four clients, seven features in float64


def test_only_participants_of_the_first_round_determine_the_global_mean():
    simulator = make_simulator(FedDBE(), make_federation(), participation=0.5)
    state = simulator.start()
    simulator.run_round(state)
    first = state.inbox.common["global_mean"].clone()
    for _ in range(2):
        simulator.run_round(state)
    assert torch.equal(state.inbox.common["global_mean"], first)


def test_a_negative_strength_is_refused(refused_run):
    assert "--mean-strength must be 0 or more, got -1" in refused_run("feddbe", "--mean-strength", "-1")
