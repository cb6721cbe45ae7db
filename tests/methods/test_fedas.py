"""FedAS: alignment, the weights of clients, and rounds computed by hand."""

import numpy as np
import pytest
import torch

from fedrema.core import Moment, Uploads
from fedrema.errors import BadInput
from fedrema.methods.fedas import FedAS
from tests.fixtures import BACKENDS, batch_of, tensor
from tests.methods.by_hand import (
    LR,
    assert_same,
    back,
    begun,
    client_of,
    drawn,
    features,
    linear_net,
    local,
    only,
    plus,
    slopes,
    tensors,
)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_two_rounds_equal_a_calculation_by_hand(backend, momentum):
    method = FedAS(align_epochs=2, align_lr=0.3)
    simulator, state, w, data = begun(method, backend, local(epochs=2, weight_decay=0.2, momentum=momentum))
    body, own, velocity = only(w, "body"), [dict(w) for _ in data], [plus(w, w, -1.0) for _ in data]
    for _ in range(2):
        record = simulator.run_round(state).record
        weights = []
        for row, (x, y) in enumerate(data):
            h = features(own[row], x)
            means = np.stack([h[y == c].mean(axis=0) if (y == c).any() else np.zeros(3) for c in range(3)])
            per_sample = 2 / 3 / np.array([(y == c).sum() for c in y])[:, None]  # 3 features; mean over each class
            model = {name: body[name] if "body" in name else own[row][name] for name in w}
            for _ in range(2):  # without momentum and weight decay
                away = per_sample * (features(model, x) - means[y])
                model = plus(model, only(back(model, x, np.zeros((len(y), 3)), away), "body"), -0.3)
            for _ in range(2):  # the momentum of this training is kept between rounds
                gradient = plus(slopes(model, x, y), model, 0.2)
                velocity[row] = plus(gradient, velocity[row], momentum)
                model = plus(model, velocity[row], -LR)
            own[row] = model
            weights.append(sum((value**2).sum() for value in slopes(model, x, y).values()))
        shares = np.array(weights) / sum(weights)
        body = {name: shares[0] * own[0][name] + shares[1] * own[1][name] for name in w if "body" in name}
        assert record["trace"]["fisher_shares"] == pytest.approx(shares.tolist())
    assert_same(state.params.common, body)
    for row in range(2):
        client = simulator.cohort(state, torch.arange(2)).one(row)
        assert_same(method.model(simulator.net, client), own[row])
        assert_same(state.params.row(row), {name: own[row][name] for name in w if "head" in name})


def test_the_loss_of_alignment_sums_the_means_of_classes():
    params = {**tensors(drawn()), "body.weight": tensor([[1.0, 0], [0, 1.0], [0, 0]]), "body.bias": tensor([0.0] * 3)}
    client = client_of(params, inbox={"means": tensor([[0.0, 0, 0], [1.0, 1, 0], [7.0, 7, 7]])})
    samples = batch_of([[3, 0], [0, 0], [1, 4], [8, 8]], [0, 0, 1, 1], [1, 1, 1, 0])
    # Class 0: (9 + 0)/2, class 1: 9; each divided by 3 features.
    assert float(FedAS().alignment_loss(linear_net(), client, samples)) == pytest.approx((4.5 + 9) / 3)


def test_bodies_are_averaged_by_information_and_not_by_sample_counts():
    body = {"body.bias": tensor([[1.0, 8.0], [5.0, 0.0]])}
    sent = Uploads(torch.arange(2), body, {"fisher": tensor([3.0, 1.0])}, tensor([1.0, 100.0]))
    answer = FedAS().aggregate(linear_net(), {}, sent, Moment(1, 2, 0))
    assert answer.shared["body.bias"].tolist() == [2.0, 6.0]  # (3·1 + 1·5)/4 and (3·8 + 1·0)/4
    assert answer.trace["fisher_shares"].tolist() == [0.75, 0.25]


def test_without_information_bodies_are_averaged_by_sample_counts():
    sent = Uploads(
        torch.arange(2), {"body.bias": tensor([[1.0], [5.0]])}, {"fisher": tensor([0.0, 0.0])}, tensor([3.0, 1.0])
    )
    answer = FedAS().aggregate(linear_net(), {}, sent, Moment(1, 2, 0))
    assert answer.shared["body.bias"].tolist() == [2.0]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"align_epochs": -1}, "--align-epochs must be 0 or more, got -1"),
        ({"align_lr": 0.0}, "--align-lr must be above 0, got 0.0"),
    ],
)
def test_invalid_settings_are_refused(settings, sentence):
    with pytest.raises(BadInput, match=sentence):
        FedAS(**settings)
