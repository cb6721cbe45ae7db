"""Steps of SGD, against torch.optim.SGD."""

import dataclasses
import math

import pytest
import torch

from fedrema.core import Client, LocalTraining, Method, Move, Phase
from fedrema.engine.sgd import LossMean, PhaseSGD, momentum_step, scaled, with_weight_decay
from fedrema.methods.fedavg import FedAvg
from tests.fixtures import make_simulator, run_all, snapshot
from tests.methods.by_hand import linear_net

SHAPES = {"weight": (3, 4), "filter": (2, 1, 3, 3), "bias": (4,), "scale": ()}
CLIENTS = 3


def draw(generator, *lead):
    return {
        name: torch.randn((*lead, *shape), generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()
    }


def descended(params, directions, phase, local, active=None, axes=0, velocity=None):
    """Return parameters and velocity after a step along each of the directions."""
    params = {name: value.clone() for name, value in params.items()}
    velocity = {name: value.clone() for name, value in (velocity or zeros(params)).items()}
    for step, direction in enumerate(directions):
        prepared = PhaseSGD(Method(), phase, local, direction, lambda *_: None, axes)
        direction = with_weight_decay(scaled(direction, prepared._clip_factor(direction)), params, local.weight_decay)
        momentum_step(params, velocity, direction, phase, active[step] if active else None)
    return params, velocity


def zeros(params):
    return {name: torch.zeros_like(value) for name, value in params.items()}


def by_torch(params, directions, phase, local):
    """Return parameters and velocity after the same steps with torch.optim.SGD and torch's clipping."""
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    optimiser = torch.optim.SGD(leaves.values(), lr=phase.lr, momentum=phase.momentum, weight_decay=local.weight_decay)
    for direction in directions:
        for name, leaf in leaves.items():
            leaf.grad = direction[name].clone()
        if local.clip:
            torch.nn.utils.clip_grad_norm_(leaves.values(), local.clip)
        optimiser.step()
    return {name: leaf.detach() for name, leaf in leaves.items()}


def row(tensors, k):
    return {name: value[k] for name, value in tensors.items()}


def assert_close(first, second, tolerance=1e-12):
    assert first.keys() == second.keys()
    for name in first:
        assert float((first[name] - second[name]).abs().max()) <= tolerance, name


SETTINGS = [
    (0.9, 0.0, 0.0),
    (0.9, 2.0, 0.0),
    (0.9, 2.0, 0.05),
    (0.0, 0.0, 0.05),
    (0.0, 1e6, 0.0),
]


@pytest.mark.parametrize(("momentum", "clip", "weight_decay"), SETTINGS)
def test_one_client_is_updated_as_by_torchs_sgd(momentum, clip, weight_decay):
    generator = torch.Generator().manual_seed(0)
    params, directions = draw(generator), [draw(generator) for _ in range(6)]
    phase = Phase(1, lr=0.1, momentum=momentum)
    local = LocalTraining(clip=clip, weight_decay=weight_decay)
    found, _ = descended(params, directions, phase, local)
    assert_close(found, by_torch(params, directions, phase, local))


@pytest.mark.parametrize(("momentum", "clip", "weight_decay"), SETTINGS)
def test_each_stacked_client_is_updated_as_by_torchs_sgd(momentum, clip, weight_decay):
    generator = torch.Generator().manual_seed(1)
    params, directions = draw(generator, CLIENTS), [draw(generator, CLIENTS) for _ in range(6)]
    phase = Phase(1, lr=0.1, momentum=momentum)
    local = LocalTraining(clip=clip, weight_decay=weight_decay)
    found, _ = descended(params, directions, phase, local, axes=1)
    for k in range(CLIENTS):
        expected = by_torch(row(params, k), [row(direction, k) for direction in directions], phase, local)
        assert_close(row(found, k), expected)


def test_velocity_from_an_earlier_round_is_continued():
    local, phase = LocalTraining(clip=0), Phase(1, lr=0.5, momentum=0.9)
    params, velocity = descended(
        {"bias": torch.tensor([1.0])}, [{"bias": torch.tensor([2.0])}], phase, local,
        velocity={"bias": torch.tensor([10.0])},
    )  # fmt: skip
    assert velocity["bias"].tolist() == [11.0]  # 0.9·10 + 2
    assert params["bias"].tolist() == [-4.5]  # 1 - 0.5·11


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_finished_client_is_bit_identical(clip, weight_decay):
    generator = torch.Generator().manual_seed(2)
    params, velocity = draw(generator, CLIENTS), draw(generator, CLIENTS)
    directions = [draw(generator, CLIENTS) for _ in range(4)]
    # Client 0 takes all four steps, client 1 two, client 2 none.
    active = [torch.tensor([1.0, float(step < 2), 0.0], dtype=torch.float64) for step in range(4)]
    phase, local = Phase(1, lr=0.1, momentum=0.9), LocalTraining(clip=clip, weight_decay=weight_decay)
    found, moved = descended(params, directions, phase, local, active, axes=1, velocity=velocity)
    for name in SHAPES:
        assert torch.equal(found[name][2], params[name][2])
        assert torch.equal(moved[name][2], velocity[name][2])
    for k, steps in ((0, 4), (1, 2)):
        alone = [row(direction, k) for direction in directions[:steps]]
        expected, expected_velocity = descended(row(params, k), alone, phase, local, velocity=row(velocity, k))
        assert_close(row(found, k), expected)
        assert_close(row(moved, k), expected_velocity)
    after_two, _ = descended(params, directions[:2], phase, local, active, axes=1, velocity=velocity)
    for name in SHAPES:
        assert torch.equal(found[name][1], after_two[name][1])


def test_the_gradient_of_a_finished_client_is_ignored_even_if_it_is_not_finite():
    params = {"bias": torch.ones(2, 3), "scale": torch.ones(2)}
    direction = {"bias": torch.full((2, 3), 0.5), "scale": torch.full((2,), 0.5)}
    direction["bias"][1] = math.nan
    direction["scale"][1] = math.inf
    active = [torch.tensor([1.0, 0.0])]
    found, moved = descended(params, [direction], Phase(1, 0.1, 0.9), LocalTraining(clip=10), active, axes=1)
    assert found["bias"][0].tolist() == pytest.approx([0.95] * 3)
    assert found["bias"][1].tolist() == [1, 1, 1]
    assert found["scale"].tolist() == pytest.approx([0.95, 1])
    assert moved["bias"][1].tolist() == [0, 0, 0]


def test_the_norm_over_all_tensors_of_a_client_is_clipped():
    # Norm 13 over both tensors, limit 6.5: everything is halved.
    direction = {"weight": torch.tensor([[3.0, 4.0]]), "bias": torch.tensor([12.0])}
    params, _ = descended(zeros(direction), [direction], Phase(1, 1.0, 0.0), LocalTraining(clip=6.5))
    assert params["weight"].tolist() == [pytest.approx([-1.5, -2.0])]
    assert params["bias"].tolist() == pytest.approx([-6.0])


@pytest.mark.parametrize("axes", [0, 1])
@pytest.mark.parametrize("own_step", [True, False])
def test_each_model_is_clipped_by_its_own_norm(axes, own_step):
    slope = {"weight": torch.tensor([3.0, 4.0]), "bias": torch.tensor([12.0]), "copy.weight": torch.tensor([0.6, 0.8])}
    params = {name: torch.zeros((2,) * axes + value.shape) for name, value in slope.items()}
    velocity = {name: torch.zeros_like(value) for name, value in params.items()}

    def value_of(loss, client, batch):
        return sum((client.params[name] * value).sum(dim=-1) for name, value in slope.items())

    def step(gradient, client, batches):
        return gradient(client, batches[0])

    phase = Phase(1, 1.0, 0.0, **({"step": step} if own_step else {}))
    descent = PhaseSGD(Grouped(), phase, LocalTraining(clip=6.5), velocity, value_of, axes, net=linear_net())
    losses = LossMean(torch.zeros((2,) * axes), torch.zeros((2,) * axes))
    descent.step(Client(params, params, {}, {}, torch.ones((2,) * axes)), velocity, losses, (None,), None)
    for client in range(2) if axes else [...]:
        assert params["weight"][client].tolist() == pytest.approx([-1.5, -2.0])  # norm 13 is halved
        assert params["bias"][client].tolist() == pytest.approx([-6.0])
        assert params["copy.weight"][client].tolist() == pytest.approx([-0.6, -0.8])  # norm 1 is not clipped


class Grouped(Method):
    def clip_group(self, net, name):
        return name.rpartition(".")[0]


def test_a_huge_gradient_of_one_client_does_not_affect_others():
    direction = {"weight": torch.tensor([[3e6, 4e6], [0.3, 0.4]])}
    params, _ = descended(zeros(direction), [direction], Phase(1, 1.0, 0.0), LocalTraining(clip=1.0), axes=1)
    assert params["weight"].tolist() == [pytest.approx([-0.6, -0.8]), pytest.approx([-0.3, -0.4])]


def test_clipping_can_be_switched_off():
    direction = {"weight": torch.tensor([3e6, 4e6])}
    params, _ = descended(zeros(direction), [direction], Phase(1, 1.0, 0.0), LocalTraining(clip=0))
    assert params["weight"].tolist() == [-3e6, -4e6]


def test_parameters_without_a_gradient_are_not_changed():
    params = {"body": torch.ones(2), "head": torch.ones(2)}
    velocity = {"body": torch.ones(2), "head": torch.ones(2)}
    momentum_step(params, velocity, {"head": torch.ones(2)}, Phase(1, 1.0, 0.5), None)
    assert params["body"].tolist() == velocity["body"].tolist() == [1, 1]
    assert velocity["head"].tolist() == [1.5, 1.5]  # 0.5·1 + 1


def test_an_own_step_gets_clipped_gradients_with_weight_decay_and_may_set_values():
    seen = []

    def step(gradient, client, batches):
        seen.append(gradient(client, batches[0]))
        return Move(along={"weight": 2 * seen[0]["weight"]}, put={"kept": client.params["kept"] + 5})

    method, phase = Method(), Phase(1, lr=0.5, momentum=0.0, loss=lambda net, client, batch: None, step=step)
    local = LocalTraining(clip=1.0, weight_decay=0.1)

    def value_of(loss, client, batch):
        return (client.params["weight"] * torch.tensor([[3.0, 4.0], [0.3, 0.4]])).sum(dim=1)

    params = {"weight": torch.tensor([[1.0, 2.0], [1.0, 2.0]]), "kept": torch.tensor([7.0, 8.0])}
    client = Client(params, params, memory={}, inbox={}, count=torch.ones(2))
    losses = LossMean(torch.zeros(2), torch.zeros(2))
    descent = PhaseSGD(method, phase, local, ["weight"], value_of, axes=1)
    descent.step(client, {"weight": torch.zeros(2, 2)}, losses, (None,), active=torch.tensor([1.0, 0.0]))
    # (3, 4) has norm 5 and is clipped to 1: (0.6, 0.8); weight decay adds 0.1·(1, 2).
    assert seen[0]["weight"].tolist() == [pytest.approx([0.7, 1.0]), pytest.approx([0.4, 0.6])]
    # 1 − 0.5·2·0.7 and 2 − 0.5·2·1.0; the second client has finished and is unchanged.
    assert params["weight"].tolist() == [pytest.approx([0.3, 1.0]), [1.0, 2.0]]
    assert params["kept"].tolist() == [12.0, 8.0]


def test_the_mean_loss_is_over_the_steps_that_were_taken():
    losses = LossMean(torch.zeros(3), torch.zeros(3))
    losses.add(torch.tensor([1.0, 2.0, math.nan]), torch.tensor([1.0, 1.0, 0.0]))
    losses.add(torch.tensor([3.0, 5.0, 7.0]), torch.tensor([1.0, 0.0, 0.0]))
    assert losses.mean().tolist() == [2.0, 2.0, 0.0]
    one = LossMean(torch.zeros(()), torch.zeros(()))
    one.add(torch.tensor(1.0), None)
    one.add(torch.tensor(4.0), None)
    assert float(one.mean()) == 2.5


@pytest.mark.parametrize("backend", ["loop", "stacked"])
def test_a_phase_can_reset_its_momentum(backend, federation):
    """With momentum reset in all phases, keeping it between rounds changes nothing."""

    class Reset(Method):
        name, title, paper = "reset", "Reset", "none"

        def phases(self, local, moment):
            return tuple(dataclasses.replace(phase, reset_momentum=True) for phase in super().phases(local, moment))

    def last_state(method, **changes):
        local = LocalTraining(epochs=1, batch=5, lr=0.05, momentum=0.9, **changes)
        state, _ = run_all(make_simulator(method, federation, local, rounds=2, backend=backend))
        return {name: value for name, value in snapshot(state).items() if not name.startswith("velocity")}

    fresh, reset, kept = last_state(FedAvg(), keep_momentum=False), last_state(Reset()), last_state(FedAvg())
    common = fresh.keys() & reset.keys() & kept.keys()
    assert common
    assert all(torch.equal(fresh[name], reset[name]) for name in common)
    assert not all(torch.equal(fresh[name], kept[name]) for name in common)
