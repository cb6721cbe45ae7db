"""Per-FedAvg: its step, against parabolas computed by hand and derivatives through the inner step."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.func import grad

from fedrema.core import Batch, Client, LocalTraining, Moment
from fedrema.methods.fedavg import FedAvg
from fedrema.methods.per_fedavg import PerFedAvg
from tests.fixtures import LOCAL, clones, make_federation, tanh_simulator

BACKENDS = ["loop", "stacked"]
VARIANTS = ["first-order", "hessian-vector"]
WHOLE = LocalTraining(epochs=1, batch=1000, lr=0.1, momentum=0.0, clip=0.0)
"""One step on all samples, a plain gradient: every batch is then the same."""
MOMENT = Moment(round=1, rounds=3, seed=0)


def entropy(params, x, y):
    """Return the objective f, written out for `tanh_module`."""
    features = torch.tanh(x @ params["body.0.weight"].T + params["body.0.bias"])
    return nn.functional.cross_entropy(features @ params["head.weight"].T + params["head.bias"], y)


def moved(params, direction, by):
    return {name: value + by * direction[name] for name, value in params.items()}


def close(found, expected, tolerance):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=0, atol=tolerance), name


# A batch is a parabola: f(w) = a w²/2 − b w, so that its gradient is a w − b and its second derivative a.
def parabola(a: float, b: float) -> Batch:
    number = torch.tensor([a, b], dtype=torch.float64)
    return Batch(number[:1], number[1:], number.new_ones(1), torch.zeros(1, dtype=torch.int64))


def slope(client: Client, batch: Batch):
    return {"w": batch.x * client.params["w"] - batch.y}


def at(w: float) -> Client:
    params = {"w": torch.tensor([w], dtype=torch.float64), "frozen": torch.tensor([7.0], dtype=torch.float64)}
    return Client(params, params, memory={}, inbox={}, count=torch.tensor(1.0))


def test_the_first_order_step_equals_a_calculation_by_hand():
    # w = 1: slope 2·1 − 1 = 1 on the first; w − 0.1·1 = 0.9; there 3·0.9 − 0.5 = 2.2 on the second.
    batches = (parabola(2.0, 1.0), parabola(3.0, 0.5))
    step = PerFedAvg(adapt_lr=0.1).outer_step(slope, at(1.0), batches)
    assert step.keys() == {"w"}
    assert step["w"].tolist() == pytest.approx([2.2], rel=1e-14)


def test_the_hessian_of_the_third_batch_equals_a_calculation_by_hand():
    # As above, then 2.2 − 0.1 · 5 · 2.2 = 1.1; finite differences are exact for parabolas with any δ.
    batches = (parabola(2.0, 1.0), parabola(3.0, 0.5), parabola(5.0, -4.0))
    for difference in (0.001, 0.5):
        method = PerFedAvg(adapt_lr=0.1, variant="hessian-vector", difference=difference)
        assert method.outer_step(slope, at(1.0), batches)["w"].tolist() == pytest.approx([1.1], rel=1e-10)


def test_a_step_does_not_change_the_client():
    client = at(1.0)
    batches = (parabola(2.0, 1.0), parabola(3.0, 0.5), parabola(5.0, -4.0))
    for variant in VARIANTS:
        PerFedAvg(adapt_lr=0.1, variant=variant).outer_step(slope, client, batches)
        assert client.params["w"].tolist() == [1.0]
        assert client.params["frozen"].tolist() == [7.0]


def test_the_points_at_which_gradients_are_computed():
    asked = []

    def watched(client, batch):
        asked.append((client.params["w"].item(), batch.x.item()))
        return slope(client, batch)

    batches = (parabola(2.0, 1.0), parabola(3.0, 0.5), parabola(5.0, -4.0))
    PerFedAvg(adapt_lr=0.1, variant="hessian-vector", difference=0.5).outer_step(watched, at(1.0), batches)
    assert [place for place, _ in asked] == pytest.approx([1.0, 0.9, 1 + 0.5 * 2.2, 1 - 0.5 * 2.2])
    assert [which for _, which in asked] == [2.0, 3.0, 5.0, 5.0]


def three_batches():
    """Return parameters of the small network, and three different batches."""
    generator = torch.Generator().manual_seed(1)
    params = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in {"body.0.weight": (5, 6), "body.0.bias": 5, "head.weight": (4, 5), "head.bias": 4}.items()
    }
    batches = tuple(
        Batch(
            torch.randn(8, 6, generator=generator, dtype=torch.float64),
            torch.randint(0, 4, (8,), generator=generator),
            torch.ones(8, dtype=torch.float64),
            torch.arange(8),
        )
        for _ in range(3)
    )
    return params, batches


def step_of(method, params, batches):
    client = Client(params, params, memory={}, inbox={}, count=torch.tensor(8.0))
    return method.outer_step(lambda other, batch: grad(entropy)(other.params, batch.x, batch.y), client, batches)


def test_with_the_same_batch_twice_the_step_is_the_gradient_through_the_inner_step():
    params, (first, second, _) = three_batches()
    rate = 0.3

    def after_a_step(w):
        inner = grad(entropy)(w, first.x, first.y)
        return entropy(moved(w, inner, -rate), second.x, second.y)

    expected = grad(after_a_step)(params)
    method = PerFedAvg(adapt_lr=rate, variant="hessian-vector")
    found = step_of(method, params, (first, second, first))
    close(found, expected, 1e-6)
    # The Hessian matters here: without it the step differs.
    without = step_of(replace(method, variant="first-order"), params, (first, second))
    assert max(float((without[name] - expected[name]).abs().max()) for name in expected) > 1e-2
    # Central differences: halving δ leaves a quarter of the error.
    errors = [
        max(
            float((value - expected[name]).abs().max())
            for name, value in step_of(replace(method, difference=delta), params, (first, second, first)).items()
        )
        for delta in (0.02, 0.01)
    ]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.05)


def test_with_three_batches_the_hessian_is_that_of_the_third():
    params, (first, second, third) = three_batches()
    rate = 0.3
    inner = grad(entropy)(params, first.x, first.y)
    outer = grad(entropy)(moved(params, inner, -rate), second.x, second.y)

    def along_the_step(w):
        slopes = grad(entropy)(w, third.x, third.y)
        return sum((slopes[name] * outer[name]).sum() for name in slopes)

    product = grad(along_the_step)(params)
    method = PerFedAvg(adapt_lr=rate, variant="hessian-vector", difference=0.0001)
    close(step_of(method, params, (first, second, third)), moved(outer, product, -rate), 1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_round_with_one_batch_of_all_samples(backend, variant):
    # Clients have a single batch, which is used as all three: the step is the gradient of F(w) = f(w − α ∇f(w)).
    simulator = tanh_simulator(PerFedAvg(adapt_lr=0.3, variant=variant, difference=0.0001), backend, WHOLE)
    state = simulator.start()
    start = clones(state.params.common)
    simulator.run_round(state)
    counts = simulator.train.counts.tolist()
    expected = {name: torch.zeros_like(value) for name, value in start.items()}
    for row, count in enumerate(counts):
        data = simulator.train.of(row)

        def one_step(w, data=data):
            return moved(w, grad(entropy)(w, data.x, data.y), -0.3)

        def after_a_step(w, data=data, one_step=one_step):
            return entropy(one_step(w), data.x, data.y)

        direction = (
            grad(entropy)(one_step(start), data.x, data.y) if variant == "first-order" else grad(after_a_step)(start)
        )
        expected = moved(expected, moved(start, direction, -0.1), count / sum(counts))
    close(state.params.common, expected, 1e-14 if variant == "first-order" else 1e-8)


@dataclass(frozen=True)
class Watched(PerFedAvg):
    """Records the parameters and batches of every step."""

    seen: ClassVar[list] = []

    def outer_step(self, gradient, client, batches):
        self.seen.append((clones(client.params), batches))
        return super().outer_step(gradient, client, batches)


def clipped(direction, limit):
    norm = math.sqrt(sum(float(value.square().sum()) for value in direction.values()))
    return {name: value * min(1.0, limit / (norm + 1e-6)) for name, value in direction.items()}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("clip", [0.0, 0.7])
def test_each_step_starts_from_the_result_of_the_previous_one(variant, clip, monkeypatch):
    # One client, so that its steps are one sequence; outer steps have momentum, inner ones have none.
    monkeypatch.setattr(Watched, "seen", [])
    local = replace(LOCAL, momentum=0.9, clip=clip, epochs=2)
    federation = make_federation(counts=(20,))
    method = Watched(adapt_lr=0.3, variant=variant)
    simulator = tanh_simulator(method, "loop", local, federation=federation)
    state = simulator.start()
    simulator.run_round(state)
    weights, velocity = clones(simulator.net.initial), None
    limit = clip or math.inf
    assert len(Watched.seen) > 3
    for found, batches in Watched.seen:
        close(found, weights, 1e-9)
        first, second, *third = batches
        inner = clipped(grad(entropy)(weights, first.x, first.y), limit)
        direction = clipped(grad(entropy)(moved(weights, inner, -0.3), second.x, second.y), limit)
        if third:
            ahead, behind = (
                clipped(grad(entropy)(moved(weights, direction, by), third[0].x, third[0].y), limit)
                for by in (0.001, -0.001)
            )
            product = {name: (ahead[name] - behind[name]) / 0.002 for name in ahead}
            direction = moved(direction, product, -0.3)
        velocity = direction if velocity is None else moved(direction, velocity, 0.9)
        weights = moved(weights, velocity, -0.05)
    close(state.params.common, weights, 1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
def test_batches_of_one_step_are_different_samples(variant, monkeypatch):
    monkeypatch.setattr(Watched, "seen", [])
    simulator = tanh_simulator(Watched(variant=variant), "loop", federation=make_federation(counts=(30,)))
    simulator.run_round(simulator.start())
    roles = 2 if variant == "first-order" else 3
    _, batches = Watched.seen[0]
    assert [len(batch.index) for batch in batches] == [5] * roles
    assert len(set(torch.cat([batch.index for batch in batches]).tolist())) == 5 * roles


@dataclass(frozen=True)
class Counting(FedAvg):
    """FedAvg that counts its steps."""

    steps: ClassVar[list] = []

    def loss(self, net, client, batch):
        self.steps.append(int(client.count))
        return super().loss(net, client, batch)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("drop", [True, False])
@pytest.mark.parametrize("batch", [5, 7, 1000])
def test_the_number_of_outer_steps_equals_fedavgs_number_of_steps(variant, drop, batch, monkeypatch):
    monkeypatch.setattr(Watched, "seen", [])
    monkeypatch.setattr(Counting, "steps", [])
    local = replace(LOCAL, batch=batch, drop_incomplete=drop, epochs=3)
    for method in (Watched(variant=variant), Counting()):
        simulator = tanh_simulator(method, "loop", local)
        simulator.run_round(simulator.start())
    expected = 0
    for count in simulator.train.counts.tolist():
        size = min(batch, count)
        expected += 3 * (count // size if drop else math.ceil(count / size))
    assert len(Watched.seen) == len(Counting.steps) == expected


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_client_with_a_single_batch_can_train_and_is_scored(backend, variant):
    # Two of the clients have fewer samples than a batch, and there is a single epoch.
    local = replace(LOCAL, epochs=1, batch=15)
    simulator = tanh_simulator(PerFedAvg(variant=variant), backend, local)
    state = simulator.start()
    record = simulator.run_round(state).record
    assert min(simulator.train.counts) < 15 < max(simulator.train.counts)
    assert all(math.isfinite(loss) and loss > 0 for loss in record["client_loss"])
    assert all(0 <= value <= 1 for value in record["client_accuracy"])


def accuracies(simulator, models):
    """Return each client's accuracy with its own model, and the accuracy over all samples."""
    right = []
    for row, model in enumerate(models):
        data = simulator.test.of(row)
        features = torch.tanh(data.x @ model["body.0.weight"].T + model["body.0.bias"])
        right.append((features @ model["head.weight"].T + model["head.bias"]).argmax(1) == data.y)
    return [float(one.double().mean()) for one in right], float(torch.cat(right).double().mean())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("steps", [1, 3])
def test_clients_are_scored_after_plain_steps_on_a_copy(backend, steps):
    # Momentum is kept between rounds: it must not enter the adaptation steps.
    local = LocalTraining(epochs=2, batch=1000, lr=0.05, momentum=0.9, clip=0.0)
    simulator = tanh_simulator(PerFedAvg(adapt_lr=2.0, adapt_steps=steps), backend, local)
    state = simulator.start()
    simulator.run_round(state)
    record = simulator.run_round(state).record
    common, velocity = clones(state.params.common), clones(state.velocity)
    assert all(value.abs().max() > 0 for value in velocity.values())
    adapted = simulator.adapted(simulator.method, simulator.cohort(state, torch.arange(4)), simulator.moment(2))
    models = []
    for row in range(4):
        data, model = simulator.train.of(row), common
        for _ in range(steps):
            model = moved(model, grad(entropy)(model, data.x, data.y), -2.0)
        close(adapted.params.row(row), model, 1e-12)
        models.append(model)
    own, together = accuracies(simulator, models)
    assert record["client_accuracy"] == pytest.approx(own)
    assert record["accuracy"] == pytest.approx(together)
    # The global model is unchanged, and its own accuracy is recorded too.
    simulator.score(state, simulator.moment(2))
    close(state.params.common, common, 0.0)
    close(state.velocity, velocity, 0.0)
    unadapted = accuracies(simulator, [common] * 4)[1]
    assert unadapted != pytest.approx(together)
    assert record.alternatives == {"unadapted": {"accuracy": pytest.approx(unadapted)}}


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_step_before_scoring_is_on_one_batch_of_training_samples(backend):
    simulator = tanh_simulator(PerFedAvg(adapt_lr=0.5), backend, replace(LOCAL, batch=3, clip=0.0))
    state = simulator.start()
    simulator.run_round(state)
    common = clones(state.params.common)
    adapted = simulator.adapted(simulator.method, simulator.cohort(state, torch.arange(4)), simulator.moment(1))
    for row in range(4):
        data = simulator.train.of(row)
        taken = (common["head.bias"] - adapted.params.row(row)["head.bias"]) / 0.5  # mean of probabilities − labels
        features = torch.tanh(data.x @ common["body.0.weight"].T + common["body.0.bias"])
        chances = torch.softmax(features @ common["head.weight"].T + common["head.bias"], dim=1)
        each = chances - nn.functional.one_hot(data.y, 4)
        subsets = torch.combinations(torch.arange(len(data.y)), 3)
        errors = (each[subsets].mean(1) - taken).abs().amax(1)
        assert int((errors < 1e-12).sum()) == 1, "exactly one set of 3 training samples explains the step"


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_steps_only_the_global_model_is_scored(backend):
    simulator = tanh_simulator(PerFedAvg(adapt_steps=0), backend)
    state = simulator.start()
    record = simulator.run_round(state).record
    assert not record.alternatives
    assert record["accuracy"] == pytest.approx(accuracies(simulator, [state.params.common] * 4)[1])
    adapting = tanh_simulator(PerFedAvg(), backend)
    assert adapting.run_round(adapting.start()).record.alternatives == {"unadapted": {"accuracy": record.accuracy}}


def test_only_the_outer_learning_rate_follows_the_schedule():
    local = LocalTraining(lr=0.1, schedule="exponential", lr_decay=0.5)
    method, moment = PerFedAvg(adapt_lr=0.2), Moment(round=3, rounds=5, seed=0)
    assert [phase.lr for phase in method.phases(local, moment)] == [pytest.approx(0.025)]
    assert [(phase.lr, phase.momentum) for phase in method.adapt(local, moment)] == [(0.2, 0.0)]


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--adapt-lr", "-0.1", "--adapt-lr must be 0 or more, got -0.1."),
        ("--adapt-lr", "nan", "--adapt-lr must be 0 or more, got nan."),
        ("--adapt-lr", "inf", "--adapt-lr must be 0 or more, got inf."),
        ("--adapt-steps", "-1", "--adapt-steps must be 0 or more, got -1."),
        ("--difference", "0", "--difference must be above 0, got 0.0."),
        ("--difference", "-0.001", "--difference must be above 0, got -0.001."),
        ("--difference", "nan", "--difference must be above 0, got nan."),
        ("--difference", "inf", "--difference must be above 0, got inf."),
        ("--variant", "third-order", "--variant must be first-order or hessian-vector, got 'third-order'."),
    ],
)
def test_invalid_settings_are_refused_in_one_sentence(option, value, words, refused_run):
    assert words in refused_run("per-fedavg", option, value)
