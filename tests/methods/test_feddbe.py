"""FedDBE against gradients written out in NumPy, and its first round."""

import numpy as np
import pytest
import torch

from fedrema.methods.fedavg import FedAvg
from fedrema.methods.feddbe import FedDBE
from tests.fixtures import BACKENDS, make_federation, make_simulator, run_all
from tests.methods.by_hand import LR, assert_same, back, begun, clipped, features, local, mean, plus, slopes, softmax


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
@pytest.mark.parametrize(
    ("strength", "clip", "present"),
    [
        (50.0, 1e9, [[0, 1], [0, 1], [0, 1]]),
        (0.0, 1e9, [[0, 1], [0, 1], [0, 1]]),
        (5.0, 0.3, [[], [1], [0, 1], [0]]),  # nothing arrives in the first round
    ],
)
def test_rounds_equal_a_calculation_by_hand(backend, strength, clip, present):
    simulator, state, w, data = begun(
        FedDBE(mean_strength=strength), backend, local(epochs=2, clip=clip), rounds=len(present)
    )
    simulator.participation.choose = lambda number: (present[number - 1], [])
    # The first round in which uploads arrive determines the global mean only.
    while not present[state.round]:
        simulator.run_round(state)
    first, *later = present[state.round :]
    simulator.run_round(state)
    means = []
    for x, y in [data[row] for row in first]:
        model = w
        for _ in range(2):
            model = plus(model, clipped(slopes(model, x, y), clip), -LR)
        means.append(features(model, x).mean(axis=0))
    global_mean = np.average(means, axis=0, weights=[len(data[row][1]) for row in first])
    assert state.inbox.common["global_mean"].numpy() == pytest.approx(global_mean, abs=1e-12)
    assert_same(state.params.common, w)
    assert (state.params.own["shift"] == 0).all()

    shifts = [np.zeros(3) for _ in data]
    for rows in later:
        simulator.run_round(state)
        trained = []
        for row in rows:
            model = w
            for _ in range(2):
                slope, by_shift = shifted_slopes(model, shifts[row], *data[row], global_mean, strength)
                slope = clipped({**slope, "shift": by_shift}, clip)
                shifts[row] = shifts[row] - LR * slope.pop("shift")
                model = plus(model, slope, -LR)
            trained.append(model)
        w = mean(trained, [data[row] for row in rows])
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
