"""FedRep: first the head, then the body, against steps computed by hand."""

import pytest
import torch

from fedrema.errors import BadInput
from fedrema.methods.fedrep import FedRep
from tests.fixtures import BACKENDS
from tests.methods.by_hand import LR, assert_same, begun, local, mean, only, plus, slopes


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_rounds_equal_a_calculation_by_hand(backend):
    simulator, state, first, data = begun(FedRep(head_epochs=3), backend, local(epochs=2))
    models = [dict(first) for _ in data]
    for _ in range(2):
        simulator.run_round(state)
        for row, (x, y) in enumerate(data):
            for part in ("head", "head", "head", "body", "body"):
                models[row] = plus(models[row], only(slopes(models[row], x, y), part), -LR)
        body = mean(models, data)
        models = [{name: body[name] if name.startswith("body") else model[name] for name in model} for model in models]
    for row in range(2):
        assert_same(state.params.row(row), models[row])
    assert {name.partition(".")[0] for name in state.params.common} == {"body"}


def test_a_copy_of_the_head_can_be_fine_tuned_before_scoring():
    simulator, state, _, data = begun(FedRep(head_epochs=0, finetune_epochs=2), "loop", local())
    simulator.run_round(state)
    x, y = data[0]
    model = {name: value.numpy() for name, value in state.params.row(0).items()}
    for _ in range(2):
        model = plus(model, only(slopes(model, x, y), "head"), -LR)
    cohort = simulator.adapted(simulator.method, simulator.cohort(state, torch.arange(2)), simulator.moment(1))
    assert_same(cohort.params.row(0), model)


def test_invalid_settings_are_refused():
    with pytest.raises(BadInput, match="--head-epochs must be 0 or more, got -1"):
        FedRep(head_epochs=-1)
