"""FedAMP: the weights of messages, and rounds computed by hand."""

import math

import numpy as np
import pytest
import torch

from fedrema.core import Moment
from fedrema.errors import BadInput
from fedrema.methods.fedamp import FedAMP
from tests.fixtures import BACKENDS, tensor
from tests.methods.by_hand import LR, assert_same, begun, local, logits, plus, slopes

MODELS = {"head.weight": tensor([[[1.0]], [[0.0]], [[3.0]]]), "head.bias": tensor([[0.0], [1.0], [4.0]])}
"""Three models: (1, 0), (0, 1) and (3, 4)."""


def test_weights_by_distance_equal_a_calculation_by_hand():
    found = FedAMP(attention="distance", sigma=10.0).weights(MODELS, alpha=2.0)
    # Squared distances: 2 between the first two, 4 + 16 and 9 + 9 to the third; α/σ = 0.2.
    near, far, other = (0.2 * math.exp(-square / 10) for square in (2, 20, 18))
    expected = [[1 - near - far, near, far], [near, 1 - near - other, other], [far, other, 1 - far - other]]
    assert found.numpy() == pytest.approx(np.array(expected), abs=1e-12)


def test_the_weights_of_peers_sum_to_at_most_one():
    found = FedAMP(attention="distance", sigma=10.0).weights(MODELS, alpha=1e4)
    near, far = math.exp(-0.2), math.exp(-2.0)
    assert found[0].tolist() == pytest.approx([0, near / (near + far), far / (near + far)], abs=1e-12)


def test_weights_by_cosine_equal_a_calculation_by_hand():
    found = FedAMP(sigma=3.0, own_weight=0.4).weights(MODELS, alpha=1.0)
    # Cosines: 0 between the first two, 3/5 and 4/5 to the third.
    zero, first, second = (math.exp(3 * cosine) for cosine in (0.0, 0.6, 0.8))
    assert found[0].tolist() == pytest.approx([0.4, 0.6 * zero / (zero + first), 0.6 * first / (zero + first)])
    assert found[2].tolist() == pytest.approx([0.6 * first / (first + second), 0.6 * second / (first + second), 0.4])
    equal = FedAMP(sigma=3.0).weights(MODELS, alpha=1.0)
    assert equal.diagonal().tolist() == pytest.approx([1 / 3] * 3)
    assert FedAMP().weights({"head.bias": tensor([[1.0, 2.0]])}, alpha=1.0).tolist() == [[1.0]]  # alone


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_rounds_equal_a_calculation_by_hand(backend):
    method = FedAMP(own_weight=0.7, step=5.0, tie=2.0)
    simulator, state, w, data = begun(method, backend, local(epochs=2))
    clouds = [dict(w) for _ in data]
    for _ in range(2):
        simulator.run_round(state)
        own = []
        for row, (x, y) in enumerate(data):
            model = clouds[row]
            for _ in range(2):  # ∇F + (λ/α) (w − u)
                model = plus(model, plus(slopes(model, x, y), plus(model, clouds[row], -1.0), 2.0 / 5.0), -LR)
            own.append(model)
        clouds = [  # of two clients, the other has the rest of the weight
            {name: 0.7 * own[row][name] + 0.3 * own[1 - row][name] for name in w} for row in range(2)
        ]
    for row, (x, _) in enumerate(data):
        assert_same(state.params.row(row), clouds[row])
        client = simulator.cohort(state, torch.arange(2)).one(row)
        found = method.predict(simulator.net, client, torch.from_numpy(x))
        assert found.numpy() == pytest.approx(logits(own[row], x), abs=1e-12)


def test_alpha_falls_tenfold_every_thirty_rounds_but_not_below_one():
    method = FedAMP()
    found = [method.alpha(Moment(number, 500, 0)) for number in (1, 30, 31, 61, 121, 500)]
    assert found == pytest.approx([1e4, 1e4, 1e3, 1e2, 1.0, 1.0])
    assert FedAMP(step=0.5).alpha(Moment(500, 500, 0)) == 0.5


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"own_weight": 2.0}, r"--own-weight must be in \[0, 1\], got 2.0"),
        ({"step_decay": 0.0}, r"--step-decay must be in \(0, 1\], got 0.0"),
        ({"sigma": 0.0}, "--sigma must be above 0"),
    ],
)
def test_invalid_settings_are_refused(settings, sentence):
    with pytest.raises(BadInput, match=sentence):
        FedAMP(**settings)
