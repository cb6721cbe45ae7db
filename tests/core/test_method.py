"""The functions and types that methods are written with, against numbers computed by hand."""

import math

import pytest
import torch

from fedrema.core import (
    Answer,
    Batch,
    Client,
    LocalTraining,
    Mean,
    Method,
    Moment,
    Role,
    Uploads,
    average,
    cross_entropy,
    everything,
    gradient_step,
    mix,
    overrides,
)
from fedrema.errors import BadInput
from fedrema.methods.fedavg import FedAvg
from fedrema.methods.fedper import FedPer
from fedrema.models.body_and_head import BodyAndHead, Net
from tests.fixtures import tensor

MOMENT = Moment(round=1, rounds=10, seed=0)


def test_average_weights_clients():
    params = {
        "matrix": tensor([[[1, 2], [3, 4]], [[5, 6], [7, 8]]]),
        "vector": tensor([[0, 4], [8, 0]]),
        "number": tensor([1, 5]),
    }
    found = average(params, tensor([1, 3]))
    assert found["matrix"].tolist() == [[4, 5], [6, 7]]
    assert found["vector"].tolist() == [6, 1]
    assert found["number"].tolist() == 4


def test_average_keeps_float32_with_integer_counts():
    found = average({"bias": torch.tensor([[1.0], [4.0]])}, torch.tensor([2, 1]))
    assert found["bias"].dtype is torch.float32
    assert found["bias"].tolist() == [2.0]


def test_mix_gives_each_client_its_own_mean():
    params = {
        "matrix": tensor([[[1, 0]], [[0, 2]], [[4, 4]]]),
        "vector": tensor([[1], [2], [6]]),
        "number": tensor([3, 6, 9]),
    }
    # Rows need not sum to 1: only their proportions count.
    weights = tensor([[1, 0, 0], [2, 2, 0], [1, 1, 2]])
    found = mix(params, weights)
    assert found["matrix"].tolist() == [[[1, 0]], [[0.5, 1]], [[2.25, 2.5]]]
    assert found["vector"].tolist() == [[1], [1.5], [3.75]]
    assert found["number"].tolist() == [3, 4.5, 6.75]


def test_mix_and_average_do_not_change_their_inputs():
    params = {"vector": tensor([[1, 2], [3, 4]])}
    mixed = mix(params, torch.eye(2, dtype=torch.float64))
    mixed["vector"].zero_()
    average(params, tensor([1, 1]))["vector"].zero_()
    assert params["vector"].tolist() == [[1, 2], [3, 4]]


def test_mixing_with_equal_rows_is_averaging():
    generator = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(5, 3, 2, generator=generator, dtype=torch.float64)}
    counts = tensor([3, 1, 4, 1, 5])
    mixed, mean = mix(params, counts.expand(5, 5))["w"], average(params, counts)["w"]
    assert torch.allclose(mixed, mean.expand(5, 3, 2), atol=1e-15)


def test_cross_entropy_ignores_padding():
    logits = tensor([[0, 0], [math.log(3), 0], [1000, -1000]])
    batch = Batch(torch.zeros(3, 1), torch.tensor([0, 1, 1]), tensor([1, 1, 0]), torch.arange(3))
    assert float(cross_entropy(logits, batch)) == pytest.approx((math.log(2) + math.log(4)) / 2)
    nothing = Batch(torch.zeros(3, 1), torch.tensor([0, 1, 1]), tensor([0, 0, 0]), torch.arange(3))
    assert float(cross_entropy(logits, nothing)) == 0


def at(number, rounds=10):
    return Moment(number, rounds, seed=0)


def test_the_constant_schedule_is_constant():
    assert {LocalTraining(lr=0.3).rate(at(number)) for number in (1, 5, 10)} == {0.3}


def test_the_exponential_schedule_decays_from_the_second_round():
    local = LocalTraining(lr=0.8, schedule="exponential", lr_decay=0.5)
    assert [local.rate(at(number)) for number in (1, 2, 4)] == pytest.approx([0.8, 0.4, 0.1])


def test_the_cosine_schedule_decreases_from_the_full_rate_towards_zero():
    local = LocalTraining(lr=0.8, schedule="cosine")
    # (1 + cos(π t/T)) / 2 with t = 0, 1, 2, 3 of T = 4
    expected = [0.8, 0.8 * (2 + math.sqrt(2)) / 4, 0.4, 0.8 * (2 - math.sqrt(2)) / 4]
    assert [local.rate(at(number, 4)) for number in (1, 2, 3, 4)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"epochs": -1}, "--epochs must be 0 or more, got -1."),
        ({"batch": -1}, "--batch must be 0 or more, got -1."),
        ({"lr": -0.1}, "--lr must be 0 or more, got -0.1."),
        ({"lr": math.nan}, "--lr must be 0 or more, got nan."),
        ({"lr": math.inf}, "--lr must be 0 or more, got inf."),
        ({"clip": -1.0}, "--clip must be 0 or more, got -1.0."),
        ({"weight_decay": -1.0}, "--weight-decay must be 0 or more, got -1.0."),
        ({"momentum": 1.0}, "--momentum must be in [0, 1), got 1.0."),
        ({"momentum": -0.1}, "--momentum must be in [0, 1), got -0.1."),
        ({"lr_decay": 0.0}, "--lr-decay must be in (0, 1], got 0.0."),
        ({"lr_decay": 1.1}, "--lr-decay must be in (0, 1], got 1.1."),
    ],
)
def test_invalid_local_training_is_refused(settings, sentence):
    with pytest.raises(BadInput) as caught:
        LocalTraining(**settings)
    assert str(caught.value) == sentence


def test_boundary_values_are_valid():
    LocalTraining(epochs=0, batch=1, lr=0.0, clip=0.0, weight_decay=0.0, momentum=0.0, lr_decay=1.0)


def test_random_numbers_of_a_moment_depend_on_purpose_and_round():
    def draw(moment, purpose):
        return torch.rand(3, generator=moment.generator(purpose)).tolist()

    assert draw(at(1), "probe") == draw(at(1), "probe")
    assert draw(at(1), "probe") != draw(at(2), "probe")
    assert draw(at(1), "probe") != draw(at(1), "other")
    assert draw(at(1), "probe") != draw(Moment(1, 10, seed=1), "probe")
    assert draw(at(1), "probe") == draw(at(1, rounds=99), "probe")


@pytest.fixture
def net() -> Net:
    return Net(BodyAndHead(torch.nn.Linear(1, 2), torch.nn.Linear(2, 2)), torch.zeros(1, 1))


def test_every_hook_defaults_to_fedavg(net):
    method = Method()
    params = {name: value.clone() for name, value in net.initial.items()}
    client = Client(params, params, {}, {}, torch.tensor(3.0))
    batch = Batch(torch.tensor([[1.0], [2.0]]), torch.tensor([0, 1]), torch.ones(2), torch.arange(2))
    assert {method.role(net, name) for name in params} == {Role.SHARED}
    assert method.start(net, client, MOMENT) is client
    assert method.begin(net, client, batch, MOMENT) is client
    assert method.end(net, client, batch, MOMENT) == (client, {})
    assert method.adapt(LocalTraining(), MOMENT) == ()
    assert method.server(net, 3) == {}
    (phase,) = method.phases(LocalTraining(epochs=7, lr=0.2, momentum=0.4), MOMENT)
    assert (phase.epochs, phase.lr, phase.momentum, phase.batches_per_step) == (7, 0.2, 0.4, 1)
    assert all(phase.trains(name) for name in params)
    assert phase.trains is everything
    logits = net(params, batch.x)
    assert torch.equal(method.predict(net, client, batch.x), logits)
    expected = torch.nn.functional.cross_entropy(logits, batch.y)
    assert float(method.loss(net, client, batch)) == pytest.approx(float(expected))
    assert gradient_step(lambda at, given: {"at": at, "given": given}, client, (batch, None)) == {
        "at": client,
        "given": batch,
    }


def test_by_default_the_server_returns_the_mean(net):
    uploads = Uploads(torch.tensor([0, 2]), {}, {}, tensor([1, 4]), mean={"w": tensor([8])})
    state = {"kept": 1}
    answer = Method().aggregate(net, state, uploads, MOMENT)
    assert answer == Answer(shared=uploads.mean, state=state)


def test_a_mean_computed_in_groups_of_whole_blocks_is_bit_identical():
    generator = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(150, 7, 3, generator=generator), "b": torch.randn(150, generator=generator)}
    weights = torch.rand(150, generator=generator)
    whole = average(params, weights)
    for length in (32, 64, 96):
        mean = Mean()
        for first in range(0, 150, length):
            rows = slice(first, first + length)
            mean.add({name: value[rows] for name, value in params.items()}, (weights / weights.sum())[rows])
        assert all(torch.equal(mean.total[name], whole[name]) for name in params)
    by_hand = sum(float(weights[k]) * params["w"][k].double() for k in range(150)) / float(weights.sum())
    assert torch.allclose(whole["w"].double(), by_hand, atol=1e-6)


def test_overrides_lists_the_hooks_that_a_method_defines():
    assert overrides(FedPer(), "role")
    assert not overrides(FedPer(), "loss")
    assert not any(overrides(FedAvg(), hook) for hook in ("role", "start", "begin", "end", "aggregate"))


def test_having_returns_a_changed_copy():
    client = Client({}, {}, {}, {}, torch.tensor(3.0))
    changed = client.having(memory={"a": torch.ones(1)})
    assert client.memory == {}
    assert list(changed.memory) == ["a"]
    assert changed.count is client.count


def test_mixing_many_clients_with_few_distinct_weights_equals_mixing_each():
    generator = torch.Generator().manual_seed(0)
    params = {"w": torch.randn(150, 3, 2, generator=generator, dtype=torch.float64), "b": torch.randn(150).double()}
    kinds = torch.randint(0, 5, (4, 150), generator=generator) + 1
    weights = kinds[torch.randint(0, 4, (150,), generator=generator)].to(torch.int16)
    mixed = mix(params, weights)
    for row in (0, 1, 77, 149):
        share = weights[row].double() / weights[row].sum()
        assert torch.allclose(mixed["w"][row], (share[:, None, None] * params["w"]).sum(0), atol=1e-12)
        assert torch.allclose(mixed["b"][row], (share * params["b"]).sum(), atol=1e-12)
