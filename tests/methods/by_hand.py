"""A model of two linear layers with gradients written out in NumPy, from which tests compute expected results."""

import numpy as np
import torch
from torch import nn

from fedrema.core import Client, LocalTraining
from fedrema.models.body_and_head import BodyAndHead, Net
from tests.fixtures import make_federation, make_simulator, tensor

LR = 0.1
NAMES = ("body.weight", "body.bias", "head.weight", "head.bias")


def local(epochs=1, **settings) -> LocalTraining:
    """Return plain SGD with all samples in every step: an epoch is one step, in any order of samples."""
    return LocalTraining(epochs, **{"batch": 1000, "lr": LR, "momentum": 0.0, "clip": 0.0, **settings})


def linear_net(inputs=2, features=3, classes=3) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        module = BodyAndHead(nn.Linear(inputs, features), nn.Linear(features, classes)).double()
    return Net(module, torch.zeros(1, inputs, dtype=torch.float64))


def begun(method, backend, training, **settings):
    """Return a simulator of two unequal clients, its state, the initial model and all clients' samples."""
    federation = make_federation(counts=(12, 6), classes=3, features=2)
    settings = {"seed": 5, **settings}
    simulator = make_simulator(method, federation, training, linear_net(), backend=backend, **settings)
    data = [(each.x.numpy(), each.y.numpy()) for each in (simulator.train.of(row) for row in range(len(federation)))]
    first = {name: value.numpy().copy() for name, value in simulator.net.initial.items()}
    return simulator, simulator.start(), first, data


def softmax(logits):
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


def features(params, x):
    return x @ params["body.weight"].T + params["body.bias"]


def logits(params, x):
    return features(params, x) @ params["head.weight"].T + params["head.bias"]


def entropy(params, x, y) -> float:
    return float(-np.log(softmax(logits(params, x))[np.arange(len(y)), y]).mean())


def back(params, x, by_logits, by_features=0.0):
    """Return the gradients of a loss with given derivatives with respect to logits and features."""
    h = features(params, x)
    inner = by_logits @ params["head.weight"] + by_features
    return {
        "body.weight": inner.T @ x,
        "body.bias": inner.sum(axis=0),
        "head.weight": by_logits.T @ h,
        "head.bias": by_logits.sum(axis=0),
    }


def slopes(params, x, y):
    """Return the gradients of the mean cross-entropy."""
    return back(params, x, (softmax(logits(params, x)) - np.eye(3)[y]) / len(y))


def plus(first, second, times=1.0):
    return {name: first[name] + times * second[name] for name in first}


def clipped(gradient, most):
    """Return a model's gradient, clipped to the norm `most`."""
    norm = np.sqrt(sum((value**2).sum() for value in gradient.values()))
    return {name: value * min(1.0, most / (norm + 1e-6)) for name, value in gradient.items()}


def mean(models, data):
    counts = [len(y) for _, y in data]
    return {
        name: sum(n * model[name] for n, model in zip(counts, models, strict=True)) / sum(counts) for name in models[0]
    }


def only(params, part):
    return {name: value if name.startswith(part) else 0 * value for name, value in params.items()}


def assert_same(found, expected, prefix=""):
    """Compare tensors that have a prefix before their names."""
    for name, value in expected.items():
        assert np.allclose(found[prefix + name].numpy(), value, rtol=0, atol=1e-12), name


def tensors(params):
    return {name: torch.from_numpy(np.array(value)) for name, value in params.items()}


def client_of(params, received=None, memory=None, inbox=None) -> Client:
    return Client(params, params if received is None else received, memory or {}, inbox or {}, count=tensor(1.0))


def drawn(seed=0):
    """Return a random model as NumPy arrays."""
    generator = np.random.default_rng(seed)
    return {name: generator.normal(size=tuple(value.shape)) for name, value in linear_net().initial.items()}
