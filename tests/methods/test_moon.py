"""MOON: the contrastive loss against closed forms, and its features against a separate computation."""

import math

import pytest
import torch
from torch import nn

from fedrema.core import Batch, Client, LocalTraining
from fedrema.methods.fedavg import FedAvg
from fedrema.methods.moon import MOON, contrastive_loss
from fedrema.models.body_and_head import BodyAndHead, Net
from fedrema.models.networks import Network, build_net
from tests.fixtures import clones, make_simulator, tanh_simulator, tensor

BACKENDS = ["loop", "stacked"]
WHOLE = LocalTraining(epochs=2, batch=1000, lr=0.1, momentum=0.0, clip=0.0)
"""All samples in every step, plain gradients: steps can be computed by hand."""


def features_of(params, x):
    """Return the features of `tanh_module`, written out."""
    return torch.tanh(x @ params["body.0.weight"].T + params["body.0.bias"])


def logits_of(params, x):
    return features_of(params, x) @ params["head.weight"].T + params["head.bias"]


RIGHT, UP, LEFT = [1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]


@pytest.mark.parametrize(
    ("features", "z_global", "z_previous", "temperature", "expected"),
    [
        # Both cosines are 1.
        (RIGHT, RIGHT, RIGHT, 0.5, math.log(2)),
        # Both are −1, or both are 0.
        (RIGHT, LEFT, LEFT, 0.5, math.log(2)),
        (RIGHT, UP, UP, 0.5, math.log(2)),
        # Equal to the global model, opposite to the previous one.
        (RIGHT, RIGHT, LEFT, 0.5, -math.log(math.exp(2) / (math.exp(2) + math.exp(-2)))),
        (RIGHT, RIGHT, LEFT, 1.0, -math.log(math.exp(1) / (math.exp(1) + math.exp(-1)))),
        # Equal to the previous model, opposite to the global one.
        (RIGHT, LEFT, RIGHT, 0.5, -math.log(math.exp(-2) / (math.exp(-2) + math.exp(2)))),
        # Equal to the global model, orthogonal to the previous one; and vice versa.
        (RIGHT, RIGHT, UP, 0.5, -math.log(math.exp(2) / (math.exp(2) + 1))),
        (UP, RIGHT, UP, 0.25, -math.log(1 / (1 + math.exp(4)))),
        # Cosines 0.6 and 0.8; the norm of the features does not matter.
        ([3.0, 4.0], RIGHT, UP, 0.5, -math.log(math.exp(1.2) / (math.exp(1.2) + math.exp(1.6)))),
        ([30.0, 40.0], RIGHT, UP, 0.5, -math.log(math.exp(1.2) / (math.exp(1.2) + math.exp(1.6)))),
        # A temperature so low that plain exponentials would overflow: the loss is the scaled difference of the cosines.
        (RIGHT, LEFT, RIGHT, 0.001, 2000.0),
        (RIGHT, RIGHT, LEFT, 0.001, 0.0),
    ],
)
def test_the_contrastive_loss_equals_a_calculation_by_hand(features, z_global, z_previous, temperature, expected):
    found = contrastive_loss(tensor([features]), tensor([z_global]), tensor([z_previous]), temperature)
    assert found.tolist() == [pytest.approx(expected, rel=1e-12, abs=1e-300)]


def test_the_gradient_points_towards_the_global_model_and_away_from_the_previous_one():
    features = tensor([[1.0, 1.0]]).requires_grad_()
    contrastive_loss(features, tensor([RIGHT]), tensor([UP]), 0.5).sum().backward()
    towards_global, towards_past = features.grad[0].tolist()
    assert towards_global < 0 < towards_past
    # loss = log(1 + e^{2(s_p − s_g)}), whose slope at equal cosines is 1; s_p − s_g = (y − x)/‖h‖ falls by 1/√2 per x
    assert towards_global == pytest.approx(-1 / math.sqrt(2))
    assert towards_past == pytest.approx(1 / math.sqrt(2))


def by_hand(mask=(1.0, 1.0), trained=1.0, mu=3.0):
    """Return the loss of two samples whose features are (3, 4) and (0, 2), classified by a head of zeros."""
    module = BodyAndHead(nn.Linear(2, 2), nn.Linear(2, 2)).double()
    net = Net(module, torch.zeros(1, 2, dtype=torch.float64))
    params = {
        "body.weight": torch.eye(2, dtype=torch.float64),
        "body.bias": torch.zeros(2, dtype=torch.float64),
        "head.weight": torch.zeros(2, 2, dtype=torch.float64),
        "head.bias": torch.zeros(2, dtype=torch.float64),
    }
    # The batch contains the client's samples 2 and 0: the features of sample 1 must not be used.
    inbox = {"z_global": tensor([RIGHT, LEFT, RIGHT]), "z_previous": tensor([UP, LEFT, UP])}
    client = Client(params, params, memory={"trained": tensor(trained)}, inbox=inbox, count=tensor(3.0))
    batch = Batch(tensor([[3.0, 4.0], [0.0, 2.0]]), torch.tensor([0, 1]), tensor(mask), torch.tensor([2, 0]))
    return float(MOON(mu=mu, temperature=0.5).loss(net, client, batch))


FIRST = -math.log(math.exp(1.2) / (math.exp(1.2) + math.exp(1.6)))  # cosines 0.6 and 0.8
SECOND = -math.log(1 / (1 + math.exp(2)))  # cosines 0 and 1


def test_the_loss_equals_a_calculation_by_hand():
    # A head of zeros: the cross-entropy of two classes is log 2.
    assert by_hand() == pytest.approx(math.log(2) + 3 * (FIRST + SECOND) / 2, rel=1e-12)
    assert by_hand(mu=0.5) == pytest.approx(math.log(2) + 0.5 * (FIRST + SECOND) / 2, rel=1e-12)


def test_padding_is_not_contrasted():
    assert by_hand(mask=(1.0, 0.0)) == pytest.approx(math.log(2) + 3 * FIRST, rel=1e-12)
    assert by_hand(mask=(0.0, 1.0)) == pytest.approx(math.log(2) + 3 * SECOND, rel=1e-12)
    assert by_hand(mask=(0.0, 0.0)) == 0


def test_without_a_previous_model_there_is_no_contrastive_loss():
    assert by_hand(trained=0.0) == pytest.approx(math.log(2), rel=1e-12)
    assert by_hand(mu=0.0) == pytest.approx(math.log(2), rel=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_first_round_equals_fedavg_and_the_second_does_not(backend):
    moon, plain = tanh_simulator(MOON(), backend), tanh_simulator(FedAvg(), backend)
    state, expected = moon.start(), plain.start()
    records = [(moon.run_round(state).record, plain.run_round(expected).record)]
    for name, value in expected.params.common.items():
        assert torch.equal(state.params.common[name], value), name
    records.append((moon.run_round(state).record, plain.run_round(expected).record))
    for name, value in expected.params.common.items():
        if name.startswith("body."):
            assert float((state.params.common[name] - value).abs().max()) > 1e-4, name
    # As many bytes as in FedAvg: the previous model stays on the client.
    for moons, plains in records:
        assert (moons["bytes_up"], moons["bytes_down"]) == (plains["bytes_up"], plains["bytes_down"])
    assert records[0][0]["client_loss"] == records[0][1]["client_loss"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_mu_zero_it_is_bit_identical_to_fedavg(backend):
    moon, plain = tanh_simulator(MOON(mu=0.0), backend), tanh_simulator(FedAvg(), backend)
    state, expected = moon.start(), plain.start()
    for one, other in zip(moon.run(state), plain.run(expected), strict=True):
        assert one.record["client_loss"] == other.record["client_loss"]
        assert one.record["client_accuracy"] == other.record["client_accuracy"]
    for name, value in expected.params.common.items():
        assert torch.equal(state.params.common[name], value), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_contains_the_trained_body_only(backend):
    simulator = tanh_simulator(MOON(), backend)
    state = simulator.start()
    assert set(state.memory) == {"previous.body.0.weight", "previous.body.0.bias", "trained"}
    assert state.memory["trained"].tolist() == [0, 0, 0, 0]
    # The first round equals FedAvg's.
    plain = tanh_simulator(FedAvg(), backend)
    cohort = plain.cohort(plain.start(), torch.arange(4))
    trained = plain.local_training(cohort, plain.moment(1))[0].params.own
    simulator.run_round(state)
    assert state.memory["trained"].tolist() == [1, 1, 1, 1]
    for name in ("body.0.weight", "body.0.bias"):
        assert torch.equal(state.memory[f"previous.{name}"], trained[name])
        for row in range(4):
            assert not torch.allclose(state.memory[f"previous.{name}"][row], state.params.common[name], atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_absent_client_keeps_its_last_trained_body(backend):
    simulator = tanh_simulator(MOON(), backend, participation=0.5, rounds=6)
    state = simulator.start()
    seen, returned = set(), 0
    for _ in range(6):
        before = clones(state.memory)
        present = simulator.run_round(state).record["participants"]
        returned += len(seen.intersection(present))
        seen.update(present)
        for row in range(4):
            same = row not in present
            for name in ("previous.body.0.weight", "previous.body.0.bias"):
                assert torch.equal(state.memory[name][row], before[name][row]) == same
            assert bool(state.memory["trained"][row]) == (row in seen)
    assert returned > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_contrastive_term_is_zero_only_for_clients_that_have_not_trained(backend):
    simulator = tanh_simulator(MOON(mu=50.0), backend, participation=0.5, rounds=6)
    state = simulator.start()
    present = simulator.run_round(state).record["participants"]
    assert len(present) == 2
    everyone = torch.arange(4)
    moment = simulator.moment(2)
    ready = simulator.begin(simulator.cohort(state, everyone), moment)
    trained = simulator.local_training(ready, moment)[0].params.own
    plain = tanh_simulator(FedAvg(), backend)
    expected = plain.local_training(simulator.cohort(state, everyone), moment)[0].params.own
    for row in range(4):
        apart = float((trained["body.0.weight"][row] - expected["body.0.weight"][row]).abs().max())
        assert (apart > 1e-4) if row in present else (apart == 0), row


@pytest.mark.parametrize("backend", BACKENDS)
def test_features_of_the_received_and_the_previous_model_are_computed_in_begin(backend):
    simulator = tanh_simulator(MOON(), backend)
    state = simulator.start()
    for _ in range(2):
        simulator.run_round(state)
    received, memory = clones(state.params.common), clones(state.memory)
    clients = torch.tensor([0, 1, 3])
    ready = simulator.begin(simulator.cohort(state, clients), simulator.moment(3))
    counts = simulator.train.counts.tolist()
    assert len(set(counts)) == 4
    anything = torch.randn(5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for k, row in enumerate(clients.tolist()):
        x = simulator.train.x[row, : counts[row]]
        previous = {name: memory[f"previous.{name}"][row] for name in ("body.0.weight", "body.0.bias")}
        for found, model in (("z_global", received), ("z_previous", previous)):
            z = ready.inbox.row(k)[found][: counts[row]]
            assert z.norm(dim=1).tolist() == pytest.approx([1.0] * counts[row], rel=1e-12)
            apart = features_of(model, x)
            # Only directions are stored: cosines with the features themselves are 1.
            assert nn.functional.cosine_similarity(z, apart, dim=1).tolist() == pytest.approx([1.0] * counts[row])
            cosines = nn.functional.cosine_similarity(apart, anything.expand_as(apart), dim=1)
            assert (z @ anything / anything.norm()).tolist() == pytest.approx(cosines.tolist(), abs=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_round_with_a_previous_model_equals_a_calculation_by_hand(backend):
    simulator = tanh_simulator(MOON(mu=2.0, temperature=0.4), backend, WHOLE)
    state = simulator.start()
    simulator.run_round(state)
    received, memory = clones(state.params.common), clones(state.memory)
    losses = simulator.run_round(state).record["client_loss"]
    total = sum(simulator.train.counts.tolist())
    averaged = {name: torch.zeros_like(value) for name, value in received.items()}
    for row, count in enumerate(simulator.train.counts.tolist()):
        data = simulator.train.of(row)
        past = features_of({name: memory[f"previous.{name}"][row] for name in received if "body" in name}, data.x)
        past, aim = past.detach(), features_of(received, data.x).detach()
        params = clones(received)
        values = []
        for _ in range(WHOLE.epochs):
            leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
            features = features_of(leaves, data.x)
            near = torch.exp(nn.functional.cosine_similarity(features, aim, dim=1) / 0.4)
            far = torch.exp(nn.functional.cosine_similarity(features, past, dim=1) / 0.4)
            loss = (
                nn.functional.cross_entropy(logits_of(leaves, data.x), data.y)
                - 2.0 * (near / (near + far)).log().mean()
            )
            gradient = torch.autograd.grad(loss, list(leaves.values()))
            params = {name: value - 0.1 * g for (name, value), g in zip(params.items(), gradient, strict=True)}
            values.append(float(loss.detach()))
        assert losses[row] == pytest.approx(sum(values) / len(values), rel=1e-12)
        for name in ("body.0.weight", "body.0.bias"):
            assert torch.allclose(state.memory[f"previous.{name}"][row], params[name], rtol=0, atol=1e-12)
        averaged = {name: value + count / total * params[name] for name, value in averaged.items()}
    for name, value in averaged.items():
        assert torch.allclose(state.params.common[name], value, rtol=0, atol=1e-12), name


@pytest.mark.parametrize(("net", "shape", "features"), [("mlp", (6,), 7), ("cnn", (1, 28, 28), 1024)])
def test_the_projection_is_between_features_and_classifier(net, shape, features):
    built = build_net(Network(net=net, hidden=7, projection=3), shape, 4, seed=0)
    *_, first, between, last = [layer for name, layer in built.layers() if name.startswith("body.")]
    assert [type(layer) for layer in (first, between, last)] == [nn.Linear, nn.ReLU, nn.Linear]
    assert (first.in_features, first.out_features) == (features, features)
    assert (last.in_features, last.out_features) == (features, 3)
    head = next(layer for name, layer in built.layers() if name.startswith("head"))
    assert head.in_features == 3
    assert built.features_count == 3
    plain = build_net(Network(net=net, hidden=7), shape, 4, seed=0)
    assert plain.features_count == features
    assert len(built.initial) == len(plain.initial) + 4
    assert all(built.in_body(name) for name in set(built.initial) - set(plain.initial))


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_a_projection_its_output_is_used_in_the_contrastive_loss(backend):
    net = build_net(Network(net="mlp", hidden=7, projection=3), (6,), 4, seed=0)
    simulator = make_simulator(MOON(), net=net, backend=backend, seed=0)
    state = simulator.start()
    simulator.run_round(state)
    assert {name.removeprefix("previous.") for name in state.memory} == {
        "trained", "body.1.weight", "body.1.bias", "body.3.weight", "body.3.bias", "body.5.weight", "body.5.bias",
    }  # fmt: skip
    ready = simulator.begin(simulator.cohort(state, torch.arange(4)), simulator.moment(2))
    shared = state.params.common
    for row, count in enumerate(simulator.train.counts.tolist()):
        value = simulator.train.x[row, :count]
        for layer in (1, 3, 5):
            value = value @ shared[f"body.{layer}.weight"].T + shared[f"body.{layer}.bias"]
            value = value if layer == 5 else value.clamp(min=0)
        expected = value / value.norm(dim=1, keepdim=True)
        assert torch.allclose(ready.inbox.row(row)["z_global"][:count], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--mu", "-1", "--mu must be 0 or more, got -1.0."),
        ("--mu", "nan", "--mu must be 0 or more, got nan."),
        ("--mu", "inf", "--mu must be 0 or more, got inf."),
        ("--temperature", "0", "--temperature must be above 0, got 0.0."),
        ("--temperature", "-0.5", "--temperature must be above 0, got -0.5."),
        ("--temperature", "nan", "--temperature must be above 0, got nan."),
        ("--temperature", "inf", "--temperature must be above 0, got inf."),
        ("--projection", "-1", "--projection must be 0 or more, got -1."),
    ],
)
def test_invalid_settings_are_refused_in_one_sentence(option, value, words, refused_run):
    assert words in refused_run("moon", option, value)
