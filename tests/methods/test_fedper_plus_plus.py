"""FedPer++ (a reconstruction): the regulariser, against steps computed by hand."""

import pytest

from fedrema.errors import BadInput
from fedrema.methods.fedper_plus_plus import FedPerPlusPlus
from tests.fixtures import BACKENDS
from tests.methods.by_hand import LR, assert_same, back, begun, features, local, logits, mean, plus, softmax


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_rounds_equal_a_calculation_by_hand(backend):
    simulator, state, first, data = begun(FedPerPlusPlus(hold=0.6), backend, local(epochs=3))
    models = [dict(first) for _ in data]
    for _ in range(2):
        simulator.run_round(state)
        for row, (x, y) in enumerate(data):
            model, held = models[row], features(models[row], x)
            for _ in range(3):
                wrong = softmax(logits(model, x))
                wrong[range(len(y)), y] -= 1
                pull = 0.6 * 2 * (features(model, x) - held) / 3 / len(y)  # three features
                model = plus(model, back(model, x, wrong / len(y), pull), -LR)
            models[row] = model
        body = mean(models, data)
        models = [{name: body[name] if name.startswith("body") else model[name] for name in model} for model in models]
    for row in range(2):
        assert_same(state.params.row(row), models[row])


def test_it_is_labelled_as_a_reconstruction():
    assert "reconstruction" in FedPerPlusPlus.title.lower()
    assert "RECONSTRUCTION" in (FedPerPlusPlus.__doc__ or "").splitlines()[0]
    with pytest.raises(BadInput, match="--hold must be 0 or more, got -1"):
        FedPerPlusPlus(hold=-1)
