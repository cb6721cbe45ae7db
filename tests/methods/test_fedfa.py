"""FedFA: the loss and the updates of anchors, against steps computed by hand."""

import math

import numpy as np
import pytest
import torch

from fedrema.core import Moment
from fedrema.errors import BadInput
from fedrema.methods.fedfa import FedFA, initial_anchors
from tests.fixtures import BACKENDS, batch_of
from tests.methods.by_hand import (
    LR,
    assert_same,
    back,
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
    softmax,
    tensors,
)

X, Y = np.array([[1.0, 2.0], [-1.0, 0.5], [0.3, -0.7]]), [0, 1, 1]
ANCHORS = np.array([[1.0, 0.0, 0.5], [0.0, 1.0, 0.0], [0.0, 0.2, 1.0]])


def test_the_loss_equals_a_calculation_by_hand():
    params = drawn()
    h = features(params, X)
    squares = [((h[row] - ANCHORS[label]) ** 2).sum() for row, label in enumerate(Y)]
    aligned = (squares[0] + (squares[1] + squares[2]) / 2) / 3  # class 2 is not in the batch
    chances = softmax(ANCHORS @ params["head.weight"].T + params["head.bias"])
    calibrated = -sum(math.log(chances[c, c]) for c in range(3)) / 3
    client = client_of(tensors({**params, "anchors": ANCHORS}))
    padded = batch_of([*X, [9.0, 9.0]], [*Y, 2], mask=[1, 1, 1, 0])
    for batch in (batch_of(X, Y), padded):
        found = FedFA(align=0.3, calibrate=0.7).loss(linear_net(), client, batch)
        assert float(found) == pytest.approx(entropy(params, X, Y) + 0.3 * aligned + 0.7 * calibrated, rel=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_rounds_equal_a_calculation_by_hand(backend):
    align, calibrate, step = 0.3, 0.7, 0.25
    method = FedFA(align=align, calibrate=calibrate, anchor_step=step)
    simulator, state, w, data = begun(method, backend, local())
    anchors = state.params.common["anchors"].numpy().copy()
    for _ in range(2):
        simulator.run_round(state)
        trained, moved = [], []
        for x, y in data:
            counts = np.bincount(y, minlength=3)
            pull = 2 * align / 3 * (features(w, x) - anchors[y]) / counts[y][:, None]
            slope = back(w, x, (softmax(logits(w, x)) - np.eye(3)[y]) / len(y), pull)
            wrong = (softmax(anchors @ w["head.weight"].T + w["head.bias"]) - np.eye(3)) / 3
            slope["head.weight"] = slope["head.weight"] + calibrate * wrong.T @ anchors
            slope["head.bias"] = slope["head.bias"] + calibrate * wrong.sum(axis=0)
            model = plus(w, slope, -LR)
            own = anchors.copy()
            for c in range(3):
                if counts[c]:
                    own[c] = (1 - step) * anchors[c] + step * features(model, x)[y == c].mean(axis=0)
            trained.append(model)
            moved.append({"anchors": own})
        w, anchors = mean(trained, data), mean(moved, data)["anchors"]
    assert_same(state.params.common, {**w, "anchors": anchors})


def test_anchors_start_as_distinct_axes():
    anchors = initial_anchors(3, 5, Moment(0, 9, 4))
    assert (anchors.sum(dim=1) == 1).all()
    assert torch.equal(anchors @ anchors.T, torch.eye(3))
    assert torch.equal(anchors, initial_anchors(3, 5, Moment(7, 9, 4)))  # they depend on the seed, not on the round
    crowded = initial_anchors(6, 2, Moment(0, 9, 4))
    assert crowded.norm(dim=1).tolist() == pytest.approx([1.0] * 6)
    with pytest.raises(BadInput, match=r"--anchor-step must be in \[0, 1\], got 2"):
        FedFA(anchor_step=2)
