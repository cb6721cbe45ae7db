"""FedEM: the E and M steps and the prediction, against numbers computed by hand."""

import math

import numpy as np
import pytest
import torch

from fedrema.core import Moment
from fedrema.errors import BadInput
from fedrema.methods.fedem import FedEM
from fedrema.methods.shared.initial_models import initial_model
from tests.fixtures import BACKENDS, batch_of, tensor
from tests.methods.by_hand import (
    LR,
    assert_same,
    back,
    begun,
    client_of,
    clipped,
    linear_net,
    local,
    logits,
    mean,
    plus,
    slopes,
    softmax,
)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("clip", "present"), [(1e9, [[0, 1], [0, 1]]), (0.1, [[0, 1], [1]]), (0.1, [[0], [0]])])
def test_two_rounds_equal_a_calculation_by_hand(backend, clip, present):
    method = FedEM(components=3)
    simulator, state, w, data = begun(method, backend, local(epochs=2, clip=clip))
    simulator.participation.choose = lambda number: (present[number - 1], [])
    net = simulator.net
    others = [initial_model(net, number, simulator.moment(0), net.initial) for number in (1, 2)]
    models = [w, *({name: value.numpy() for name, value in other.items()} for other in others)]
    mixtures = [np.full(3, 1 / 3) for _ in data]

    def origins_of(row):
        x, y = data[row]
        likelihood = np.stack([softmax(logits(model, x))[np.arange(len(y)), y] for model in models])
        found = mixtures[row][:, None] * likelihood
        return found / found.sum(axis=0)

    for rows in present:
        simulator.run_round(state)
        trained = []
        for row in rows:
            x, y = data[row]
            origins = origins_of(row)
            mixtures[row] = origins.mean(axis=1)
            components = []
            for origin, component in zip(origins, models, strict=True):
                model = component
                for _ in range(2):
                    by_logits = origin[:, None] * (softmax(logits(model, x)) - np.eye(3)[y]) / len(y)
                    model = plus(model, clipped(back(model, x, by_logits), clip), -LR)
                components.append(model)
            trained.append(components)
        models = [mean([each[number] for each in trained], [data[row] for row in rows]) for number in range(3)]
    assert_same(state.params.common, models[0])
    assert_same(state.params.common, models[1], "component1.")
    assert_same(state.params.common, models[2], "component2.")
    cohort = simulator.adapted(method, simulator.cohort(state, torch.arange(2)), simulator.moment(2))
    for row, (x, _) in enumerate(data):
        assert state.memory["mixture"][row].tolist() == pytest.approx(mixtures[row].tolist(), abs=1e-12)
        # Who was absent repeats the E step with the current components.
        shares = mixtures[row] if row in present[-1] else origins_of(row).mean(axis=1)
        expected = sum(share * softmax(logits(model, x)) for share, model in zip(shares, models, strict=True))
        found = method.predict(net, cohort.one(row), torch.from_numpy(x)).exp().numpy()
        assert found == pytest.approx(expected, abs=1e-12)


def test_the_steps_of_one_client_equal_a_calculation_by_hand():
    net, method = linear_net(), FedEM(components=2)

    def predicting(*probabilities):
        """Return a model that predicts the same probabilities for every sample."""
        zeros = {name: torch.zeros_like(value) for name, value in net.initial.items()}
        return {**zeros, "head.bias": tensor(probabilities).log()}

    second = {f"component1.{name}": value for name, value in predicting(0.2, 0.4, 0.4).items()}
    client = client_of({**predicting(0.8, 0.1, 0.1), **second}, memory={"mixture": tensor([0.5, 0.5])})
    client = client.having(count=tensor(3.0))
    samples = batch_of([[1, 2], [3, 4], [5, 6], [7, 8]], [0, 0, 1, 2], [1, 1, 1, 0])  # the last one is padding
    client = method.begin(net, client, samples, Moment(1, 2, 0))
    # E step: 0.8 : 0.2 for class 0, 0.1 : 0.4 for class 1.
    assert client.inbox["origins"][:3].numpy() == pytest.approx(np.array([[0.8, 0.2], [0.8, 0.2], [0.2, 0.8]]))
    assert client.memory["mixture"].tolist() == pytest.approx([0.6, 0.4])
    first, other = -(2 * 0.8 * math.log(0.8) + 0.2 * math.log(0.1)), -(2 * 0.2 * math.log(0.2) + 0.8 * math.log(0.4))
    assert float(method.loss(net, client, samples)) == pytest.approx((first + other) / 3)
    predicted = method.predict(net, client, samples.x[:1]).exp()
    assert predicted[0].tolist() == pytest.approx([0.56, 0.22, 0.22])  # 0.6 · 0.8 + 0.4 · 0.2, 0.6 · 0.1 + 0.4 · 0.4


def test_a_component_without_weight_predicts_nothing():
    simulator, state, w, data = begun(FedEM(components=2), "loop", local())
    client = simulator.cohort(state, torch.arange(2)).one(0)
    client = client.having(memory={"mixture": torch.tensor([1.0, 0.0], dtype=torch.float64)})
    found = FedEM(components=2).predict(simulator.net, client, torch.from_numpy(data[0][0]))
    assert found.exp().numpy() == pytest.approx(softmax(logits(w, data[0][0])))


def test_with_one_component_it_is_fedavg():
    simulator, state, w, data = begun(FedEM(components=1), "stacked", local())
    simulator.run_round(state)
    assert_same(state.params.common, mean([plus(w, slopes(w, x, y), -LR) for x, y in data], data))


def test_the_mixture_stays_on_the_client():
    simulator, state, w, _ = begun(FedEM(components=2), "stacked", local())
    record = simulator.run_round(state).record
    assert set(state.memory) == {"mixture", "round"}
    assert record["bytes_up"] == 2 * 2 * 8 * sum(value.size for value in w.values())  # clients, components, bytes


def test_invalid_settings_are_refused():
    with pytest.raises(BadInput, match="--components must be at least 1, got 0"):
        FedEM(components=0)
