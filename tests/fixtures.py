"""Functions that tests of several packages use: small federations, networks, simulators and tensors."""

import dataclasses
import sys

import numpy as np
import torch
from torch import nn

from fedrema.base.processes import SupervisedProcess
from fedrema.core import Batch, LocalTraining, Method, Simulation
from fedrema.data import Federation
from fedrema.models.body_and_head import BodyAndHead, Net
from fedrema.models.networks import Network, build_net
from fedrema.simulation.simulator import Simulator

BACKENDS = ["loop", "stacked"]
LOCAL = LocalTraining(epochs=2, batch=5, lr=0.05)


def make_federation(counts=(23, 9, 30, 14), classes=4, features=6, seed=0, names=None) -> Federation:
    """Return clients of unequal size whose classes can be learnt: blobs, and each client lacks one class."""
    generator = np.random.default_rng(seed)
    centres = generator.normal(size=(classes, features)) * 2
    x, y, client = [], [], []
    for row, count in enumerate(counts):
        labels = generator.choice([c for c in range(classes) if c != row % classes], size=count)
        x.append(centres[labels] + generator.normal(size=(count, features)))
        y.append(labels)
        client += [row if names is None else names[row]] * count
    return Federation.from_arrays(
        np.concatenate(x).astype(np.float32), np.concatenate(y), np.array(client), classes=classes, data_seed=seed
    )


def network(federation, net="mlp", hidden=7, seed=3) -> Net:
    """Return a small network that fits a federation."""
    return build_net(Network(net=net, hidden=hidden), federation.sample_shape, federation.task.outputs, seed=seed)


def make_simulator(
    method: Method,
    federation=None,
    local=LOCAL,
    net: Net | str = "mlp",
    hidden=7,
    weights_seed=3,
    kind=Simulator,
    **settings,
) -> Simulator:
    """Return a simulator of a short run in float64 on the CPU.

    `net` is a network, or the name of one with `hidden` units and weights drawn with `weights_seed`.
    """
    federation = federation or make_federation()
    chosen = {"rounds": 3, "seed": 3, "device": "cpu", "precision": "float64", "backend": "stacked", **settings}
    net = network(federation, net, hidden, weights_seed) if isinstance(net, str) else net
    return kind(method, net, federation, local, Simulation(**chosen))


def tanh_module(*first: nn.Module, hidden=5) -> BodyAndHead:
    """Return one hidden layer with tanh, whose formulas tests write out; `first` are layers before it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BodyAndHead(nn.Sequential(*first, nn.Linear(6, hidden), nn.Tanh()), nn.Linear(hidden, 4))


def tanh_simulator(method: Method, backend: str, local=LOCAL, module=None, **settings) -> Simulator:
    """Return a simulator of `tanh_module`, or of another module with six inputs and four classes."""
    net = Net(module or tanh_module(), torch.ones(2, 6))
    return make_simulator(method, local=local, net=net, backend=backend, **{"seed": 0, **settings})


class Sequence(nn.Module):
    """A body that reads six features as three steps of two: LSTM, attention, layer norm, all with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(2, 4, 2, dropout=0.2, batch_first=True)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(4)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        steps, _ = self.recurrent(x.reshape(len(x), 3, 2))
        attended, _ = self.attention(steps, steps, steps, need_weights=False)
        return self.dropout(self.norm(steps + attended)).mean(dim=1)


def sequence_net() -> Net:
    """Return a network with an LSTM, attention and dropout, for six features and four classes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net(BodyAndHead(Sequence(), nn.Linear(4, 4)), torch.ones(2, 6))


class RowsOfImage(nn.Module):
    """A body that reads the rows of an image one after another: two layers of an LSTM with dropout between them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(width, 5, 2, dropout=0.2, batch_first=True)

    def forward(self, x):
        return self.recurrent(x[:, 0])[0].mean(dim=1)


def dropout_module(shape, classes) -> BodyAndHead:
    """Return a network with dropout, for `--net tests.fixtures:dropout_module`."""
    inputs = int(torch.Size(shape).numel())
    body = nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(inputs, 6), nn.ReLU(), nn.Dropout(0.3))
    return BodyAndHead(body, nn.Linear(6, classes))


def lstm_module(shape, classes) -> BodyAndHead:
    """Return a network with an LSTM and dropout, for `--net tests.fixtures:lstm_module`."""
    return BodyAndHead(RowsOfImage(shape[-1]), nn.Linear(5, classes))


RANDOM_NETWORKS = ("tests.fixtures:dropout_module", "tests.fixtures:lstm_module")
"""Networks whose layers draw random numbers, as values of `--net` for images."""


def run_all(simulator: Simulator):
    """Run all rounds; return the final state and the records."""
    state = simulator.start()
    return state, [each.record for each in simulator.run(state)]


def unwatched(settings):
    """Return a watcher of a run's rounds that does nothing."""
    return lambda result: None


def accept_all(*tasks) -> bool:
    """Let a launcher start all tasks."""
    return True


def supervised_python(folder, code) -> SupervisedProcess:
    """Return a supervised process that executes Python code and logs to a folder."""
    return SupervisedProcess("it", [sys.executable, "-c", code], log=folder / "it.log")


def tensor(values) -> torch.Tensor:
    """Return a float64 tensor."""
    return torch.tensor(values, dtype=torch.float64)


def batch_of(x, y, mask=None) -> Batch:
    """Return a batch in float64; all samples are real unless a mask says otherwise."""
    x = torch.as_tensor(x if isinstance(x, torch.Tensor) else np.array(x), dtype=torch.float64)
    return Batch(x, torch.tensor(y), x.new_ones(len(x)) if mask is None else tensor(mask), torch.arange(len(x)))


def clones(tensors) -> dict[str, torch.Tensor]:
    """Return a copy of every tensor by its name."""
    return {name: value.clone() for name, value in tensors.items()}


def snapshot(state):
    """Return a copy of all tensors of a state, by group and name."""
    groups = {"params": state.params.own, "common": state.params.common, "memory": state.memory}
    groups |= {"velocity": state.velocity, "inbox": state.inbox.own}
    return {f"{group}/{name}": value.clone() for group, named in groups.items() for name, value in named.items()}


def assert_same_state(first, second, tolerance=0.0):
    """Assert that two states have the same tensors, up to an absolute tolerance."""
    first, second = snapshot(first), snapshot(second)
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=0, atol=tolerance, msg=name)


def label(method: Method) -> str:
    """Return a method's name and the settings that differ from their defaults."""
    changed = [
        f"{field.name}={getattr(method, field.name)}"
        for field in dataclasses.fields(method)
        if getattr(method, field.name) != field.default
    ]
    return " ".join([method.name, *changed])
