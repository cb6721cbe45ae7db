"""pFedMe: inner and outer steps, against a calculation by hand."""

import pytest
import torch

from fedrema.errors import BadInput
from fedrema.methods.pfedme import PFedMe
from tests.fixtures import BACKENDS
from tests.methods.by_hand import LR, assert_same, begun, local, logits, mean, plus, slopes


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_rounds_equal_a_calculation_by_hand(backend):
    tie, rate, beta, decay = 3.0, 0.2, 0.5, 0.01
    method = PFedMe(tie=tie, personal_lr=rate, inner_steps=3, beta=beta)
    # Momentum is not used, and weight decay belongs to the personal model only, as in the authors' code.
    simulator, state, w, data = begun(method, backend, local(epochs=2, momentum=0.9, weight_decay=decay))
    for _ in range(2):
        simulator.run_round(state)
        trained, personal = [], []
        for x, y in data:
            model, theta = w, w
            for _ in range(2):
                for _ in range(3):
                    slope = plus(slopes(theta, x, y), theta, decay)
                    theta = plus(theta, plus(slope, plus(theta, model, -1.0), tie), -rate)
                model = plus(model, plus(model, theta, -1.0), -LR * tie)
            trained.append(model)
            personal.append(theta)
        w = plus(w, plus(mean(trained, data), w, -1.0), beta)
    assert_same(state.params.common, w)
    for row, (x, _) in enumerate(data):
        assert_same(state.params.row(row), personal[row], "personal.")
        client = simulator.cohort(state, torch.arange(2)).one(row)
        for by, model in ((method, personal[row]), (method.beside()["global"], w)):
            found = by.predict(simulator.net, client, torch.from_numpy(x))
            assert found.numpy() == pytest.approx(logits(model, x), abs=1e-12)


def test_steps_that_would_overshoot_are_refused():
    with pytest.raises(BadInput, match=r"--personal-lr 0.5 times --tie 15.0 must be below 2"):
        PFedMe(personal_lr=0.5)
