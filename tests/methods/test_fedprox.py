"""FedProx: the proximal term, against closed forms and torch's optimiser."""

import copy
import math

import pytest
import torch
from torch import nn

from fedrema.core import LocalTraining
from fedrema.methods.fedavg import FedAvg
from fedrema.methods.fedprox import FedProx
from fedrema.models.body_and_head import Net
from fedrema.simulation.simulator import Simulator
from tests.fixtures import LOCAL, batch_of, run_all, tanh_module, tanh_simulator, tensor
from tests.methods.by_hand import client_of, linear_net

BACKENDS = ["loop", "stacked"]
WHOLE = LocalTraining(epochs=3, batch=1000, lr=0.1, momentum=0.9, clip=0.5)
"""All samples in every step: results do not depend on the order of samples."""


def run_simulation(method, backend, local=LOCAL, **settings):
    state, records = run_all(tanh_simulator(method, backend, local, **settings))
    return state.params.common, records


def test_the_loss_equals_a_calculation_by_hand():
    net = linear_net(inputs=1, features=1, classes=2)
    received = {
        "body.weight": tensor([[1.0]]),
        "body.bias": tensor([0.0]),
        "head.weight": tensor([[1.0], [0.0]]),
        "head.bias": tensor([0.0, 0.0]),
    }
    params = {
        "body.weight": tensor([[2.0]]),  # 1 away
        "body.bias": tensor([-0.5]),  # 0.5 away
        "head.weight": tensor([[1.0], [-2.0]]),  # 2 away
        "head.bias": tensor([0.0, 0.1]),  # 0.1 away
    }
    # x = 1: h = 2·1 − 0.5 = 1.5, logits 1.5 and −3 + 0.1 = −2.9; x = −1: h = −2.5, logits −2.5 and 5.1
    entropy = (math.log(1 + math.exp(-2.9 - 1.5)) + math.log(1 + math.exp(5.1 + 2.5))) / 2
    squares = 1.0**2 + 0.5**2 + 2.0**2 + 0.1**2
    batch = batch_of(tensor([[1.0], [-1.0]]), [0, 0])
    for mu in (0.0, 0.1, 1.0, 3.0):
        loss = FedProx(mu=mu).loss(net, client_of(params, received), batch)
        assert float(loss) == pytest.approx(entropy + mu / 2 * squares, rel=1e-12)


def test_the_gradient_is_that_of_the_entropy_plus_mu_times_the_difference_from_the_received_model():
    net = linear_net(inputs=3, features=2, classes=4)
    generator = torch.Generator().manual_seed(0)

    def drawn():
        return {
            name: torch.randn(value.shape, generator=generator, dtype=torch.float64)
            for name, value in net.initial.items()
        }

    params, received = drawn(), drawn()
    x, y = torch.randn(7, 3, generator=generator, dtype=torch.float64), [0, 1, 2, 3, 3, 1, 0]
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    loss = FedProx(mu=0.7).loss(net, client_of(leaves, received), batch_of(x, y))
    found = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    # Backpropagation through two linear layers, by hand.
    features = x @ params["body.weight"].T + params["body.bias"]
    chances = torch.softmax(features @ params["head.weight"].T + params["head.bias"], dim=1)
    wrong = (chances - nn.functional.one_hot(torch.tensor(y), 4)) / 7
    back = wrong @ params["head.weight"]
    entropy = {
        "body.weight": back.T @ x,
        "body.bias": back.sum(0),
        "head.weight": wrong.T @ features,
        "head.bias": wrong.sum(0),
    }
    assert found.keys() == entropy.keys()
    for name, value in entropy.items():
        expected = value + 0.7 * (params[name] - received[name])
        assert torch.allclose(found[name], expected, rtol=0, atol=1e-13), name


def test_padding_does_not_affect_the_loss():
    net = linear_net(features=2, classes=2)
    params = {name: value + 0.3 for name, value in net.initial.items()}
    client = client_of(params, net.initial)
    x = tensor([[1.0, 2.0], [-1.0, 0.5], [7.0, -7.0]])
    with_padding = FedProx().loss(net, client, batch_of(x, [0, 1, 0], mask=[1.0, 1.0, 0.0]))
    without = FedProx().loss(net, client, batch_of(x[:2], [0, 1]))
    assert float(with_padding) == pytest.approx(float(without), rel=1e-14)


def reference(simulator: Simulator, mu: float, rounds: int) -> dict[str, torch.Tensor]:
    """Return the model of a FedProx implementation with torch's SGD and clipping, one client at a time."""
    model = tanh_module().double()
    local = simulator.local
    clients = [simulator.train.of(row) for row in range(4)]
    optimisers: list[dict] = [{} for _ in clients]
    for _ in range(rounds):
        trained = []
        for row, data in enumerate(clients):
            own = copy.deepcopy(model)
            optimiser = torch.optim.SGD(own.parameters(), lr=local.lr, momentum=local.momentum)
            if optimisers[row]:
                optimiser.load_state_dict(optimisers[row])
            for _ in range(local.epochs):
                optimiser.zero_grad()
                pull = sum(
                    ((w - g.detach()) ** 2).sum() for w, g in zip(own.parameters(), model.parameters(), strict=True)
                )
                (nn.functional.cross_entropy(own(data.x), data.y) + mu / 2 * pull).backward()
                nn.utils.clip_grad_norm_(own.parameters(), local.clip)
                optimiser.step()
            optimisers[row] = copy.deepcopy(optimiser.state_dict())
            trained.append(own.state_dict())
        counts = [len(data.y) for data in clients]
        averaged = {
            name: sum(n * state[name] for n, state in zip(counts, trained, strict=True)) / sum(counts)
            for name in trained[0]
        }
        model.load_state_dict(averaged)
    return dict(model.state_dict())


@pytest.mark.parametrize("backend", BACKENDS)
def test_rounds_equal_those_with_torchs_optimiser(backend):
    # The gradient of the proximal term is clipped and enters the momentum with the rest.
    simulator = tanh_simulator(FedProx(mu=2.0), backend, WHOLE)
    state = simulator.start()
    for _ in range(2):
        simulator.run_round(state)
    expected = reference(simulator, mu=2.0, rounds=2)
    assert state.params.common.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(state.params.common[name], value, rtol=0, atol=1e-12), name
    without = reference(simulator, mu=0.0, rounds=2)
    assert max(float((expected[name] - without[name]).abs().max()) for name in expected) > 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_with_mu_zero_it_is_bit_identical_to_fedavg(backend):
    free, free_records = run_simulation(FedProx(mu=0.0), backend)
    plain, plain_records = run_simulation(FedAvg(), backend)
    held, _ = run_simulation(FedProx(mu=1.0), backend)
    assert free.keys() == plain.keys()
    for name, value in plain.items():
        assert torch.equal(free[name], value), name
        assert not torch.equal(held[name], value), name
    for one, other in zip(free_records, plain_records, strict=True):
        for key in ("client_loss", "client_accuracy", "trained_client_accuracy", "bytes_up", "bytes_down"):
            assert one[key] == other[key], key


@pytest.mark.parametrize("backend", BACKENDS)
def test_clients_stay_closer_to_the_received_model_with_larger_mu(backend):
    distances = []
    for mu in (0.0, 0.1, 1.0, 4.0):
        simulator = tanh_simulator(FedProx(mu=mu), backend)
        cohort = simulator.cohort(simulator.start(), torch.arange(4))
        trained = simulator.local_training(cohort, simulator.moment(1))[0].params.own
        initial = simulator.net.initial
        squares = [(trained[name] - initial[name]).square().reshape(4, -1).sum(1) for name in initial]
        distances.append(torch.stack(squares).sum(0).sqrt())
    for nearer, further in zip(distances[1:], distances[:-1], strict=True):
        assert (nearer < further).all()
    assert (distances[-1] > 0).all()


def test_the_proximal_term_ignores_batch_norm_statistics():
    net = Net(tanh_module(nn.BatchNorm1d(6)).double(), torch.zeros(2, 6, dtype=torch.float64))
    net.train(False)
    statistics = set(net.initial) - net.trainable
    assert {name.rpartition(".")[2] for name in statistics} == {"running_mean", "running_var"}
    elsewhere = {name: value + 2.0 if name in statistics else value for name, value in net.initial.items()}
    batch = batch_of(torch.randn(3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64), [0, 1, 2])
    with torch.no_grad():
        loss = FedProx(mu=5.0).loss(net, client_of(elsewhere, net.initial), batch)
        entropy = nn.functional.cross_entropy(net(elsewhere, batch.x), batch.y)
        assert float(loss) == pytest.approx(float(entropy), rel=1e-14)
        # The scale and shift of batch norm are parameters like any other.
        moved = {**net.initial, "body.0.weight": net.initial["body.0.weight"] + 1.0}
        loss = FedProx(mu=5.0).loss(net, client_of(moved, net.initial), batch)
        entropy = nn.functional.cross_entropy(net(moved, batch.x), batch.y)
        assert float(loss) == pytest.approx(float(entropy) + 5 / 2 * 6, rel=1e-14)


def test_batch_norm_statistics_do_not_depend_on_mu():
    # Batch norm comes first here, so that its statistics depend on nothing but the samples.
    found = [
        run_simulation(FedProx(mu=mu), "loop", module=tanh_module(nn.BatchNorm1d(6)), rounds=2)[0] for mu in (0.0, 5.0)
    ]
    for name in ("body.0.running_mean", "body.0.running_var"):
        assert torch.equal(found[0][name], found[1][name]), name
    assert not torch.equal(found[0]["body.0.weight"], found[1]["body.0.weight"])


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("-0.5", "--mu must be 0 or more, got -0.5."),
        ("nan", "--mu must be 0 or more, got nan."),
        ("inf", "--mu must be 0 or more, got inf."),
        ("strong", "--mu must be a number, got 'strong'."),
    ],
)
def test_invalid_settings_are_refused_in_one_sentence(value, words, refused_run):
    assert words in refused_run("fedprox", "--mu", value)
