"""IFCA: the choice of a model, the averages of clusters, and rounds computed by hand."""

import numpy as np
import pytest
import torch

from fedrema.core import Moment, Uploads
from fedrema.errors import BadInput
from fedrema.methods.ifca import IFCA
from fedrema.methods.shared.initial_models import initial_model
from fedrema.methods.shared.second_models import copied
from tests.fixtures import BACKENDS, tensor
from tests.methods.by_hand import LR, assert_same, begun, clipped, entropy, linear_net, local, mean, plus, slopes

MOMENT = Moment(1, 3, 5)


def test_initial_models_have_the_same_entries_in_another_order():
    net = linear_net()
    first, second, again = (initial_model(net, number, MOMENT, net.initial) for number in (1, 2, 1))
    for name, value in net.initial.items():
        assert torch.equal(first[name], again[name])
        assert not torch.equal(first[name], value)
        assert torch.equal(first[name].flatten().sort().values, value.flatten().sort().values)
    assert not torch.equal(first["body.weight"], second["body.weight"])
    other = initial_model(net, 1, Moment(7, 9, 6), net.initial)
    assert not torch.equal(first["body.weight"], other["body.weight"])  # another seed
    assert torch.equal(first["body.weight"], initial_model(net, 1, Moment(7, 9, 5), net.initial)["body.weight"])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layers", ["all", "head"])
@pytest.mark.parametrize(
    ("clip", "present", "seed"),
    [(1e9, [[0, 1], [0, 1]], 5), (0.3, [[0, 1], [0], [0]], 5), (0.3, [[0]] * 6, 5), (0.3, [[1]] * 6, 2)],
)
def test_rounds_equal_a_calculation_by_hand(backend, layers, clip, present, seed):
    method = IFCA(clusters=3, layers=layers)
    simulator, state, w, data = begun(method, backend, local(epochs=2, clip=clip), rounds=len(present), seed=seed)
    simulator.participation.choose = lambda number: (present[number - 1], [])
    net, parts = simulator.net, ("body", "head") if layers == "all" else ("head",)
    models = [w]
    for number in (1, 2):
        drawn = initial_model(net, number, simulator.moment(1), net.initial)
        models.append({name: drawn[name].numpy() if name.startswith(parts) else w[name] for name in w})

    def best(row):
        return int(np.argmin([entropy(model, *data[row]) for model in models]))

    for rows in present:
        record = simulator.run_round(state).record
        chosen = {row: best(row) for row in rows}
        trained = {}
        for row in rows:
            trained[row] = models[chosen[row]]
            for _ in range(2):
                trained[row] = plus(trained[row], clipped(slopes(trained[row], *data[row]), clip), -LR)

        def averaged(members, trained=trained):
            return mean([trained[row] for row in members], [data[row] for row in members])

        everyone = averaged(rows)
        for number in range(3):
            members = [row for row in rows if chosen[row] == number]
            model = averaged(members) if members else models[number]
            models[number] = {name: model[name] if name.startswith(parts) else everyone[name] for name in w}
        assert record["trace"]["clusters"] == list(chosen.values())
        assert record["trace"]["used_clusters"] == len(set(chosen.values()))
    assert_same(state.params.common, models[0])
    cohort = simulator.adapted(method, simulator.cohort(state, torch.arange(2)), simulator.moment(len(present)))
    for row in range(2):  # who was absent chooses among the current models, with its training samples
        assert_same(method.model(net, cohort.one(row)), models[chosen.get(row, best(row))])


def test_an_unused_model_does_not_change_and_unknown_clusters_are_ignored():
    net = linear_net()
    names = list(net.initial)
    params = {name: torch.stack([torch.full_like(net.initial[name], float(row)) for row in range(4)]) for name in names}
    sent = Uploads(
        torch.arange(4),
        params,
        {"cluster": tensor([1.0, 1.0, 0.0, 9.0])},
        tensor([3.0, 1.0, 2.0, 5.0]),
        before=net.initial,
    )
    method = IFCA(clusters=3)
    answer = method.aggregate(net, {}, sent, MOMENT)
    kept = initial_model(net, 2, MOMENT, net.initial)
    for name in names:
        assert (answer.shared[name] == 2).all()
        assert (answer.shared[f"cluster1.{name}"] == 0.25).all()  # (3 · 0 + 1 · 1) / 4
        assert torch.equal(answer.shared[f"cluster2.{name}"], kept[name])
    assert set(answer.state) == {*copied(params, "cluster1"), *copied(params, "cluster2")}
    assert answer.trace["peers"].tolist()[0] == [True, True, False, False]


def test_with_one_cluster_it_is_fedavg():
    simulator, state, w, data = begun(IFCA(clusters=1), "loop", local())
    simulator.run_round(state)
    assert_same(state.params.common, mean([plus(w, slopes(w, x, y), -LR) for x, y in data], data))


def test_invalid_settings_are_refused():
    with pytest.raises(BadInput, match="--clusters must be at least 1, got 0"):
        IFCA(clusters=0)
