"""APFL: the mixture, its models and its share, against steps computed by hand."""

import numpy as np
import pytest
import torch

from fedrema.errors import BadInput
from fedrema.methods.apfl import APFL
from tests.fixtures import BACKENDS
from tests.methods.by_hand import LR, assert_same, begun, clipped, local, logits, mean, plus, slopes


def mixed(v, w, share):
    return {name: share * v[name] + (1 - share) * w[name] for name in v}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("adapt", [True, False])
def test_two_rounds_equal_a_calculation_by_hand(backend, adapt):
    method = APFL(local_share=0.6, adapt_alpha=adapt)
    simulator, state, w, data = begun(method, backend, local(epochs=2))
    own, shares, trained = [dict(w) for _ in data], [0.6, 0.6], []
    for _ in range(2):
        simulator.run_round(state)
        trained = []
        for row, (x, y) in enumerate(data):
            v, model, share = own[row], w, shares[row]
            if adapt:  # α ← clip[α − η ⟨v − w, ∇F(v̄)⟩]
                slope = slopes(mixed(v, w, share), x, y)
                product = sum(((v[name] - w[name]) * slope[name]).sum() for name in v)
                share = float(np.clip(share - LR * product, 0, 1))
            for _ in range(2):
                slope = slopes(mixed(v, model, share), x, y)
                v, model = plus(v, slope, -LR * share), plus(model, slopes(model, x, y), -LR)
            own[row], shares[row] = v, share
            trained.append(model)
        w = mean(trained, data)
    assert_same(state.params.common, w)
    for row, (x, _) in enumerate(data):
        params = state.params.row(row)
        assert_same(params, own[row], "local.")
        assert float(params["share"]) == pytest.approx(shares[row], abs=1e-12)
        assert (shares[row] != 0.6) == adapt
        client = simulator.cohort(state, torch.arange(2)).one(row)
        found = method.predict(simulator.net, client, torch.from_numpy(x))
        assert found.numpy() == pytest.approx(logits(mixed(own[row], trained[row], shares[row]), x), abs=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_outputs_can_be_mixed_instead(backend):
    simulator, state, w, data = begun(APFL(mixing="outputs", adapt_alpha=False), backend, local())
    simulator.run_round(state)
    for row, (x, y) in enumerate(data):
        # Initially v = w: the mixed outputs are those of w, and v receives half of the gradient.
        assert_same(state.params.row(row), plus(w, slopes(w, x, y), -LR / 2), "local.")


def test_a_share_stays_between_0_and_1():
    simulator, state, _, _ = begun(APFL(local_share=1.0), "stacked", local(lr=5.0))
    for _ in range(3):
        simulator.run_round(state)
        assert ((state.params.own["share"] >= 0) & (state.params.own["share"] <= 1)).all()
    with pytest.raises(BadInput, match=r"--local-share must be in \[0, 1\], got 1.5"):
        APFL(local_share=1.5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_of_the_two_models_is_clipped_by_its_own_norm(backend):
    most = 0.2
    simulator, state, w, data = begun(APFL(local_share=0.25, adapt_alpha=False), backend, local(clip=most))
    simulator.run_round(state)
    trained = []
    for row, (x, y) in enumerate(data):
        gradient = slopes(w, x, y)
        trained.append(plus(w, clipped(gradient, most), -LR))
        # Initially v = w, and v receives a quarter of the mixture's gradient.
        quarter = {name: value / 4 for name, value in gradient.items()}
        assert_same(state.params.row(row), plus(w, clipped(quarter, most), -LR), "local.")
    assert_same(state.params.common, mean(trained, data))
