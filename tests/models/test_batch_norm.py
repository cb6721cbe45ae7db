"""Batch norm: equal to torch's without padding, computed by hand with it; which running statistics are updated."""

import copy
import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import vmap

from fedrema.core import LocalTraining, cross_entropy
from fedrema.engine.kernels import Operators
from fedrema.engine.stackable import why_not_stackable
from fedrema.errors import BadInput
from fedrema.methods.fedavg import FedAvg
from fedrema.methods.fedrema import FedReMa
from fedrema.models.batch_norm import BatchNorm1d, restore_batch_norm
from fedrema.models.body_and_head import BodyAndHead, Net
from tests.fixtures import make_federation, make_simulator, snapshot

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def network(norm, shape, classes=3):
    """Return a network with a batch-norm layer, as a module and as a Net."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        width = int(torch.Size(shape).numel())
        module = BodyAndHead(nn.Sequential(norm, nn.Tanh(), nn.Flatten()), nn.Linear(width, classes)).double()
        if norm.affine:
            nn.init.uniform_(norm.weight)
            nn.init.uniform_(norm.bias)
    return module, Net(module, torch.zeros(2, *shape, dtype=torch.float64))


def stepped(net, params, batches, masks, padded):
    """Return gradients, outputs of real samples and statistics of each batch, with padding or without."""
    net.train(True)
    own = {name: value.clone().requires_grad_(name in net.trainable) for name, value in params.items()}
    trained = [own[name] for name in sorted(net.trainable)]
    found = []
    for x, mask in zip(batches, masks, strict=True):
        real = x if padded else x[mask > 0]
        with net.batch_context(mask if padded else None, own):
            logits = net(own, real)
        logits = logits[mask > 0] if padded else logits
        found += [logits.detach(), *torch.autograd.grad(logits.square().sum(), trained)]
        found += [own[name].detach().clone() for name in sorted(own) if name not in net.trainable]
    return found


NORMS = {
    "of vectors": (lambda: nn.BatchNorm1d(4), (4,)),
    "of sequences": (lambda: nn.BatchNorm1d(4, eps=1e-3, momentum=0.3), (4, 3)),
    "of images": (lambda: nn.BatchNorm2d(3), (3, 2, 4)),
    "of volumes": (lambda: nn.BatchNorm3d(2), (2, 2, 3, 2)),
    "without scale": (lambda: nn.BatchNorm2d(3, affine=False), (3, 2, 2)),
    "without statistics": (lambda: nn.BatchNorm1d(4, track_running_stats=False), (4,)),
    "of all batches": (lambda: nn.BatchNorm1d(4, momentum=None), (4,)),
    "that forgets": (lambda: nn.BatchNorm1d(4, momentum=0.0), (4,)),
}


@pytest.mark.parametrize(("norm", "shape"), NORMS.values(), ids=NORMS)
def test_without_padding_it_equals_torchs(norm, shape):
    module, net = network(norm(), shape)
    batches = [torch.randn(n, *shape, dtype=torch.float64) * 3 + 5 for n in (6, 2, 5)]
    masks = [torch.ones(len(x), dtype=torch.float64) for x in batches]
    theirs, expected = module.train(), []
    for x in batches:
        logits = theirs(x)
        named = {net_name: theirs.get_parameter(net.original_names[net_name]) for net_name in sorted(net.trainable)}
        expected += [logits.detach(), *torch.autograd.grad(logits.square().sum(), list(named.values()))]
        kept = {name: theirs.get_buffer(its) for name, its in net.original_names.items() if name not in net.trainable}
        expected += [kept[name].double().clone() for name in sorted(kept)]
    for padded in (False, True):
        for one, other in zip(stepped(net, net.initial, batches, masks, padded), expected, strict=True):
            torch.testing.assert_close(one, other, **EXACT)
    # In evaluation mode, with the running statistics.
    theirs.eval()
    net.train(False)
    learnt = {name: dict(theirs.state_dict())[its].double() for name, its in net.original_names.items()}
    for mask in (None, masks[0]):
        with net.batch_context(mask):
            torch.testing.assert_close(net(learnt, batches[0]), theirs(batches[0]), **EXACT)


@pytest.mark.parametrize(("norm", "shape"), NORMS.values(), ids=NORMS)
def test_padding_changes_nothing(norm, shape):
    _, net = network(norm(), shape)
    batches = [torch.randn(6, *shape, dtype=torch.float64) for _ in range(3)]
    masks = [torch.tensor(mask, dtype=torch.float64) for mask in ([1, 1, 1, 0, 0, 0], [1, 0, 1, 1, 1, 0], [1] * 6)]
    found, expected = (stepped(net, net.initial, batches, masks, padded) for padded in (True, False))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


def test_a_padded_batch_equals_a_calculation_by_hand():
    _, net = network(nn.BatchNorm1d(1, eps=0.0), (1,))
    scale, shift = (float(net.initial[f"body.0.{name}"]) for name in ("weight", "bias"))
    own = {name: value.clone() for name, value in net.initial.items()}
    net.train(True)
    with net.batch_context(torch.tensor([1.0, 1.0, 0.0, 1.0]), own):
        features = net.features(own, torch.tensor([[1.0], [2.0], [1e6], [6.0]], dtype=torch.float64))
    # Mean 3 and variance (4 + 1 + 9) / 3; unbiased 14 / 2.
    even = (np.array([1.0, 2.0, 6.0]) - 3) / np.sqrt(14 / 3)
    assert features[[0, 1, 3], 0].numpy() == pytest.approx(np.tanh(scale * even + shift), abs=1e-12)
    assert float(own["body.0.running_mean"]) == pytest.approx(0.1 * 3, abs=1e-12)
    assert float(own["body.0.running_var"]) == pytest.approx(0.9 + 0.1 * 7, abs=1e-12)


@pytest.mark.parametrize("real", [0, 1])
def test_one_value_per_channel_becomes_the_shift_and_is_not_counted(real):
    _, net = network(nn.BatchNorm1d(2, momentum=None), (2,))
    net.train(True)
    own = {name: value.clone() for name, value in net.initial.items()}
    mask = torch.tensor([1.0] * real + [0.0] * (3 - real))
    with net.batch_context(mask, own):
        features = net.features(own, torch.randn(3, 2, dtype=torch.float64))
    assert torch.isfinite(features).all()
    if real:
        torch.testing.assert_close(features[0], torch.tanh(own["body.0.bias"]), **EXACT)
        with net.batch_context(None, own):  # as in the loop
            torch.testing.assert_close(net.features(own, torch.randn(1, 2).double())[0], features[0], **EXACT)
    assert all(torch.equal(own[name], net.initial[name]) for name in own)


def test_outputs_of_bf16_are_bf16_and_statistics_are_float32():
    net = Net(BodyAndHead(nn.BatchNorm1d(4), nn.Linear(4, 3)), torch.zeros(2, 4))
    layer = dict(net.layers())["body"].train()
    x = torch.randn(5, 4).bfloat16()
    with net.batch_context(torch.ones(5), {"mean": layer.running_mean}), Operators("bf16"):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(layer.running_mean, 0.1 * x.float().mean(0))


def test_only_tensors_that_the_client_trains_are_changed():
    _, net = network(nn.BatchNorm1d(4), (4,))
    net.train(True)
    x = torch.randn(6, 4, dtype=torch.float64)
    received, own = ({name: value.clone() for name, value in net.initial.items()} for _ in range(2))
    with net.batch_context(None, own):
        net(received, x)
        net({name: value.detach() for name, value in own.items()}, x)
    net(own, x)  # not in training
    for tensors in (received, own):
        assert all(torch.equal(tensors[name], net.initial[name]) for name in tensors)
    with net.batch_context(None, own):
        net(own, x)
    torch.testing.assert_close(own["body.0.running_mean"], 0.1 * x.mean(0), **EXACT)


def test_under_vmap_each_clients_own_statistics_are_updated():
    _, net = network(nn.BatchNorm1d(4), (4,))
    net.train(True)
    x = torch.randn(3, 6, 4, dtype=torch.float64)
    mask = torch.tensor([[1.0] * 6, [1.0] * 2 + [0.0] * 4, [0.0] * 6])
    stacked = {name: value.expand(3, *value.shape).clone() for name, value in net.initial.items()}

    def logits(own, x, mask):
        with net.batch_context(mask, own):
            return net(own, x)

    vmap(logits)(stacked, x, mask)
    expected = torch.stack([0.1 * x[0].mean(0), 0.1 * x[1, :2].mean(0), torch.zeros(4).double()])
    torch.testing.assert_close(stacked["body.0.running_mean"], expected, **EXACT)


def test_inputs_of_another_size_than_the_batch_need_their_own_mask():
    _, net = network(nn.BatchNorm1d(4), (4,))
    net.train(True)
    mask = torch.tensor([1.0, 1.0, 0.0], dtype=torch.float64)
    x = torch.randn(6, 4, dtype=torch.float64)
    with net.batch_context(mask):
        with pytest.raises(BadInput, match="received 6 samples but the batch has 3, so it does not know which of"):
            net(net.initial, x)
        twice = net(net.initial, x, mask=torch.cat([mask, mask]))
    real = net(net.initial, x[[0, 1, 3, 4]])
    torch.testing.assert_close(twice[[0, 1, 3, 4]], real, **EXACT)


class Tokens(nn.Module):
    """Normalises three parts of each sample separately: batch norm gets three times as many rows."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        return self.fc(self.norm(x.reshape(-1, 2)).reshape(len(x), 6))


class OwnNorm(nn.BatchNorm1d):
    """A user's own subclass."""


@pytest.mark.parametrize(
    ("module", "obstacle"),
    [
        (Tokens(), "layer 'norm' (BatchNorm1d) does not run under vmap (Batch norm received 6 samples but"),
        (BodyAndHead(OwnNorm(6), nn.Linear(6, 4)), "layer 'body' (OwnNorm) takes statistics of whole batches"),
        (
            BodyAndHead(
                nn.Sequential(
                    nn.Unflatten(1, (3, 2)), nn.InstanceNorm1d(3, track_running_stats=True), nn.Flatten()
                ), nn.Linear(6, 4)
            ),
            "layer 'body.1' (InstanceNorm1d) takes statistics of whole batches",
        ),
    ],
)  # fmt: skip
def test_networks_in_which_padding_cannot_be_identified_train_in_the_loop(module, obstacle):
    net = Net(module, torch.zeros(2, 6))
    assert why_not_stackable(net, torch.zeros(1, 6)).startswith(obstacle)
    simulator = batch_norm_simulator(FedAvg(), net=net, backend="auto")
    assert simulator.engine.name == "loop"
    list(simulator.run(simulator.start()))


def test_checking_whether_a_network_can_be_stacked_changes_no_statistics():
    net = Net(BodyAndHead(nn.BatchNorm1d(6), nn.Linear(6, 4)), torch.zeros(2, 6))
    before = copy.deepcopy(net.initial)
    assert why_not_stackable(net, torch.ones(1, 6)) is None
    assert all(torch.equal(net.initial[name], before[name]) for name in before)


def test_layers_can_be_turned_back_into_torchs():
    net = Net(BodyAndHead(nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 4)), torch.zeros(2, 6))
    layer = dict(net.layers())["body"]
    assert type(layer) is BatchNorm1d
    assert repr(layer) == repr(nn.BatchNorm1d(6, momentum=None))
    plain = restore_batch_norm(copy.deepcopy(layer))
    assert type(plain) is nn.BatchNorm1d
    assert plain.state_dict().keys() == nn.BatchNorm1d(6).state_dict().keys()
    assert plain.num_batches_tracked.dtype == torch.int64
    assert type(layer) is BatchNorm1d


class Looks(FedAvg):
    """A method whose loss also evaluates the received model."""

    def loss(self, net, client, batch):
        apart = (net(client.params, batch.x) - net(client.received, batch.x)).square().mean(dim=1)
        return cross_entropy(net(client.params, batch.x), batch) + (apart * batch.mask).sum()


batch_norm_simulator = functools.partial(
    make_simulator,
    local=LocalTraining(epochs=2, batch=5, lr=0.05, drop_incomplete=False),
    net="mlp-bn",
    hidden=5,
    rounds=2,
    seed=0,
    backend="loop",
)


@pytest.mark.parametrize("backend", ["loop", "stacked"])
def test_a_model_that_is_only_evaluated_keeps_its_statistics(backend):
    simulator = batch_norm_simulator(Looks(), backend=backend)
    cohort = simulator.cohort(simulator.start(), torch.arange(4))
    before = copy.deepcopy(cohort.params.common)
    trained = simulator.local_training(cohort, simulator.moment(1))[0].params.own
    assert all(torch.equal(before[name], cohort.params.common[name]) for name in before)
    assert not torch.allclose(trained["body.2.running_mean"][0], before["body.2.running_mean"])


def test_results_do_not_depend_on_rows_threads_or_backends():
    method = Looks()
    federation, states = make_federation(), {}
    for name, lanes, settings in (("one", 1, {}), ("two", 2, {}), ("stacked", 1, {"backend": "stacked"})):
        simulator = batch_norm_simulator(method, federation, **settings)
        simulator.engine.parallel = lanes
        states[name] = simulator.start()
        list(simulator.run(states[name]))
    expected = snapshot(states["one"])
    for name, value in snapshot(states["two"]).items():
        assert torch.equal(value, expected[name]), name
    for name, value in snapshot(states["stacked"]).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-9)
    order = [2, 0, 3, 1]
    for backend in ("loop", "stacked"):
        simulator = batch_norm_simulator(method, federation.reorder(order), backend=backend)
        turned = simulator.start()
        list(simulator.run(turned))
        for place, row in enumerate(order):
            for name, value in turned.params.row(place).items():
                torch.testing.assert_close(value, states["one"].params.row(row)[name], rtol=0, atol=1e-9)


def test_results_in_groups_are_bit_identical():
    federation = make_federation(counts=np.random.default_rng(0).integers(4, 12, 40).tolist())
    states = []
    for chunk in (32, 64):
        simulator = batch_norm_simulator(FedAvg(), federation, backend="stacked", chunk=chunk)
        states.append(simulator.start())
        list(simulator.run(states[-1]))
    one, other = map(snapshot, states)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_cumulative_means_are_computed_per_client():
    federation, states = make_federation(), []
    for backend in ("loop", "stacked"):
        net = network(nn.BatchNorm1d(6, momentum=None), (6,), classes=4)[1]
        simulator = batch_norm_simulator(FedAvg(), federation, net=net, backend=backend, rounds=1)
        cohort = simulator.cohort(simulator.start(), torch.arange(4))
        trained = simulator.local_training(cohort, simulator.moment(1))[0].params.own
        states.append(trained)
    # In each of two epochs, batches of 5 and the rest, unless that is a single sample.
    counts = federation.split("train").count
    batches = [2 * sum(min(5, n - at) > 1 for at in range(0, n, 5)) for n in counts]
    assert states[0]["body.0.num_batches_tracked"].tolist() == batches
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=0, atol=1e-9)


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(6)])
def test_the_server_evaluates_networks_in_evaluation_mode(layer):
    """FedReMa compares heads by their predictions, also in a round without scores."""
    module = BodyAndHead(nn.Sequential(nn.Linear(6, 6), nn.ReLU()), nn.Sequential(layer, nn.Linear(6, 4)))
    rounds = []
    for every in (1, 2):
        simulator = batch_norm_simulator(FedReMa(), net=Net(module, torch.zeros(2, 6)), evaluate_every=every)
        state = simulator.start()
        rounds.append((simulator.run_round(state).record["trace"], snapshot(state)))
    (trace, one), (other_trace, other) = rounds
    assert trace == other_trace
    assert all(torch.equal(one[name], other[name]) for name in one)
