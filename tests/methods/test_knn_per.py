"""kNN-Per against neighbours found by sorting in NumPy, and its choice of λ."""

import numpy as np
import pytest
import torch

from fedrema.methods.fedavg import FedAvg
from fedrema.methods.knn_per import KNNPer
from tests.fixtures import BACKENDS, make_federation, make_simulator, snapshot
from tests.methods.by_hand import begun, features, local, logits, softmax


def votes(h, stored, y, neighbours, width):
    found = np.zeros((len(h), 3))
    for row, one in enumerate(h):
        distances = ((one - stored) ** 2).sum(axis=1)
        nearest = np.argsort(distances)[:neighbours]
        weights = np.exp(-distances[nearest] / (h.shape[1] * width))
        for place, weight in zip(nearest, weights / weights.sum(), strict=True):
            found[row, y[place]] += weight
    return found


def ready_clients(method, backend):
    simulator, state, _, data = begun(method, backend, local(epochs=2))
    simulator.run_round(state)
    cohort = simulator.adapted(simulator.method, simulator.cohort(state, torch.arange(2)), simulator.moment(1))
    return simulator, cohort, {name: value.numpy() for name, value in state.params.common.items()}, data


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("neighbours", "width"), [(3, 1.0), (10, 0.2)])  # one client has fewer than ten samples
def test_predictions_mix_the_global_model_with_the_nearest_own_samples(backend, neighbours, width):
    method = KNNPer(neighbours=neighbours, kernel_width=width, held_out=0, share=0.3)
    simulator, cohort, w, data = ready_clients(method, backend)
    for row, (x, y) in enumerate(data):
        tested = simulator.test.of(row).x.numpy()
        near = votes(features(w, tested), features(w, x), y, neighbours, width)
        expected = np.log(0.3 * near + 0.7 * softmax(logits(w, tested)))
        found = method.predict(simulator.net, cohort.one(row), torch.from_numpy(tested)).numpy()
        assert found == pytest.approx(expected, abs=1e-10)
        alone = method.beside()["global"].predict(simulator.net, cohort.one(row), torch.from_numpy(tested)).numpy()
        assert alone == pytest.approx(logits(w, tested), abs=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_share_minimises_the_loss_of_held_out_samples(backend):
    method = KNNPer(neighbours=2, held_out=0.25)
    _, cohort, w, data = ready_clients(method, backend)
    shares = []
    for row, (x, y) in enumerate(data):
        held = np.arange(len(y)) % 4 == 3
        near = votes(features(w, x[held]), features(w, x[~held]), y[~held], 2, 1.0)
        model = softmax(logits(w, x[held]))
        candidates = np.linspace(0, 1, 11)
        losses = [
            -np.log(np.maximum(each * near + (1 - each) * model, 1e-300)[np.arange(held.sum()), y[held]]).sum()
            for each in candidates
        ]
        shares.append(cohort.one(row).inbox["share"].item())
        assert shares[-1] == pytest.approx(candidates[np.argmin(losses)])
    assert set(shares) != {0.5}  # not the default


def test_without_held_out_samples_it_trains_like_fedavg():
    states = []
    for method in (KNNPer(held_out=0), FedAvg()):
        simulator = make_simulator(method, make_federation())
        state = simulator.start()
        list(simulator.run(state))
        states.append(snapshot(state))
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_held_out_samples_have_no_influence_on_training():
    method = KNNPer(held_out=0.5)
    simulator, state, _, _ = begun(method, "loop", local())
    other, changed, _, _ = begun(method, "loop", local())
    # Samples are shared between simulators of the same federation, so that a copy is changed.
    other.train = type(other.train)(other.train.x.clone(), other.train.y, other.train.counts, other.train.precision)
    other.train.x[:, 1::2] += 5
    simulator.run_round(state)
    other.run_round(changed)
    assert all(torch.equal(value, changed.params.common[name]) for name, value in state.params.common.items())


@pytest.mark.parametrize(
    ("setting", "value", "valid"),
    [
        ("--neighbours", "0", "at least 1"),
        ("--kernel-width", "0", "above 0"),
        ("--held-out", "0.6", "in [0, 0.5]"),
        ("--share", "1.5", "in [0, 1]"),
    ],
)
def test_invalid_settings_are_refused(refused_run, setting, value, valid):
    assert f"{setting} must be {valid}, got" in refused_run("knn-per", setting, value)
