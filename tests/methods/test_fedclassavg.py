"""FedClassAvg: the contrastive loss computed with loops, the loss by hand, private bodies and averaged heads."""

import math

import numpy as np
import pytest
import torch

from fedrema.methods.fedclassavg import FedClassAvg, supervised_contrastive_loss
from tests.fixtures import BACKENDS, batch_of, tensor
from tests.methods.by_hand import (
    LR,
    assert_same,
    begun,
    client_of,
    drawn,
    entropy,
    features,
    linear_net,
    local,
    logits,
    mean,
    plus,
    slopes,
    tensors,
)

X, Y = np.array([[1.0, 2.0], [-1.0, 0.5], [0.3, -0.7]]), [0, 1, 0]


def contrast_by_loops(h, labels):
    total = 0.0
    for i in range(len(h)):
        others = [a for a in range(len(h)) if a != i]
        below = math.log(sum(math.exp(h[i] @ h[a] / 100) for a in others))
        alike = [p for p in others if labels[p] == labels[i]]
        total += sum(h[i] @ h[p] / 100 - below for p in alike) / len(alike)
    return -100 / 0.07 * total / len(h)


def test_the_contrastive_loss_equals_a_calculation_with_loops():
    h = np.random.default_rng(0).normal(size=(6, 4)) * 5
    labels = [0, 1, 0, 1, 2, 2]
    expected = contrast_by_loops(h, labels)
    found = supervised_contrastive_loss(torch.from_numpy(h), torch.tensor(labels), torch.ones(6, dtype=torch.float64))
    assert float(found) == pytest.approx(expected, rel=1e-12)
    padded = torch.from_numpy(np.concatenate([h, [[1.0] * 4]]))
    mask = tensor([1.0] * 6 + [0.0])
    assert float(supervised_contrastive_loss(padded, torch.tensor([*labels, 0]), mask)) == pytest.approx(
        expected, rel=1e-12
    )


def test_the_loss_equals_a_calculation_by_hand():
    params, received = drawn(0), drawn(1)
    views = [[[0, 0, 1.0, 0.0], [0, 0, 1.5, 0.5], [0, 0, 0.5, -1.0]], [[0, 0, 2.0, 1.0]] * 3]
    first, second = (np.array([table[row][2] * X[row] + table[row][3] for row in range(3)]) for table in views)
    h = np.concatenate([features(params, first), features(params, second)])
    apart = sum(((params[name] - received[name]) ** 2).mean() for name in ("head.weight", "head.bias"))
    expected = entropy(params, first, Y) + 0.3 * contrast_by_loops(h, [*Y, *Y]) + 0.8 / 2 * apart
    client = client_of(tensors(params), tensors(received), inbox={"views": tensor(views)})
    found = FedClassAvg(hold=0.8, contrast=0.3).loss(linear_net(), client, batch_of(X, Y))
    assert float(found) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_rounds_without_views_and_contrast_equal_a_calculation_by_hand(backend):
    method = FedClassAvg(hold=0.8, contrast=0.0, jitter=0.0)
    simulator, state, first, data = begun(method, backend, local(epochs=2))
    models = [dict(first) for _ in data]
    for _ in range(2):
        simulator.run_round(state)
        own = []
        for model, (x, y) in zip(models, data, strict=True):
            received = model
            for _ in range(2):
                slope = slopes(model, x, y)
                for name in ("head.weight", "head.bias"):  # (µ/2) · mean of squares
                    slope[name] = slope[name] + 0.8 * (model[name] - received[name]) / model[name].size
                model = plus(model, slope, -LR)
            own.append(model)
        head = mean(own, data)
        models = [{name: head[name] if name.startswith("head") else model[name] for name in model} for model in own]
    for row, (x, _) in enumerate(data):
        assert_same(state.params.row(row), models[row])
        client = simulator.cohort(state, torch.arange(2)).one(row)
        found = method.predict(simulator.net, client, torch.from_numpy(x))
        assert found.numpy() == pytest.approx(logits(own[row], x), abs=1e-12)  # with the client's own trained head
