"""Floco: points in the simplex, the projection of clients, and rounds computed by hand."""

import numpy as np
import pytest
import torch

from fedrema.core import Moment, Uploads
from fedrema.errors import BadInput
from fedrema.methods.floco import DRAWS, Floco, at_point, principal_components, project_clients
from fedrema.methods.shared.initial_models import initial_model
from tests.fixtures import BACKENDS, tensor
from tests.methods.by_hand import (
    LR,
    assert_same,
    begun,
    client_of,
    clipped,
    linear_net,
    local,
    logits,
    mean,
    plus,
    slopes,
)

WEIGHT = "head.weight"


def mixed(model, point):
    """Return a network at a point of the simplex; `model` holds all endpoints [M, C, d] as its weight."""
    return {**model, WEIGHT: np.tensordot(point, model[WEIGHT], 1)}


def simplex_slopes(model, x, y, point):
    gradient = slopes(mixed(model, point), x, y)
    return {**gradient, WEIGHT: point[:, None, None] * gradient[WEIGHT]}


def points_of(simulator, number, centre, radius):
    """Return the points of a round, drawn as the method draws them."""
    generator = simulator.moment(number).generator("points")
    if centre is None:
        drawn = torch.empty(DRAWS, 3, dtype=torch.float64).exponential_(generator=generator).numpy()
        return drawn / drawn.sum(axis=1, keepdims=True)
    drawn = 2 * torch.rand(DRAWS, 3, generator=generator, dtype=torch.float64).numpy() - 1
    lengths = radius * torch.rand(DRAWS, 1, generator=generator, dtype=torch.float64).numpy()
    return centre + lengths * drawn / np.abs(drawn).sum(axis=1, keepdims=True)


class Keyed(Floco):
    """Records which point each step uses."""

    seen: list = []  # noqa: RUF012

    def loss(self, net, client, batch):
        if batch.key is not None:
            self.seen.append(int(batch.key % DRAWS))
        return super().loss(net, client, batch)


@pytest.mark.parametrize("clip", [1e9, 0.3])
@pytest.mark.parametrize("present", [[[0, 1]] * 3, [[0, 1], [1], [0, 1]], [[0], [1], [0, 1]]])
@pytest.mark.parametrize("tie", [0.0, 0.6])
def test_three_rounds_equal_a_calculation_by_hand(tie, present, clip):
    method = Keyed(endpoints=3, radius=0.2, first_stage=0.3, tie=tie)
    simulator, state, w, data = begun(method, "loop", local(clip=clip), rounds=3)
    simulator.participation.choose = lambda number: (present[number - 1], [])
    net = simulator.net
    others = [initial_model(net, number, simulator.moment(0), net.initial)[WEIGHT].numpy() for number in (1, 2)]
    model = {**w, WEIGHT: np.stack([w[WEIGHT], *others])}
    own, centres, basis = [model for _ in data], [None, None], None
    for number in (1, 2, 3):
        Keyed.seen.clear()
        simulator.run_round(state)
        trained, keys = [], iter(Keyed.seen)
        for row in present[number - 1]:
            x, y = data[row]
            points = points_of(simulator, number, centres[row], 0.2)
            slope = clipped(simplex_slopes(model, x, y, points[next(keys)]), clip)
            trained.append(plus(model, slope, -LR))
            if tie:
                slope = plus(simplex_slopes(own[row], x, y, points[next(keys)]), plus(own[row], model, -1.0), tie)
                own[row] = plus(own[row], clipped(slope, clip), -LR)
        changes = torch.from_numpy(np.stack([(model[WEIGHT] - each[WEIGHT]).ravel() for each in trained]))
        found, basis = project_clients(changes, basis or principal_components(changes, 3))
        for row, point in zip(present[number - 1], found.numpy(), strict=True):
            centres[row] = point if centres[row] is None else centres[row]
        model = mean(trained, [data[row] for row in present[number - 1]])
        for row, (x, _) in enumerate(data):
            client = simulator.cohort(state, torch.arange(2)).one(row)
            point = np.full(3, 1 / 3) if centres[row] is None else centres[row]
            expected = logits(mixed(own[row] if tie else model, point), x)
            assert method.predict(simulator.net, client, torch.from_numpy(x)).numpy() == pytest.approx(
                expected, abs=1e-12
            )
    found = state.params.common
    assert_same(found, {**model, WEIGHT: model[WEIGHT][0], "endpoints": model[WEIGHT][1:]})
    for row in range(2):
        assert state.inbox.row(row)["centre"].tolist() == pytest.approx(centres[row].tolist())


def test_before_clients_have_points_the_centre_of_the_simplex_predicts():
    net = linear_net()
    ends = torch.stack([2 * net.initial[WEIGHT], 6 * net.initial[WEIGHT]])
    params = {**net.initial, "endpoints": ends}
    found = Floco(endpoints=3).model(net, client_of(params))
    assert torch.allclose(found[WEIGHT], 3 * net.initial[WEIGHT])
    assert set(found) == set(net.initial)
    assert torch.equal(at_point(net, params, tensor([0.0, 0.0, 1.0]))[WEIGHT], ends[1])


def test_points_stay_in_the_ball_and_are_spread():
    client = client_of(dict(linear_net().initial), inbox={"centre": tensor([0.5, 0.5, 0.0])})
    points = Floco(endpoints=3, radius=0.2).begin(linear_net(), client, None, Moment(3, 9, 0)).inbox["points"]
    distances = (points - client.inbox["centre"]).abs().sum(dim=1)
    assert points.shape == (DRAWS, 3)
    assert float(distances.max()) <= 0.2 + 1e-12
    assert 0.08 < float(distances.mean()) < 0.12


def test_principal_components_equal_those_of_scikit_learn():
    decomposition = pytest.importorskip("sklearn.decomposition")
    rows = torch.randn(9, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    basis = principal_components(rows, 4)
    expected = decomposition.PCA(4).fit_transform(rows.numpy())
    assert ((rows - basis["mean"]) @ basis["components"].T).numpy() == pytest.approx(expected, abs=1e-9)
    few = principal_components(rows[:3], 4)["components"]  # of three rows, two components
    assert (few[2:] == 0).all()


def test_the_scale_has_the_lowest_energy_and_is_kept():
    rows = torch.randn(6, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    points, basis = project_clients(rows, principal_components(rows, 3))
    assert torch.allclose(points.sum(dim=1), torch.ones(6, dtype=torch.float64))

    def energy(scale):
        found, _ = project_clients(rows, {**basis, "scale": tensor(scale)})
        return float((1 / torch.pdist(found).clamp(min=1e-4).square()).sum())

    assert energy(float(basis["scale"])) == pytest.approx(min(energy(each) for each in np.linspace(1e-4, 1, 1000)))
    again, same = project_clients(rows[:2], basis)  # two of the clients, in a later round
    assert torch.allclose(again, points[:2])
    assert same is basis


def test_the_server_averages_and_spreads_the_clients_over_the_simplex():
    # Two endpoints with one number each. From (5, 7), four clients have moved by −t (0.8, 0.6).
    t = tensor([-0.3, -0.1, 0.1, 0.3])
    params = {WEIGHT: (5 - 0.8 * t)[:, None, None], "endpoints": (7 - 0.6 * t)[:, None, None, None]}
    before = {WEIGHT: tensor([[5.0]]), "endpoints": tensor([[[7.0]]])}
    counts = tensor([3.0, 1.0, 1.0, 3.0])
    sent = Uploads(torch.arange(4), params, {"centre": torch.zeros(4, 2).double()}, counts, before=before)
    answer = Floco(endpoints=2, first_stage=0.5).aggregate(linear_net(), {}, sent, Moment(5, 10, 0))
    assert float(answer.shared[WEIGHT]) == pytest.approx(5.0)  # the weights of t and −t are equal
    assert float(answer.shared["endpoints"]) == pytest.approx(7.0)
    # On the only component, clients lie at t. With scale z, the projection of (t/z, 0) is ((1 + t/z)/2, (1 − t/z)/2),
    # clipped to [0, 1]. With the outer clients at the corners, t/z = ±1, and the inner ones at ±a, the energy is
    # least where 4/(1 − a)³ − 4/(1 + a)³ = 1/(2a³): at a = 0.3427.
    expected = np.array([[0.0, 1.0], [0.3287, 0.6713], [0.6713, 0.3287], [1.0, 0.0]])
    assert answer.personal["centre"].numpy() == pytest.approx(expected, abs=1e-3)
    early = Floco(endpoints=2, first_stage=0.5).aggregate(linear_net(), {}, sent, Moment(4, 10, 0))
    assert early.personal == {}


def test_a_client_keeps_its_point_and_a_new_one_gets_its_own():
    net, method = linear_net(), Floco(endpoints=2, first_stage=0.0)
    params = {
        WEIGHT: torch.randn(3, *net.initial[WEIGHT].shape, dtype=torch.float64),
        "endpoints": torch.randn(3, 1, *net.initial[WEIGHT].shape, dtype=torch.float64),
    }
    before = {name: torch.zeros_like(value[0]) for name, value in params.items()}
    counts = tensor([1.0, 1.0, 1.0])
    sent = Uploads(torch.arange(3), params, {"centre": torch.zeros(3, 2).double()}, counts, before=before)
    first = method.aggregate(net, {}, sent, Moment(1, 9, 0))
    had = torch.stack([tensor([0.25, 0.75]), first.personal["centre"][1], tensor([0.0, 0.0])])
    later = Uploads(torch.arange(3), params, {"centre": had}, counts, before=before)
    second = method.aggregate(net, first.state, later, Moment(2, 9, 0))
    assert second.personal["centre"][0].tolist() == [0.25, 0.75]
    assert torch.allclose(second.personal["centre"][1:], first.personal["centre"][1:])


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_personal_models_only_the_global_one_is_sent(backend):
    simulator, state, w, _ = begun(Floco(endpoints=2, tie=1.0), backend, local())
    record = simulator.run_round(state).record
    size = sum(value.size for value in w.values()) + w[WEIGHT].size + 2  # one more endpoint, and the point
    assert record["bytes_up"] == 2 * 8 * size
    assert Floco(tie=1.0).called() == "Floco+"
    client = simulator.cohort(state, torch.arange(2)).one(0)
    found = simulator.method.beside()["global"].model(simulator.net, client)
    centre = (state.params.common[WEIGHT] + state.params.common["endpoints"][0]) / 2
    assert torch.allclose(found[WEIGHT], centre)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"endpoints": 1}, "--endpoints must be at least 2, got 1"),
        ({"radius": -0.1}, "--radius must be 0 or more, got -0.1"),
        ({"first_stage": 1.5}, r"--first-stage must be in \[0, 1\], got 1.5"),
    ],
)
def test_invalid_settings_are_refused(settings, sentence):
    with pytest.raises(BadInput, match=sentence):
        Floco(**settings)
