"""LG-FedAvg: heads are averaged, bodies are private."""

import pytest

from fedrema.methods.lg_fedavg import LGFedAvg
from tests.fixtures import BACKENDS
from tests.methods.by_hand import LR, assert_same, begun, local, mean, plus, slopes


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_rounds_equal_a_calculation_by_hand(backend):
    simulator, state, first, data = begun(LGFedAvg(), backend, local())
    models = [dict(first) for _ in data]
    for _ in range(2):
        record = simulator.run_round(state).record
        models = [plus(model, slopes(model, x, y), -LR) for model, (x, y) in zip(models, data, strict=True)]
        head = mean(models, data)
        models = [{name: head[name] if name.startswith("head") else model[name] for name in model} for model in models]
    for row in range(2):
        assert_same(state.params.row(row), models[row])
    assert record["bytes_up"] == 2 * (3 * 3 + 3) * 8  # two clients send a head of 12 numbers each
