"""Networks of users as they are: FedAvg is PyTorch's SGD on copies of the module, averaged; backends agree."""

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fedrema.core import LocalTraining
from fedrema.data import Federation
from fedrema.errors import BadInput
from fedrema.methods import registry
from fedrema.methods.fedavg import FedAvg
from fedrema.methods.fedrema import FedReMa
from fedrema.models.body_and_head import Net
from fedrema.tasks import Task
from tests.contract.own_networks import CLASSES, NETWORKS, NO_HEAD, RANDOM, TOKENS
from tests.fixtures import make_simulator, run_all

LOCAL = LocalTraining(epochs=2, batch=100, lr=0.05, momentum=0.5, keep_momentum=False, clip=0.0)
ROUNDS = 2
TASK = Task("multiclass", CLASSES)
STACKED_REFUSES = {"control flow", "rrelu", "embedding", "weight norm", "weight norm of the head"}


def own_federation(shape: tuple[int, ...]) -> Federation:
    generator = np.random.default_rng(0)
    counts = (9, 14, 11)
    drawn = generator.normal(size=(sum(counts), *shape))
    x = generator.integers(CLASSES, size=drawn.shape) if shape == TOKENS else drawn.astype(np.float32)
    y, client = generator.integers(CLASSES, size=len(x)), np.repeat(np.arange(3), counts)
    return Federation.from_arrays(x, y, client, classes=CLASSES)


def module_of(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return NETWORKS[name][0]()


def trained(name: str, method, backend: str) -> tuple[Net, dict[str, Tensor]]:
    shape = NETWORKS[name][1]
    net = Net(module_of(name), torch.zeros(2, *shape))
    simulator = make_simulator(method, own_federation(shape), LOCAL, net, backend=backend, rounds=ROUNDS, seed=0)
    state, _ = run_all(simulator)
    return net, state.params.row(0)


def averaged_sgd(name: str) -> dict[str, Tensor]:
    """Return the state of a module after FedAvg with torch.optim.SGD."""
    shape = NETWORKS[name][1]
    data, common = own_federation(shape).split("train"), module_of(name)
    if any(isinstance(each, nn.parameter.UninitializedParameter) for each in common.parameters()):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            common(torch.zeros(2, *shape))
    common = common.double()
    for _ in range(ROUNDS):
        total = None
        for row, count in enumerate(data.count.tolist()):
            own = copy.deepcopy(common).train()
            x = torch.from_numpy(data.x[row, :count])
            x, y = x.double() if x.is_floating_point() else x.long(), torch.from_numpy(data.y[row, :count])
            optimiser = torch.optim.SGD(own.parameters(), lr=LOCAL.lr, momentum=LOCAL.momentum)
            for _ in range(LOCAL.epochs):
                optimiser.zero_grad()
                functional.cross_entropy(own(x), y).backward()
                optimiser.step()
            share = count / sum(data.count.tolist())
            sent = {key: share * value for key, value in own.state_dict().items() if value.is_floating_point()}
            total = sent if total is None else {key: total[key] + value for key, value in sent.items()}
        common.load_state_dict(total, strict=False)
    return common.state_dict()


@pytest.mark.parametrize("name", [name for name in NETWORKS if name not in RANDOM])
@pytest.mark.parametrize("backend", ["loop", "auto"])
def test_fedavg_is_sgd_on_copies_of_the_module_averaged(name, backend):
    net, found = trained(name, FedAvg(), backend)
    wanted = averaged_sgd(name)
    assert {net.original_names[key] for key in found} <= wanted.keys()
    for key, value in found.items():
        assert torch.allclose(value, wanted[net.original_names[key]], rtol=0, atol=1e-10), key


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("method", [FedAvg(), FedReMa()], ids=["fedavg", "fedrema"])
def test_both_backends_train_the_network_alike(name, method):
    if method.needs_head() and name in NO_HEAD:
        with pytest.raises(BadInput, match=r"FedReMa needs the network's classifier, which was not found: .*--head"):
            trained(name, method, "loop")
        return
    _, looped = trained(name, method, "loop")
    if name in STACKED_REFUSES:
        with pytest.raises(BadInput, match="--backend stacked cannot train this network"):
            trained(name, method, "stacked")
        return
    _, stacked = trained(name, method, "stacked")
    for key, value in looped.items():
        assert torch.allclose(value, stacked[key], rtol=0, atol=1e-9), key


def test_networks_without_a_head_are_known():
    nets = {name: Net(module_of(name), torch.zeros(2, *shape)) for name, (_, shape) in NETWORKS.items()}
    assert {name for name, net in nets.items() if not net.head_name} == NO_HEAD
    heads = {name: nets[name].head_name for name in ("nested head", "1×1 convolution", "view", "attention", "scaled")}
    assert heads == {
        "nested head": "classifier.1", "1×1 convolution": "3", "view": "fc", "attention": "head", "scaled": "last",
    }  # fmt: skip
    assert len(NETWORKS) >= 30


@pytest.mark.parametrize(
    "kind", [kind for kind in registry().values() if kind().supports(TASK)], ids=lambda kind: kind.name
)
def test_methods_declare_whether_they_need_a_head(kind):
    method = kind()
    if method.needs_head():
        with pytest.raises(
            BadInput, match="needs the network's classifier, which was not found: the output of its last"
        ):
            trained("two heads", method, "loop")
        return
    _, found = trained("two heads", method, "loop")
    assert all(torch.isfinite(value).all() for value in found.values())
