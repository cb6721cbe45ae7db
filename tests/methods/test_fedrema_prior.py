"""FedReMa+P: FedReMa's matching of heads that were trained under known frequencies, by hand."""

import numpy as np
import pytest
import torch

from fedrema.errors import BadInput
from fedrema.methods.fedrema import FedReMa
from fedrema.methods.fedrema_prior import FedReMaPrior

from .by_hand import BACKENDS, assert_same, back, begun, local, logits, mean, only, plus, softmax
from .test_fedprior import log_prior, trained


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_round_by_hand(backend):
    # Of two clients, Algorithm 1 always takes both (the one below the only gap belongs to the set): heads are averaged.
    simulator, world, w, data = begun(FedReMaPrior(smooth=1.0, held_out=0), backend, local(epochs=3))
    simulator.play_round(world)
    w = mean([trained(w, x, y, 1.0, 3) for x, y in data], data)
    for row, (x, y) in enumerate(data):
        client = simulator.crowd(world, torch.arange(2)).one(row)
        assert_same(client.params, w)
        answers = simulator.method.predict(simulator.net, client, torch.from_numpy(x))
        assert answers.numpy() == pytest.approx(logits(w, x) + log_prior(y, 1.0), abs=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_in_turn_the_head_too_is_trained_under_the_frequencies(backend):
    simulator, world, w, data = begun(FedReMaPrior(alternate=True, smooth=1.0, held_out=0), backend, local(epochs=1))
    simulator.play_round(world)
    models = []
    for x, y in data:
        model = w
        for part in ("head", "body"):
            wrong = softmax(logits(model, x) + log_prior(y, 1.0)) - np.eye(3)[y]
            model = plus(model, only(back(model, x, wrong / len(y)), part), -0.1)
        models.append(model)
    expected = mean(models, data)
    for row in range(2):
        assert_same(simulator.crowd(world, torch.arange(2)).one(row).params, expected)


def test_matching_sees_heads_without_frequencies():
    """What travels and is compared is φ_k, not φ_k + log π_k: where nothing is trained all heads stay the same."""
    simulator, world, _, _ = begun(FedReMaPrior(), "stacked", local(epochs=1, lr=0.0), record="relations")
    played = simulator.play_round(world)
    assert played.record["trace"]["mean_gap"] == 0
    assert played.record["trace"]["set_sizes"] == [2, 2]


def test_it_is_told_apart_and_refuses_what_fedrema_refuses():
    assert FedReMaPrior().called() == "FedReMa+P"
    assert FedReMaPrior(align=1.0).called() == "FedReMa+P+F"
    assert FedReMa().called() == "FedReMa"
    with pytest.raises(BadInput, match=r"--delta must lie in \[0, 1\], got 2"):
        FedReMaPrior(delta=2)
    with pytest.raises(BadInput, match="--smooth"):
        FedReMaPrior(smooth=-1)
