"""FedVF (a reconstruction): the rounds in which clients adopt the average classifier, against a calculation by hand."""

import pytest
import torch

from fedrema.core import Moment
from fedrema.errors import BadInput
from fedrema.methods.fedvf import FedVF
from tests.fixtures import BACKENDS
from tests.methods.by_hand import LR, assert_same, begun, local, logits, mean, plus, slopes


def test_the_rounds_that_start_with_the_average_classifier():
    method = FedVF(first_stage=0.5, head_every=3)
    # Rounds 1 to 5 average everything, so round 6 still begins with the average; then every third: 7 and 10.
    assert [method.uses_average(Moment(number, 10, 0)) for number in range(1, 11)] == [
        *[True] * 6, True, False, False, True,
    ]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
def test_rounds_equal_a_calculation_by_hand(backend):
    method = FedVF(first_stage=0.25, head_every=3)
    simulator, state, w, data = begun(method, backend, local(), rounds=4)
    own = [dict(w) for _ in data]
    for number in range(1, 5):
        simulator.run_round(state)
        trained = []
        for row, (x, y) in enumerate(data):
            takes_over = number in (1, 2, 4)  # the first stage is round 1; then round 4 comes after three rounds
            model = w if takes_over else {name: (own[row] if name.startswith("head") else w)[name] for name in w}
            trained.append(plus(model, slopes(model, x, y), -LR))
        own, w = trained, mean(trained, data)
    assert_same(state.params.common, w)
    for row, (x, _) in enumerate(data):
        client = simulator.cohort(state, torch.arange(2)).one(row)
        mine = {name: (own[row] if name.startswith("head") else w)[name] for name in w}
        for by, model in ((method, mine), (method.beside()["global"], w)):
            found = by.predict(simulator.net, client, torch.from_numpy(x))
            assert found.numpy() == pytest.approx(logits(model, x), abs=1e-12)


def test_it_is_labelled_as_a_reconstruction():
    assert "reconstruction" in FedVF.title.lower()
    assert "RECONSTRUCTION" in (FedVF.__doc__ or "").splitlines()[0]
    with pytest.raises(BadInput, match=r"--first-stage must be in \[0, 1\], got 2"):
        FedVF(first_stage=2)
