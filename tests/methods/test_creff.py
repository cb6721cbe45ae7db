"""CReFF: gradients, matching and re-training against loops and torch's autograd."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from fedrema.core import Moment
from fedrema.errors import BadInput
from fedrema.methods.creff import CReFF, gradient_distance
from fedrema.models.body_and_head import BodyAndHead, Net, last_layer, last_layer_inputs
from tests.fixtures import BACKENDS
from tests.methods.by_hand import LR, assert_same, begun, features, local, logits, mean, plus, slopes, softmax

QUICK = CReFF(synthetic=4, match_steps=3, retrain_epochs=2, retrain_batch=5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_model_equals_fedavgs_and_clients_send_gradients_by_class(backend):
    simulator, state, w, data = begun(QUICK, backend, local())
    layer = (w["head.weight"], w["head.bias"])
    for _ in range(2):
        sent = simulator.end(_trained(simulator, state), simulator.moment(state.round + 1))[1]
        for row, (x, y) in enumerate(data):
            h = features(w, x)
            chances = softmax(h @ layer[0].T + layer[1])
            for c in range(3):
                assert float(sent["holds"][row, c]) == float((y == c).any())
                if (y == c).any():
                    wrong = chances[y == c] - np.eye(3)[c]
                    expected = wrong.T @ np.column_stack([h[y == c], np.ones((y == c).sum())]) / (y == c).sum()
                    assert sent["gradients"][row, c].numpy() == pytest.approx(expected, abs=1e-12)
        simulator.run_round(state)
        w = mean([plus(w, slopes(w, x, y), -LR) for x, y in data], data)
        layer = tuple(state.inbox.common[f"classifier.{name}"].numpy() for name in ("weight", "bias"))
    assert_same(state.params.common, w)
    client = simulator.cohort(state, torch.arange(2)).one(0)
    found = QUICK.predict(simulator.net, client, torch.from_numpy(data[0][0]))
    assert found.numpy() == pytest.approx(features(w, data[0][0]) @ layer[0].T + layer[1], abs=1e-12)
    assert not np.allclose(found.numpy(), logits(w, data[0][0]))


def _trained(simulator, state):
    from dataclasses import replace

    cohort = simulator.cohort(state, torch.arange(2))
    return replace(cohort, received=cohort.params)


def test_the_distance_of_gradients_equals_a_calculation_by_hand():
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(3, 4, 5, generator=generator, dtype=torch.float64)
    real = torch.randn(3, 3, 6, generator=generator, dtype=torch.float64)
    weight, bias = (torch.randn(size, generator=generator, dtype=torch.float64) for size in ((3, 5), (3,)))
    found = gradient_distance(made, real, weight, bias)
    for c in range(3):
        layer = weight.clone().requires_grad_(), bias.clone().requires_grad_()
        loss = functional.cross_entropy(made[c] @ layer[0].T + layer[1], torch.full((4,), c))
        by_weight, by_bias = (value.numpy() for value in torch.autograd.grad(loss, layer))
        rows = [*zip(by_weight, real[c, :, :-1].numpy(), strict=True), (by_bias, real[c, :, -1].numpy())]
        expected = sum(1 - a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in rows)
        assert float(found[c]) == pytest.approx(expected, rel=1e-9)


def test_matching_reduces_the_distance_and_does_not_change_unknown_classes():
    generator = torch.Generator().manual_seed(0)
    made, wanted = (torch.randn(3, 4, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    weight, bias = (torch.randn(size, generator=generator, dtype=torch.float64) for size in ((3, 5), (3,)))
    wrong = (torch.softmax(wanted @ weight.T + bias, dim=2) - torch.eye(3, dtype=torch.float64)[:, None]) / 4
    ones = torch.cat([wanted, wanted.new_ones(3, 4, 1)], dim=2)
    real = torch.einsum("cmo,cmd->cod", wrong, ones)  # so that the distance of `wanted` itself is 0
    assert gradient_distance(wanted, real, weight, bias).abs().max() < 1e-9
    known = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    moved, _ = CReFF(match_steps=50, match_lr=0.5).match(made, real, known, weight, bias)
    before, after = (gradient_distance(each, real, weight, bias) for each in (made, moved))
    assert (after[[0, 2]] < 0.3 * before[[0, 2]]).all()
    assert torch.equal(moved[1], made[1])


def test_retraining_is_plain_sgd():
    features_made = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    moment = Moment(2, 5, 7)
    start = CReFF(retrain_epochs=0).retrain(features_made, moment)
    assert max(float(value.abs().max()) for value in start) <= 4**-0.5
    found = CReFF(retrain_epochs=3, retrain_batch=6, retrain_lr=0.3).retrain(features_made, moment)
    layer = [value.clone().requires_grad_() for value in start]
    optimiser = torch.optim.SGD(layer, lr=0.3)
    for _ in range(3):  # all six features in every step
        optimiser.zero_grad()
        x, y = features_made.flatten(0, 1), torch.arange(3).repeat_interleave(2)
        functional.cross_entropy(x @ layer[0].T + layer[1], y).backward()
        optimiser.step()
    for one, other in zip(found, layer, strict=True):
        assert torch.allclose(one, other.detach(), rtol=0, atol=1e-12)


def test_the_inputs_of_the_last_layer_in_a_deeper_head():
    head = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))
    net = Net(BodyAndHead(nn.Flatten(), head), torch.zeros(2, 3))
    assert last_layer(net) == ("head.2.weight", "head.2.bias")
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    expected = torch.relu(x @ net.initial["head.0.weight"].T + net.initial["head.0.bias"])
    assert torch.allclose(last_layer_inputs(net, net.initial, x), expected, atol=1e-6)
    with pytest.raises(BadInput, match="whose last layer is linear and has a bias"):
        last_layer(Net(BodyAndHead(nn.Flatten(), nn.Linear(3, 2, bias=False)), torch.zeros(2, 3)))
