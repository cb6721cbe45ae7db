"""Ditto: its two models, against steps computed by hand."""

import pytest
import torch

from fedrema.methods.ditto import Ditto
from tests.fixtures import BACKENDS
from tests.methods.by_hand import LR, assert_same, begun, local, logits, mean, plus, slopes


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_rounds_equal_a_calculation_by_hand(backend):
    simulator, state, w, data = begun(Ditto(tie=0.7), backend, local(epochs=2))
    own = [dict(w) for _ in data]
    for _ in range(2):
        simulator.run_round(state)
        trained = []
        for row, (x, y) in enumerate(data):
            v, model = own[row], w
            for _ in range(2):
                v = plus(v, plus(slopes(v, x, y), plus(v, w, -1.0), 0.7), -LR)  # ∇F(v) + λ (v − w_g)
                model = plus(model, slopes(model, x, y), -LR)
            own[row] = v
            trained.append(model)
        w = mean(trained, data)
    assert_same(state.params.common, w)
    for row in range(2):
        assert_same(state.params.row(row), own[row], "personal.")


def test_a_client_predicts_with_its_own_model():
    simulator, state, w, data = begun(Ditto(), "loop", local())
    simulator.run_round(state)
    client = simulator.cohort(state, torch.arange(2)).one(1)
    x = simulator.train.of(1).x
    v = {name: state.params.row(1)[f"personal.{name}"].numpy() for name in w}
    g = {name: value.numpy() for name, value in state.params.common.items()}
    assert Ditto().predict(simulator.net, client, x).numpy() == pytest.approx(logits(v, data[1][0]))
    other = Ditto().beside()["global"]
    assert other.predict(simulator.net, client, x).numpy() == pytest.approx(logits(g, data[1][0]))
    assert set(state.params.common) == set(w)  # nothing of v is shared
