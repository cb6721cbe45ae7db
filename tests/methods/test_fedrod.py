"""FedRoD: both losses and their gradients, against steps computed by hand."""

import numpy as np
import pytest
import torch

from fedrema.methods.fedrod import LOG_ZERO, FedRoD
from tests.fixtures import BACKENDS
from tests.methods.by_hand import (
    LR,
    assert_same,
    back,
    begun,
    clipped,
    features,
    local,
    logits,
    mean,
    plus,
    softmax,
)


def losses(w, own, x, y, gamma):
    """Return the gradients of the generic model and of the personal head."""
    counts = np.bincount(y, minlength=3)
    prior = np.where(counts > 0, gamma * np.log(np.maximum(counts, 1)), LOG_ZERO if gamma else 0.0)
    truth = np.eye(3)[y]
    generic = back(w, x, (softmax(logits(w, x) + prior) - truth) / len(y))
    h = features(w, x)
    both = logits(w, x) + h @ own["head.weight"].T + own["head.bias"]
    wrong = (softmax(both) - truth) / len(y)
    return generic, {"head.weight": wrong.T @ h, "head.bias": wrong.sum(axis=0)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gamma", [1.0, 0.5, 0.0])
def test_two_rounds_equal_a_calculation_by_hand(backend, gamma):
    simulator, state, w, data = begun(FedRoD(gamma=gamma), backend, local(epochs=2))
    own = [{name: 0 * w[name] for name in ("head.weight", "head.bias")} for _ in data]  # starts with zeros
    for _ in range(2):
        simulator.run_round(state)
        trained = []
        for row, (x, y) in enumerate(data):
            model = w
            for _ in range(2):
                generic, personal = losses(model, own[row], x, y, gamma)
                model, own[row] = plus(model, generic, -LR), plus(own[row], personal, -LR)
            trained.append(model)
        w = mean(trained, data)
    assert_same(state.params.common, w)
    for row, (x, _) in enumerate(data):
        assert_same(state.params.row(row), own[row], "personal.")
        client = simulator.cohort(state, torch.arange(2)).one(row)
        expected = logits(w, x) + features(w, x) @ own[row]["head.weight"].T + own[row]["head.bias"]
        method, inputs = simulator.method, torch.from_numpy(x)
        assert method.predict(simulator.net, client, inputs).numpy() == pytest.approx(expected, abs=1e-12)
        generic = method.beside()["generic"].predict(simulator.net, client, inputs)
        assert generic.numpy() == pytest.approx(logits(w, x), abs=1e-12)


def test_the_balanced_loss_excludes_classes_that_a_client_does_not_have():
    simulator, state, _, data = begun(FedRoD(), "loop", local())
    cohort = simulator.begin(simulator.cohort(state, torch.arange(2)), simulator.moment(1))
    for row, (_, y) in enumerate(data):
        prior = cohort.inbox.row(row)["prior"].tolist()
        assert prior == pytest.approx([np.log((y == c).sum()) if (y == c).any() else LOG_ZERO for c in range(3)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_personal_head_is_clipped_by_its_own_norm(backend):
    most = 0.2
    simulator, state, w, data = begun(FedRoD(), backend, local(clip=most))
    simulator.run_round(state)
    own = {name: 0 * w[name] for name in ("head.weight", "head.bias")}
    trained = []
    for row, (x, y) in enumerate(data):
        generic, personal = losses(w, own, x, y, gamma=1.0)
        trained.append(plus(w, clipped(generic, most), -LR))
        assert_same(state.params.row(row), plus(own, clipped(personal, most), -LR), "personal.")
    assert_same(state.params.common, mean(trained, data))
