"""Dropout, recurrent layers and attention inside the context of the GPU kernels, in Triton's interpreter."""

import os

import pytest
import torch
from torch.func import vmap

if os.environ.get("TRITON_INTERPRET") != "1":  # on a machine with a GPU, where benchmarks/check_kernels.py checks them
    pytest.skip("needs Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from fedrema.engine.kernels import Operators, autograd
from tests.fixtures import sequence_net


def loss_and_gradients(precision, seed=0):
    """Return the losses of two clients [2] and the gradients of their parameters."""
    net = sequence_net()
    net.train(True)
    generator = torch.Generator().manual_seed(seed)
    params = {
        name: (value + 0.1 * torch.randn(2, *value.shape, generator=generator)).requires_grad_()
        for name, value in net.initial.items()
    }
    x, keys = torch.randn(2, 4, 6, generator=generator), torch.tensor([5, 6])

    def loss(own, given, key):
        with net.batch_context(None, own, key, len(given)):
            return net(own, given).square().mean()

    context = Operators(precision) if precision else torch.enable_grad()
    with context:
        values = vmap(loss)(params, x, keys)
    return values.detach(), torch.autograd.grad(values.sum(), list(params.values()))


def test_losses_and_gradients_equal_those_without_kernels(monkeypatch):
    expected, expected_gradients = loss_and_gradients(None)
    calls = []
    original = autograd.convolve
    monkeypatch.setattr(autograd, "convolve", lambda *given: calls.append(1) or original(*given))
    found, gradients = loss_and_gradients("float32")  # the interpreter cannot multiply bf16
    # Inputs of two LSTM layers, two products in each of three time steps of these, two of attention, the head.
    assert len(calls) == 2 + 2 * 3 + 2 + 1
    assert torch.allclose(found, expected, rtol=1e-5)
    size = torch.cat([gradient.flatten() for gradient in expected_gradients]).norm()
    error = torch.cat([(a - b).flatten() for a, b in zip(gradients, expected_gradients, strict=True)]).norm()
    assert float(error / size) < 1e-5
