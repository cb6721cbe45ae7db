"""pFedGraph: the collaboration graph, and rounds computed by hand."""

import math

import numpy as np
import pytest
import torch

from fedrema.core import Moment, Uploads
from fedrema.errors import BadInput
from fedrema.methods.pfedgraph import PFedGraph
from tests.fixtures import BACKENDS, tensor
from tests.methods.by_hand import (
    LR,
    assert_same,
    begun,
    client_of,
    clipped,
    drawn,
    linear_net,
    local,
    plus,
    slopes,
    tensors,
)

INITIAL = {"head.weight": tensor([[1.0]]), "head.bias": tensor([1.0])}
MODELS = {"head.weight": tensor([[[2.0]], [[1.6]], [[0.0]]]), "head.bias": tensor([[1.0], [1.8], [1.0]])}
"""Three models that have moved by (1, 0), (0.6, 0.8) and (−1, 0): their cosines are 0.6, −1 and −0.6."""


def test_the_graph_equals_a_calculation_by_hand():
    found = PFedGraph(spread=1.0).weights(MODELS, INITIAL, tensor([5.0, 3.0, 2.0]))
    # p − d/2: (0.5 + 0.5, 0.3 + 0.3, 0.2 − 0.5). The third weight is 0; the others sum to 1.6, so 0.3 is subtracted.
    # Second row: (0.5 + 0.3, 0.3 + 0.5, 0.2 − 0.3), minus 0.3. Third: (0.5 − 0.5, 0.3 − 0.3, 0.2 + 0.5): plus 0.1 each.
    assert found.numpy() == pytest.approx(np.array([[0.7, 0.3, 0.0], [0.5, 0.5, 0.0], [0.1, 0.1, 0.8]]), abs=1e-12)


def test_a_large_spread_gives_the_shares_of_samples():
    found = PFedGraph(spread=1e12).weights(MODELS, INITIAL, tensor([5.0, 3.0, 2.0]))
    assert found.numpy() == pytest.approx(np.tile([0.5, 0.3, 0.2], (3, 1)), abs=1e-9)


def test_similar_models_count_as_equal():
    models = {"head.bias": tensor([[1.0, 0.0], [math.cos(0.4), math.sin(0.4)]])}  # the cosine is 0.92
    found = PFedGraph(spread=0.1).weights(models, {"head.bias": tensor([0.0, 0.0])}, tensor([1.0, 1.0]))
    assert found.numpy() == pytest.approx(np.full((2, 2), 0.5), abs=1e-12)


def cosine_slopes(model, reference):
    """Return the gradient of ⟨θ, r⟩/‖θ‖: r/‖θ‖ − ⟨θ, r⟩ θ/‖θ‖³."""
    length = math.sqrt(sum((value**2).sum() for value in model.values()))
    inner = sum((model[name] * reference[name]).sum() for name in model)
    return {name: reference[name] / length - inner * value / length**3 for name, value in model.items()}


def unit(model):
    length = math.sqrt(sum((value**2).sum() for value in model.values()))
    return {name: value / length for name, value in model.items()}


@pytest.mark.parametrize("pull_to", ["aggregate", "models"])
def test_a_first_participation_is_pulled_to_the_received_model(pull_to):
    method = PFedGraph(pull=0.5, pull_to=pull_to)
    simulator, state, w, data = begun(method, "stacked", local(epochs=2, clip=0.3))
    present = [[0], [1]]  # with one client in a round, the graph has one node
    simulator.participation.choose = lambda number: (present[number - 1], [])
    model = {}
    for row in (0, 1):
        simulator.run_round(state)
        reference = unit(model) if row else None  # client 1 starts from the only model that there is
        model = model or dict(w)
        for _ in range(2):
            slope = slopes(model, *data[row])
            slope = plus(slope, cosine_slopes(model, reference), -0.5) if reference else slope
            model = plus(model, clipped(slope, 0.3), -LR)
        assert_same(state.params.row(row), model)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("pull_to", ["aggregate", "models"])
def test_two_rounds_equal_a_calculation_by_hand(backend, pull_to):
    method = PFedGraph(spread=2.0, pull=0.5, pull_to=pull_to)
    simulator, state, w, data = begun(method, backend, local(epochs=2))
    received, references = [dict(w) for _ in data], None
    share = np.array([len(y) for _, y in data]) / sum(len(y) for _, y in data)
    for _ in range(2):
        record = simulator.run_round(state).record
        trained = []
        for row, (x, y) in enumerate(data):
            model = received[row]
            for _ in range(2):
                gradient = slopes(model, x, y)
                if references:
                    gradient = plus(gradient, cosine_slopes(model, references[row]), -0.5)
                model = plus(model, gradient, -LR)
            trained.append(model)
        moved = [np.concatenate([(model[name] - w[name]).ravel() for name in w]) for model in trained]
        cosine = moved[0] @ moved[1] / math.sqrt((moved[0] @ moved[0]) * (moved[1] @ moved[1]))
        cosine = 1.0 if cosine > 0.9 else cosine
        weights = []
        for cosines in ([1.0, cosine], [cosine, 1.0]):  # of two weights that sum to 1, the first minimises a parabola
            first = (share[0] - share[1] + 1) / 2 + (cosines[0] - cosines[1]) / (4 * 2.0)
            weights.append((min(max(first, 0), 1), 1 - min(max(first, 0), 1)))
        received, normed = (
            [{name: sum(a * model[name] for a, model in zip(row, each, strict=True)) for name in w} for row in weights]
            for each in (trained, [unit(model) for model in trained])
        )
        references = normed if pull_to == "models" else [unit(model) for model in received]
        assert record["trace"]["own_weight"] == pytest.approx((weights[0][0] + weights[1][1]) / 2)
    for row in range(2):
        assert_same(state.params.row(row), received[row])


def test_the_second_reference_is_sent_only_if_it_is_used():
    net = linear_net()
    params = {name: torch.stack([value, 2 * value]) for name, value in tensors(drawn()).items()}
    sent = Uploads(torch.arange(2), params, {}, tensor([1.0, 1.0]))
    moment = Moment(1, 2, 0)
    assert set(PFedGraph().aggregate(net, {}, sent, moment).personal) == set(params)
    found = PFedGraph(pull_to="models").aggregate(net, {}, sent, moment).personal
    assert set(found) == {*params, *(f"reference.{name}" for name in params)}


def test_a_client_that_received_nothing_yet_is_compared_with_its_model():
    net, model = linear_net(), tensors(drawn())
    zeros = {f"reference.{name}": torch.zeros_like(value) for name, value in model.items()}  # others have received one
    for inbox in ({}, zeros):
        client = PFedGraph(pull_to="models").begin(net, client_of(model, inbox=inbox), None, Moment(3, 9, 0))
        assert_same(client.inbox, unit(drawn()), "reference.")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"spread": 0.0}, "--spread must be above 0"),
        ({"pull": math.nan}, "--pull must be a finite number, got nan"),
    ],
)
def test_invalid_settings_are_refused(settings, sentence):
    with pytest.raises(BadInput, match=sentence):
        PFedGraph(**settings)
