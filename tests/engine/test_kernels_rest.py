"""Pooling and optimiser steps as Triton kernels, in Triton's interpreter, against torch."""

import math
import os

import pytest
import torch
from torch.nn import functional

if os.environ.get("TRITON_INTERPRET") != "1":  # on a machine with a GPU, where benchmarks/check_kernels.py checks them
    pytest.skip("needs Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from fedrema.core import Client, LocalTraining, Method, Move, Phase
from fedrema.engine.kernels import client_norms, momentum_steps, optimiser
from fedrema.engine.kernels.autograd import max_pool
from fedrema.engine.kernels.pooling import Window
from fedrema.engine.sgd import LossMean, PhaseSGD

WINDOWS = [  # kernel, stride, padding, size
    ((2, 2), (2, 2), (0, 0), (6, 8)),
    ((3, 3), (2, 2), (0, 0), (8, 7)),
    ((3, 3), (2, 2), (1, 1), (8, 8)),
    ((3, 2), (1, 2), (1, 0), (5, 7)),
    ((2, 5), (3, 1), (0, 2), (7, 6)),
    ((1, 1), (2, 3), (0, 0), (5, 5)),
]


@pytest.mark.parametrize(("kernel", "stride", "padding", "size"), WINDOWS)
@pytest.mark.parametrize("channels", [1, 5, 130])
def test_pooling_equals_torchs(kernel, stride, padding, size, channels):
    torch.manual_seed(0)
    x = torch.randint(-2, 3, (2, 3, channels, *size)).float()  # many ties
    x[0, 0, 0, 0, 0] = math.nan
    x[1, 0, 0] = -math.inf
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = max_pool(ours, Window(kernel, stride, padding))
    expected = functional.max_pool2d(theirs.flatten(0, 1), kernel, stride, padding).unflatten(0, (2, 3))
    assert torch.equal(y.nan_to_num(99), expected.nan_to_num(99))
    g = torch.randn(y.shape)
    (found,) = torch.autograd.grad(y, ours, g)
    (wanted,) = torch.autograd.grad(expected, theirs, g)
    assert torch.allclose(found, wanted, atol=1e-6)


def test_the_gradient_of_poolings_gradient():
    x = torch.randn(1, 2, 3, 7, 7)
    results = []
    pools = (
        lambda x: max_pool(x, Window((3, 3), (2, 2), (1, 1))),
        lambda x: functional.max_pool2d(x[0], 3, 2, 1)[None],
    )
    for pool in pools:
        torch.manual_seed(0)
        leaf = x.clone().requires_grad_()
        first = torch.autograd.grad(pool(leaf).pow(3).sum(), leaf, create_graph=True)[0]
        results.append(torch.autograd.grad((first * torch.randn(x.shape)).sum(), leaf)[0])
    assert torch.allclose(*results, atol=1e-5)


SHAPES = {"weight": (5, 3, 2, 4), "long": (9000,), "bias": (7,), "scale": ()}
CLIENTS = 3


@pytest.fixture(params=[optimiser.TOGETHER, 3])
def together(request, monkeypatch):
    """All tensors in one launch, or in two."""
    monkeypatch.setattr(optimiser, "TOGETHER", request.param)


def draw(generator):
    return {name: torch.randn(CLIENTS, *shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.mark.usefixtures("together")
def test_norms_are_computed_per_client():
    gradients = draw(torch.Generator().manual_seed(0))
    gradients["weight"] = gradients["weight"].permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    expected = torch.stack([value.double().reshape(CLIENTS, -1).norm(dim=1) for value in gradients.values()]).norm(
        dim=0
    )
    norms = client_norms(list(gradients.values()))
    assert torch.allclose(norms.double(), expected, rtol=1e-6)
    assert torch.equal(client_norms([value[1:2] for value in gradients.values()]), norms[1:2])
    assert torch.allclose(client_norms([gradients["long"][:, ::2]]), gradients["long"][:, ::2].norm(dim=1))


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize(("momentum", "weight_decay", "clip"), [(0.9, 0.05, 2.0), (0.0, 0.0, None), (0.5, 0.0, 1e6)])
def test_steps_equal_those_of_torchs_sgd(momentum, weight_decay, clip):
    generator = torch.Generator().manual_seed(1)
    params, directions = draw(generator), [draw(generator) for _ in range(4)]
    velocity = {name: torch.zeros_like(value) for name, value in params.items()}
    leaves = [{name: v[c].double().requires_grad_() for name, v in params.items()} for c in range(CLIENTS)]
    references = [torch.optim.SGD(one.values(), lr=0.1, momentum=momentum, weight_decay=weight_decay) for one in leaves]
    for direction in directions:
        scale = None if clip is None else (clip / (client_norms(list(direction.values())) + 1e-6)).clamp(max=1)
        momentum_steps(
            list(params.values()), list(velocity.values()), list(direction.values()), scale=scale,
            rate=torch.tensor(0.1), momentum=momentum, weight_decay=weight_decay, active=None,
        )  # fmt: skip
        for c, reference in enumerate(references):
            for name, leaf in leaves[c].items():
                leaf.grad = direction[name][c].double()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(leaves[c].values(), clip)
            reference.step()
    for c in range(CLIENTS):
        for name, leaf in leaves[c].items():
            assert torch.allclose(params[name][c].double(), leaf.detach(), atol=1e-5)


def test_a_finished_client_is_bit_identical():
    generator = torch.Generator().manual_seed(2)
    params, velocity, gradient = draw(generator), draw(generator), draw(generator)
    active = torch.tensor([1.0, 0.0, 1.0])
    for name, value in params.items():
        before, speed = value.clone(), velocity[name].clone()
        gradient[name][1] = math.nan
        momentum_steps(
            [value], [velocity[name]], [gradient[name]], scale=torch.tensor([1.0, math.nan, 0.5]),
            rate=torch.tensor(0.1), momentum=0.9, weight_decay=0.1, active=active,
        )  # fmt: skip
        assert torch.equal(value[1], before[1])
        assert torch.equal(velocity[name][1], speed[1])
        expected = 0.9 * speed[2] + 0.5 * gradient[name][2] + 0.1 * before[2]
        assert torch.allclose(velocity[name][2], expected, atol=1e-6)
        assert torch.allclose(value[2], before[2] - 0.1 * expected, atol=1e-6)


def test_tensors_in_other_memory_formats():
    weight = torch.randn(2, 5, 3, 2, 4)
    channels_last = weight.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)
    gradient = torch.randn(weight.shape)
    settings = {"scale": None, "rate": torch.tensor(0.1), "momentum": 0.9, "weight_decay": 0.0, "active": None}
    results = []
    for value in (weight.clone(), channels_last.clone()):
        velocity = torch.zeros_like(value)
        momentum_steps([value], [velocity], [gradient], **settings)
        results.append(value)
    assert torch.equal(*results)
    with pytest.raises(ValueError, match="dense memory order"):
        momentum_steps([channels_last], [torch.zeros(weight.shape)], [gradient], **settings)


@pytest.mark.parametrize("own", [True, False])
def test_steps_with_our_kernels_equal_those_with_torch(own):
    def step(gradient, client, batches):
        slopes = gradient(client, batches[0])
        put = {"kept": client.params["kept"] + slopes["bias"].sum(dim=1)}
        return Move(along={name: 0.5 * value for name, value in slopes.items()}, put=put)

    def value_of(loss, client, batch):
        return (client.params["weight"] ** 2).sum(dim=(1, 2)) + client.params["bias"].sum(dim=1)

    found = []
    for fused in (True, False):
        generator = torch.Generator().manual_seed(0)
        params = {"weight": torch.randn(3, 4, 5, generator=generator), "bias": torch.randn(3, 4, generator=generator)}
        params["kept"] = torch.zeros(3)
        velocity = {name: torch.ones_like(params[name]) for name in ("weight", "bias")}
        phase = Phase(1, lr=0.1, momentum=0.9, **({"step": step} if own else {}))
        local = LocalTraining(clip=1.0, weight_decay=0.1)
        descent = PhaseSGD(Method(), phase, local, velocity, value_of, axes=1, fused=fused)
        client = Client(params, params, {}, {}, torch.ones(3))
        losses = LossMean(torch.zeros(3), torch.zeros(3))
        for active in (None, torch.tensor([1.0, 0.0, 1.0])):
            descent.step(client, velocity, losses, (None,), active, torch.tensor(0.1))
        found.append({**params, **{f"velocity.{name}": value for name, value in velocity.items()}})
    for name, value in found[1].items():
        torch.testing.assert_close(found[0][name], value)
    assert bool(found[0]["kept"].any()) == own
