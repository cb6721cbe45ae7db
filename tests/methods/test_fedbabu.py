"""FedBABU: a fixed head, averaged bodies, and copies that are fine-tuned before they are scored."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedrema.core import LocalTraining
from fedrema.methods.fedbabu import FedBABU
from fedrema.models.body_and_head import BodyAndHead
from fedrema.simulation.simulator import Simulator
from tests.fixtures import clones, tanh_simulator

BACKENDS = ["loop", "stacked"]
LOCAL = LocalTraining(epochs=2, batch=5, lr=0.05, weight_decay=0.01)
"""With weight decay, a head whose gradients are only set to zero would change."""
WHOLE = LocalTraining(epochs=3, batch=1000, lr=0.1, momentum=0.9, clip=0.5, weight_decay=0.01)
"""All samples in every step: results do not depend on the order of samples."""


def make_module() -> BodyAndHead:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        head = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 4))
        return BodyAndHead(nn.Sequential(nn.Linear(6, 5), nn.Tanh()), head)


BODY = {"body.0.weight", "body.0.bias"}
HEAD = {"head.0.weight", "head.0.bias", "head.2.weight", "head.2.bias"}
BODY_BYTES = (6 * 5 + 5) * 8  # parameters of the body, 8 bytes each


def deep_head_simulator(method, backend, local=LOCAL, **settings) -> Simulator:
    return tanh_simulator(method, backend, local, make_module(), **settings)


def network_tensors(params) -> BodyAndHead:
    module = make_module().double()
    module.load_state_dict(dict(params))
    return module


def descend(module, parameters, data, local, state=None):
    """Train with torch's optimiser on all samples; return the optimiser's state."""
    parameters = list(parameters)
    optimiser = torch.optim.SGD(parameters, lr=local.lr, momentum=local.momentum, weight_decay=local.weight_decay)
    if state:
        optimiser.load_state_dict(state)
    for _ in range(local.epochs):
        module.zero_grad()
        nn.functional.cross_entropy(module(data.x), data.y).backward()
        nn.utils.clip_grad_norm_(parameters, local.clip)
        optimiser.step()
    return copy.deepcopy(optimiser.state_dict())


def accuracies(simulator, modules):
    with torch.no_grad():
        tests = [simulator.test.of(row) for row in range(len(modules))]
        right = [module(data.x).argmax(1) == data.y for module, data in zip(modules, tests, strict=True)]
    return [float(one.double().mean()) for one in right], float(torch.cat(right).double().mean())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_the_head_is_never_changed_and_is_the_same_for_all(backend, participation):
    simulator = deep_head_simulator(FedBABU(), backend, participation=participation)
    state = simulator.start()
    initial = clones(make_module().double().state_dict())
    for _ in range(3):
        before = clones(state.params.common)
        simulator.run_round(state)
        assert set(state.params.common) == BODY
        assert set(state.params.own) == HEAD
        for name in HEAD:
            for row in range(4):
                assert torch.equal(state.params.own[name][row], initial[name]), name
        for name in BODY:
            assert not torch.equal(state.params.common[name], before[name]), name
    for name in HEAD:
        assert state.velocity[name].abs().max() == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_body_is_exchanged(backend):
    simulator = deep_head_simulator(FedBABU(), backend)
    state = simulator.start()
    record = simulator.run_round(state).record
    assert record["bytes_up"] == 4 * BODY_BYTES
    assert record["bytes_down"] == 4 * BODY_BYTES
    halved = deep_head_simulator(FedBABU(), backend, participation=0.5)
    record = halved.run_round(halved.start()).record
    assert (record["bytes_up"], record["bytes_down"]) == (2 * BODY_BYTES, 2 * BODY_BYTES)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bodies_are_trained_with_the_fixed_head_and_averaged_by_sample_counts(backend):
    # Two rounds with momentum kept between them; only the norm of the body's gradient is clipped.
    simulator = deep_head_simulator(FedBABU(), backend, WHOLE)
    state = simulator.start()
    model = make_module().double()
    states = [None] * 4
    counts = simulator.train.counts.tolist()
    assert len(set(counts)) == 4
    for _ in range(2):
        simulator.run_round(state)
        trained = []
        for row in range(4):
            own = copy.deepcopy(model)
            states[row] = descend(own, own.body.parameters(), simulator.train.of(row), WHOLE, states[row])
            trained.append(own.state_dict())
        averaged = {
            name: sum(n * state[name] for n, state in zip(counts, trained, strict=True)) / sum(counts)
            for name in trained[0]
        }
        model.load_state_dict(averaged)
        for name in BODY:
            assert torch.allclose(state.params.common[name], averaged[name], rtol=0, atol=1e-12), name
        uniform = sum(state["body.0.weight"] for state in trained) / 4
        assert not torch.allclose(state.params.common["body.0.weight"], uniform, rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("part", "tuned"), [("all", BODY | HEAD), ("head", HEAD), ("body", BODY)])
def test_fine_tuning_trains_the_chosen_part_on_a_copy(backend, part, tuned):
    simulator = deep_head_simulator(FedBABU(finetune_epochs=4, finetune=part), backend, WHOLE)
    state = simulator.start()
    simulator.run_round(state)
    record = simulator.run_round(state).record
    common, own, velocity = clones(state.params.common), clones(state.params.own), clones(state.velocity)
    moment = simulator.moment(2)
    adapted = simulator.adapted(simulator.method, simulator.cohort(state, torch.arange(4)), moment)
    modules = []
    for row in range(4):
        start = state.params.row(row)
        module = network_tensors(start)
        parameters = {"all": module, "head": module.head, "body": module.body}[part].parameters()
        # Momentum starts at zero: the copy does not inherit the momentum of training.
        descend(module, parameters, simulator.train.of(row), replace(WHOLE, epochs=4))
        found = adapted.params.row(row)
        assert found.keys() == start.keys()
        for name, value in module.state_dict().items():
            assert torch.allclose(found[name], value, rtol=0, atol=1e-12), name
            assert torch.equal(found[name], start[name]) == (name not in tuned), name
        modules.append(module)
    each, together = accuracies(simulator, modules)
    assert record["client_accuracy"] == pytest.approx(each)
    assert record["accuracy"] == pytest.approx(together)
    # Scoring does not change the state.
    simulator.score(state, moment)
    for kept, now in ((common, state.params.common), (own, state.params.own), (velocity, state.velocity)):
        assert kept.keys() == now.keys()
        assert all(torch.equal(now[name], value) for name, value in kept.items())


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_accuracy_without_fine_tuning_is_recorded_too(backend):
    tuning, plain = deep_head_simulator(FedBABU(), backend), deep_head_simulator(FedBABU(finetune_epochs=0), backend)
    state, bare = tuning.start(), plain.start()
    differ = False
    for tuned, untuned in zip(tuning.run(state), plain.run(bare), strict=True):
        assert not untuned.record.alternatives
        assert tuned.record.alternatives == {"unadapted": {"accuracy": untuned.record.accuracy}}
        differ |= tuned.record["accuracy"] != untuned.record["accuracy"]
        each, together = accuracies(plain, [network_tensors(bare.params.row(row)) for row in range(4)])
        assert untuned.record["client_accuracy"] == pytest.approx(each)
        assert untuned.record["accuracy"] == pytest.approx(together)
    assert differ
    # Scoring does not affect training.
    for name in BODY:
        assert torch.equal(state.params.common[name], bare.params.common[name])


def test_fine_tuning_uses_the_learning_rate_of_the_round():
    local = LocalTraining(lr=0.1, schedule="exponential", lr_decay=0.5, epochs=7)
    simulator = deep_head_simulator(FedBABU(), "loop", local)
    (phase,) = FedBABU(finetune_epochs=4).adapt(local, simulator.moment(3))
    assert (phase.epochs, phase.lr, phase.momentum) == (4, pytest.approx(0.025), 0.9)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--finetune-epochs", "-1", "--finetune-epochs must be 0 or more, got -1."),
        ("--finetune-epochs", "nan", "--finetune-epochs must be a whole number, got 'nan'."),
        ("--finetune-epochs", "inf", "--finetune-epochs must be a whole number, got 'inf'."),
        ("--finetune", "tail", "--finetune must be all, head or body, got 'tail'."),
    ],
)
def test_invalid_settings_are_refused_in_one_sentence(option, value, words, refused_run):
    assert words in refused_run("fedbabu", option, value)
