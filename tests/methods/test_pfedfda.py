"""pFedFDA against NumPy and SciPy: classifier, estimates, the choice of β, and rounds of training."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from fedrema.methods.pfedfda import PFedFDA
from fedrema.methods.shared.gaussians import Gaussians, choose_weights
from fedrema.methods.shared.gaussians import estimate as estimated
from tests.fixtures import BACKENDS, batch_of, make_federation, make_simulator, tensor
from tests.methods.by_hand import LR, assert_same, back, begun, features, local, logits, mean, only, plus, softmax


def classifier(means, covariance, log_prior):
    width = len(covariance)
    inverse = np.linalg.inv((1 - 1e-4) * covariance + 1e-4 * np.trace(covariance) / width * np.eye(width))
    return means @ inverse, log_prior - 0.5 * np.einsum("ci,ij,cj->c", means, inverse, means)


def log_frequencies(y, classes):
    frequencies = np.bincount(y, minlength=classes) / len(y) + 1e-4
    return np.log(frequencies / frequencies.sum())


def estimate(h, y, absent):
    means = np.stack([h[y == c].mean(axis=0) if (y == c).any() else absent[c] for c in range(len(absent))])
    centred = h - means[y]
    return means, centred.T @ centred / (len(y) - 1) + np.eye(h.shape[1])


def mixed(own, other, beta):
    return tuple(b * mine + (1 - b) * theirs for b, mine, theirs in zip(beta, own, other, strict=True))


def cross_validated(h, y, other, log_prior):
    """Return the loss as a function of β, over both folds."""
    position = np.array([(y[:at] == y[at]).sum() for at in range(len(y))])
    usable = np.bincount(y)[y] > 1

    def loss(beta):
        total = 0.0
        for parity in (0, 1):
            rest, held_out = usable & (position % 2 == parity), usable & (position % 2 != parity)
            weight, bias = classifier(*mixed(estimate(h[rest], y[rest], other[0]), other, beta), log_prior)
            probabilities = softmax(h[held_out] @ weight.T + bias)
            total -= np.log(probabilities[np.arange(held_out.sum()), y[held_out]]).mean()
        return total

    return loss


def drawn(seed, n=40, width=3, classes=4):
    """Return features and labels of one client, and statistics from elsewhere; one class has a single sample."""
    generator = np.random.default_rng(seed)
    y = np.concatenate([generator.integers(0, classes - 2, n - 1), [classes - 2]])
    elsewhere = generator.normal(size=(classes, width))
    centres = elsewhere + 0.5 * generator.normal(size=(classes, width))
    root = generator.normal(size=(width, width))
    return centres[y] + generator.normal(size=(n, width)), y, (elsewhere, np.eye(width) + root @ root.T)


def test_estimate_mixture_and_classifier_equal_numbers_computed_by_hand():
    h, y = [[1.0, 0.0], [3.0, 0.0], [0.0, 4.0], [0.0, 6.0], [9.0, 9.0]], [0, 0, 1, 1, 1]
    absent = tensor([[7.0, 7.0], [7.0, 7.0], [4.0, 2.0]])
    own = estimated(tensor(h), batch_of(h, y, [1, 1, 1, 1, 0]), absent, ridge=1.0)
    # Class 2 has no samples. The rows are (±1, 0) and (0, ±1) from their means: 2/(4 − 1), plus 1, on the diagonal.
    assert own.means.tolist() == [[2.0, 0.0], [0.0, 5.0], [4.0, 2.0]]
    assert own.covariance.numpy() == pytest.approx(np.diag([5 / 3, 5 / 3]))
    other = Gaussians(tensor([[6.0, 4.0], [0.0, 1.0], [0.0, 2.0]]), 7 * torch.eye(2, dtype=torch.float64))
    found = own.mixed(other, tensor([0.25, 0.75]))
    assert found.means.tolist() == [[5.0, 3.0], [0.0, 2.0], [1.0, 2.0]]
    assert found.covariance.numpy() == pytest.approx(np.diag([3.0, 3.0]))  # 0.75 · 5/3 + 0.25 · 7
    weight, bias = found.classifier(tensor([0.5, 0.25, 0.25]).log())
    assert weight.numpy() == pytest.approx(np.array([[5, 3], [0, 2], [1, 2]]) / 3)  # shrinkage does not change 3 I
    assert bias.numpy() == pytest.approx(np.log([0.5, 0.25, 0.25]) - np.array([34, 4, 5]) / 6)


@pytest.mark.parametrize("separate", [True, False])
def test_beta_has_the_smallest_loss_in_the_cross_validation(separate):
    inside = 0
    for seed in range(6):
        h, y, other = drawn(seed)
        log_prior = log_frequencies(y, 4)
        found = choose_weights(
            tensor(h), batch_of(h, y), Gaussians(*map(tensor, other)), tensor(log_prior), 1.0, separate
        ).numpy()
        loss = cross_validated(h, y, other, log_prior)
        entries = 2 if separate else 1
        bounds, start = [(0, 1)] * entries, np.full(entries, 0.5)
        best = minimize(lambda b, loss=loss: loss(b * np.ones(2)), start, bounds=bounds, tol=1e-12)
        assert loss(found) == pytest.approx(best.fun, abs=1e-6)
        assert separate or found[0] == found[1]
        inside += bool(((found > 0.01) & (found < 0.99)).any())
    assert inside >= 3  # not only bounds


def test_without_two_samples_of_a_class_beta_is_zero():
    h, y = np.eye(3), np.arange(3)
    other = Gaussians(torch.zeros(3, 3, dtype=torch.float64), torch.eye(3, dtype=torch.float64))
    found = choose_weights(tensor(h), batch_of(h, y), other, tensor(np.zeros(3)), 1.0, separate=True)
    assert found.tolist() == [0, 0]


def test_a_matrix_that_is_no_covariance_gives_finite_classifiers():
    for covariance in (-np.eye(3), np.zeros((3, 3)), np.diag([4.0, 1.0, -1.0])):
        weight, bias = Gaussians(torch.ones(2, 3, dtype=torch.float64), tensor(covariance)).classifier(tensor([0, 0]))
        assert weight.isfinite().all()
        assert bias.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_rounds_equal_a_calculation_by_hand(backend):
    simulator, state, w, data = begun(PFedFDA(), backend, local(epochs=2))
    statistics = [state.params.common[name].numpy() for name in ("means", "covariance")]
    assert ((statistics[0] >= 0) & (statistics[0] < 1)).all()
    assert (statistics[1] == np.eye(3)).all()
    for _ in range(2):
        record = simulator.run_round(state).record
        trained, sent = [], []
        for row, (x, y) in enumerate(data):
            log_prior = log_frequencies(y, 3)
            weight, bias = classifier(*statistics, log_prior)
            model = {**w, "head.weight": weight, "head.bias": bias}
            for _ in range(2):
                slope = back(model, x, (softmax(logits(model, x)) - np.eye(3)[y]) / len(y))
                model = plus(model, only(slope, "body"), -LR)
            beta = [record.trace[name][row] for name in ("own_means", "own_covariance")]
            loss = cross_validated(features(model, x), y, statistics, log_prior)
            others = [loss(np.clip(beta + 0.05 * np.array(way), 0, 1)) for way in ((1, 0), (-1, 0), (0, 1), (0, -1))]
            assert loss(beta) <= min(others) + 1e-9
            sent.append(mixed(estimate(features(model, x), y, statistics[0]), statistics, beta))
            trained.append(model)
        counts = np.array([len(y) for _, y in data])
        statistics = [
            np.einsum("k,k...->...", counts / counts.sum(), np.stack(values)) for values in zip(*sent, strict=True)
        ]
        w = mean(trained, data)
    assert_same(state.params.common, {name: w[name] for name in ("body.weight", "body.bias")})
    assert_same(state.params.common, dict(zip(("means", "covariance"), statistics, strict=True)))


def test_a_client_predicts_with_statistics_of_the_received_layers():
    simulator, state, _, data = begun(PFedFDA(single_beta=True), "stacked", local())
    simulator.run_round(state)
    ready = simulator.adapted(simulator.method, simulator.cohort(state, torch.arange(2)), simulator.moment(1))
    w = {name: value.numpy() for name, value in state.params.row(0).items()}
    statistics = (w["means"], w["covariance"])
    for row, (x, y) in enumerate(data):
        h, log_prior = features(w, x), log_frequencies(y, 3)
        loss = cross_validated(h, y, statistics, log_prior)
        found = minimize(lambda b, loss=loss: loss(b * np.ones(2)), [0.5], bounds=[(0, 1)], tol=1e-14)
        weight, bias = classifier(*mixed(estimate(h, y, statistics[0]), statistics, found.x * np.ones(2)), log_prior)
        expected = h @ weight.T + bias
        scores = simulator.method.predict(simulator.net, ready.one(row), torch.from_numpy(x)).numpy()
        assert scores == pytest.approx(expected, abs=1e-3)


def test_the_last_layer_is_neither_trained_nor_sent():
    simulator = make_simulator(PFedFDA(), make_federation())
    state = simulator.start()
    record = simulator.run_round(state).record
    width, classes, inputs = 7, 4, 6
    body = width * inputs + width
    assert record["bytes_up"] == 4 * 8 * (body + classes * width + width**2 + 2)
    assert not any(name.startswith("head.") for name in state.velocity)


def test_a_negative_ridge_is_refused(refused_run):
    assert "--ridge must be 0 or more, got -1" in refused_run("pfedfda", "--ridge", "-1")
