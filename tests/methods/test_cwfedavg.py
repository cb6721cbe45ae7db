"""cwFedAvg: the weights of models, the regulariser, and rounds computed by hand."""

import numpy as np
import pytest

from fedrema.errors import BadInput
from fedrema.methods.cwfedavg import CwFedAvg, class_wise_weights, shares_by_norm
from tests.fixtures import BACKENDS, tensor
from tests.methods.by_hand import LR, assert_same, begun, linear_net, local, mean, plus, slopes, tensors


def test_the_weights_equal_a_calculation_by_hand():
    # With 3 and 1 samples, the first class is averaged by 3 · 0.5 and 1 · 1; the second is the first client's.
    found = class_wise_weights(tensor([[0.5, 0.5], [1.0, 0.0]]), tensor([3.0, 1.0]))
    assert found.numpy() == pytest.approx(np.array([[0.5 * 0.6 + 0.5, 0.5 * 0.4], [0.6, 0.4]]), abs=1e-12)


def test_a_class_that_no_client_has_gets_no_weight():
    found = class_wise_weights(tensor([[1.0, 0.0], [1.0, 0.0]]), tensor([3.0, 1.0]))
    assert found.tolist() == [[0.75, 0.25], [0.75, 0.25]]


def test_implausible_shares_have_no_more_weight_than_others():
    counts = tensor([3.0, 1.0])
    usual, scaled = (class_wise_weights(tensor([[0.5, 0.5], row]), counts) for row in ([1.0, 0.0], [1e9, -7.0]))
    assert scaled.numpy() == pytest.approx(usual.numpy())
    assert class_wise_weights(tensor([[0.5, 0.5], [0.0, 0.0]]), counts).tolist() == [[0.75, 0.25], [0.75, 0.25]]


def test_shares_are_norms_of_rows():
    params = {
        "head.weight": tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 2.0], [1.0, 2.0, 2.0]]),
        "head.bias": tensor([9.0] * 3),
    }
    assert shares_by_norm(linear_net(), params).tolist() == pytest.approx([0.5, 0.2, 0.3])


def norms(weight):
    return np.sqrt((weight**2).sum(axis=1))


def regulariser_slopes(weight, frequencies):
    """Return the gradient of ‖p − p̃‖ with p̃_c = r_c / Σ r and r_c = ‖φ_c‖, with respect to the weight."""
    r = norms(weight)
    shares = r / r.sum()
    by_share = (shares - frequencies) / np.sqrt(((shares - frequencies) ** 2).sum())
    by_norm = (by_share - by_share @ shares) / r.sum()
    return by_norm[:, None] * weight / r[:, None]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("layers", "shares"), [("all", "norms"), ("head", "labels")])
def test_two_rounds_equal_a_calculation_by_hand(backend, layers, shares):
    method = CwFedAvg(regularise=3.0, layers=layers, shares=shares)
    simulator, state, w, data = begun(method, backend, local(epochs=2))
    received = [dict(w) for _ in data]
    counts = np.array([len(y) for _, y in data])
    frequencies = [np.bincount(y, minlength=3) / len(y) for _, y in data]
    for _ in range(2):
        simulator.run_round(state)
        trained = []
        for row, (x, y) in enumerate(data):
            model = received[row]
            for _ in range(2):
                gradient = slopes(model, x, y)
                gradient["head.weight"] = gradient["head.weight"] + 1.5 * regulariser_slopes(
                    model["head.weight"], frequencies[row]
                )
                model = plus(model, gradient, -LR)
            trained.append(model)
        if shares == "labels":
            own = np.stack(frequencies)
        else:
            own = np.stack([norms(model["head.weight"]) / norms(model["head.weight"]).sum() for model in trained])
        of_class = counts[:, None] * own / (counts[:, None] * own).sum(axis=0)
        classes = [
            {name: sum(a * m[name] for a, m in zip(of_class[:, c], trained, strict=True)) for name in w}
            for c in range(3)
        ]
        received = [{name: sum(own[row, c] * classes[c][name] for c in range(3)) for name in w} for row in range(2)]
        if layers == "head":
            body = mean(trained, data)
            received = [{name: body[name] if "body" in name else model[name] for name in w} for model in received]
    for row in range(2):
        assert_same(state.params.row(row), received[row])
    assert set(state.params.common) == ({name for name in w if "body" in name} if layers == "head" else set())


def test_without_regulariser_the_loss_is_the_cross_entropy():
    simulator, state, w, data = begun(CwFedAvg(regularise=0.0), "loop", local())
    record = simulator.run_round(state).record
    x, y = data[0]
    expected = simulator.net.task.loss(
        simulator.net(tensors(w), tensor(x)), simulator.train.of(0).y, tensor([1.0] * len(y))
    )
    assert record["client_loss"][0] == pytest.approx(float(expected))


def test_invalid_settings_are_refused():
    with pytest.raises(BadInput, match="--regularise must be 0 or more, got -1"):
        CwFedAvg(regularise=-1.0)
