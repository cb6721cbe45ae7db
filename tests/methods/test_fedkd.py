"""FedKD: the loss by hand, and compression against NumPy's singular values."""

import numpy as np
import pytest
import torch

from fedrema.core import Moment
from fedrema.errors import BadInput
from fedrema.methods.fedkd import FedKD, compress
from tests.fixtures import BACKENDS, batch_of
from tests.methods.by_hand import (
    LR,
    assert_same,
    begun,
    client_of,
    clipped,
    drawn,
    entropy,
    features,
    linear_net,
    local,
    logits,
    mean,
    plus,
    slopes,
    softmax,
    tensors,
)

X, Y = np.array([[1.0, 2.0], [-1.0, 0.5], [0.3, -0.7]]), [0, 1, 2]


def params_of(mentee, mentor):
    return tensors({**mentee, **{f"mentor.{name}": value for name, value in mentor.items()}})


def by_hand(mentee, mentor, least=0.01):
    s, m = softmax(logits(mentee, X)), softmax(logits(mentor, X))
    divergence = (s * np.log(s / m)).mean() + (m * np.log(m / s)).mean()  # over samples and classes
    hidden = ((features(mentee, X) - features(mentor, X)) ** 2).mean()
    own = entropy(mentor, X, Y) + entropy(mentee, X, Y)
    return own + (divergence + 2 * hidden) / max(own, least)


def test_the_loss_equals_a_calculation_by_hand():
    mentee, mentor = drawn(0), drawn(1)
    found = FedKD().loss(linear_net(), client_of(params_of(mentee, mentor)), batch_of(X, Y))
    assert float(found) == pytest.approx(by_hand(mentee, mentor), rel=1e-12)
    found = FedKD(least_loss=20.0).loss(linear_net(), client_of(params_of(mentee, mentor)), batch_of(X, Y))
    assert float(found) == pytest.approx(by_hand(mentee, mentor, 20.0), rel=1e-12)
    assert by_hand(mentee, mentor, 20.0) < by_hand(mentee, mentor)


def test_padding_does_not_affect_the_loss():
    client = client_of(params_of(drawn(0), drawn(1)))
    padded = batch_of([*X, [9.0, 9.0]], [*Y, 1], mask=[1, 1, 1, 0])
    found = [FedKD().loss(linear_net(), client, batch) for batch in (padded, batch_of(X, Y))]
    assert float(found[0]) == pytest.approx(float(found[1]), rel=1e-12)


def test_a_loss_of_zero_does_not_cause_a_division_by_zero():
    sure = {**drawn(0), "head.weight": np.zeros((3, 3)), "head.bias": np.array([1e4, 0.0, 0.0])}
    loss = FedKD().loss(linear_net(), client_of(params_of(sure, sure)), batch_of(X, [0, 0, 0]))
    assert float(loss) == 0.0


@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (3, 2, 2, 2)])
@pytest.mark.parametrize("energy", [0.5, 0.9, 0.99])
def test_the_fewest_singular_values_with_enough_energy_are_kept(shape, energy):
    value = np.random.default_rng(0).normal(size=shape)
    u, sizes, v = np.linalg.svd(value.reshape(shape[0], -1), full_matrices=False)
    rank = next(r for r in range(1, len(sizes) + 1) if (sizes[:r] ** 2).sum() > energy * (sizes**2).sum())
    expected = ((u[:, :rank] * sizes[:rank]) @ v[:rank]).reshape(shape)
    kept, share = compress({"a": torch.from_numpy(value), "b": torch.ones(5, dtype=torch.float64)}, energy)
    assert kept["a"].numpy() == pytest.approx(expected, abs=1e-12)
    assert kept["b"].tolist() == [1.0] * 5
    numbers = min(rank * sum(u.shape[:1] + v.shape[1:]), value.size) + 5
    assert float(share) == pytest.approx(numbers / (value.size + 5))


def test_compression_of_a_zero_matrix_and_of_one_that_is_sent_uncompressed():
    kept, _ = compress({"a": torch.zeros(3, 5, dtype=torch.float64)}, 0.9)
    assert kept["a"].abs().max() == 0
    value = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    kept, share = compress({"a": value}, 1.0)
    assert torch.equal(kept["a"], value)
    assert float(share) == 1


def test_the_kept_energy_grows_over_rounds():
    method = FedKD()
    assert [method.energy(Moment(number, 100, 0)) for number in (1, 50, 100)] == pytest.approx([0.9503, 0.965, 0.98])
    with pytest.raises(BadInput, match=r"--energy-first must be in \(0, 1\], got 0"):
        FedKD(energy_first=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_uploads_and_downloads_are_compressed(backend):
    rounds = {"rounds": 1}
    plain, state, first, data = begun(FedKD(energy_first=1.0, energy_last=1.0), backend, local(epochs=3), **rounds)
    cohort = plain.cohort(state, torch.arange(2))
    trained = plain.local_training(cohort, plain.moment(1))[0].params.own
    simulator, state, _, _ = begun(FedKD(energy_first=0.6, energy_last=0.6), backend, local(epochs=3), **rounds)
    record = simulator.run_round(state).record

    def cut(change):
        if change.ndim < 2:
            return change
        u, sizes, v = np.linalg.svd(change, full_matrices=False)
        rank = next(r for r in range(1, len(sizes) + 1) if (sizes[:r] ** 2).sum() > 0.6 * (sizes**2).sum())
        return (u[:, :rank] * sizes[:rank]) @ v[:rank]

    sent = [{name: cut(trained[name][row].numpy() - first[name]) for name in first} for row in range(2)]
    for name, change in mean(sent, data).items():
        assert state.params.common[name].numpy() == pytest.approx(first[name] + cut(change), abs=1e-12)
    assert 0 < record["trace"]["sent_share"] <= 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_mentor_and_mentee_are_clipped_separately(backend):
    most = 0.2
    method = FedKD(energy_first=1.0, energy_last=1.0)  # no compression
    simulator, state, w, data = begun(method, backend, local(clip=most))
    simulator.run_round(state)
    # Both start equal, so that the distillation losses are zero in the first step.
    trained = [plus(w, clipped(slopes(w, x, y), most), -LR) for x, y in data]
    assert_same(state.params.common, mean(trained, data))
    for row in range(2):
        assert_same(state.params.row(row), trained[row], "mentor.")
