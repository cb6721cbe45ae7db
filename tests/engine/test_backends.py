"""The choice of a backend, and the equality of their results."""

import dataclasses
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from fedrema.core import LocalTraining, Mean
from fedrema.data import Federation
from fedrema.engine import Arithmetic, choose_device, choose_precision, make_engine
from fedrema.engine.stackable import why_not_stackable
from fedrema.errors import BadInput
from fedrema.methods import registry
from fedrema.methods.fedavg import FedAvg
from fedrema.methods.fedrema import FedReMa
from fedrema.models.body_and_head import BodyAndHead, Net
from fedrema.models.networks import Network, build_net
from fedrema.simulation import simulator as simulate
from tests.fixtures import BACKENDS, make_federation, make_simulator, network, run_all


class Recurrent(nn.Module):
    """Reads six features as three steps of two."""

    def __init__(self):
        super().__init__()
        self.memory = nn.LSTM(2, 5, batch_first=True)
        self.fc = nn.Linear(5, 4)

    def forward(self, x):
        steps, _ = self.memory(x.reshape(len(x), 3, 2))
        return self.fc(steps[:, -1])


ON_CPU = Arithmetic(torch.device("cpu"))


def split(*body, width=8):
    return BodyAndHead(nn.Sequential(*body), nn.Linear(width, 4))


def with_dropout(chance=0.5):
    return split(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(chance))


def with_random_slopes():
    return split(nn.Linear(6, 8), nn.RReLU())


class Noise(nn.Module):
    """Draws from torch's generator."""

    def forward(self, x):
        return x + torch.randn_like(x) if self.training else x


def with_noise():
    return split(nn.Linear(6, 8), Noise())


def with_batch_norm():
    return split(nn.BatchNorm1d(6), nn.Linear(6, 8), nn.ReLU())


def make_net(build) -> Net:
    """Return a network with weights that do not depend on the training seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Net(build(), torch.ones(1, 6))


def run_simulation(net, federation, local, method=FedAvg, **settings):
    chosen = {"rounds": 2, "seed": 0, "backend": "loop", **settings}
    simulator = make_simulator(method(), federation, local, net, **chosen)
    return simulator, *run_all(simulator)


def distance(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def test_without_a_gpu_asking_for_one_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BadInput) as caught:
        choose_device("cuda")
    assert str(caught.value) == ("--device cuda: this machine has no usable CUDA device; use --device cpu or auto.")
    assert choose_device("auto") == torch.device("cpu")
    assert choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_arithmetic_of_a_gpu_is_refused_on_the_cpu(precision):
    with pytest.raises(BadInput) as caught:
        choose_precision(precision, torch.device("cpu"))
    assert str(caught.value) == f"--precision {precision} needs a CUDA device; on the CPU use float32 or float64."


def test_weights_are_float32_unless_float64_is_requested():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    try:
        assert choose_precision("auto", cuda).dtype is torch.float32
        with warnings.catch_warnings(action="ignore"):  # autocast warns without a GPU
            arithmetic = choose_precision("bf16", cuda)
            context = arithmetic.torch_context()
        assert arithmetic.dtype is torch.float32
        assert context.fast_dtype is torch.bfloat16
    finally:
        assert choose_precision("auto", cpu).dtype is torch.float32
    assert choose_precision("float64", cuda).dtype is torch.float64
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32


def tf32_is_allowed() -> bool:
    assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32
    return torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize(("precision", "allowed"), [("tf32", True), ("bf16", True), ("float32", False)])
def test_tf32_is_allowed_only_in_computations_of_clients(precision, allowed):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True  # as other code may leave it
    arithmetic = choose_precision(precision, torch.device("cuda"))
    assert not tf32_is_allowed()
    with arithmetic.tf32_where_allowed():
        assert tf32_is_allowed() == allowed
    assert not tf32_is_allowed()


@pytest.mark.parametrize("backend", ["loop", "stacked"])
def test_the_server_computes_in_float32_while_clients_train_in_tf32(backend, monkeypatch):
    seen = {"client": set(), "server": set()}

    class Watched(FedReMa):
        def loss(self, net, client, batch):
            seen["client"].add(tf32_is_allowed())
            return super().loss(net, client, batch)

        def predict(self, net, client, x):
            seen["client"].add(tf32_is_allowed())
            return super().predict(net, client, x)

        def aggregate(self, net, state, uploads, moment):
            seen["server"].add(tf32_is_allowed())
            return super().aggregate(net, state, uploads, moment)

    def watched(function):
        def called(*args, **kwargs):
            seen["server"].add(tf32_is_allowed())
            return function(*args, **kwargs)

        return called

    monkeypatch.setattr(Mean, "add", watched(Mean.add))
    monkeypatch.setattr(simulate, "head_similarity", watched(simulate.head_similarity))
    federation = make_federation()
    settings = {"rounds": 2, "precision": "float32", "backend": backend, "record": "relations"}
    simulator = make_simulator(
        Watched(), federation, LocalTraining(epochs=1), network(federation, hidden=5), **settings
    )
    simulator.engine.arithmetic = Arithmetic(torch.device("cpu"), products="tf32")  # as on a GPU
    run_all(simulator)
    assert seen == {"client": {True}, "server": {False}}


@pytest.mark.parametrize(
    ("network", "shape", "backend"),
    [
        ("mlp", (6,), "stacked"),
        (f"{__name__}:small_convolutions", (1, 8, 8), "stacked"),
        (f"{__name__}:wide", (6,), "loop"),
        ("cnn", (1, 28, 28), "loop"),
        ("alexnet", (3, 32, 32), "loop"),
    ],
)
def test_on_a_cpu_small_steps_are_stacked_and_large_ones_looped(network, shape, backend):
    net = build_net(Network(net=network), shape, 4, seed=0)
    sample = torch.zeros(1, *shape)
    assert make_engine("auto", net, sample, ON_CPU, 1, 100).name == backend
    assert make_engine("loop", net, sample, ON_CPU, 1, 100).name == "loop"
    assert make_engine("stacked", net, sample, ON_CPU, 1, 100).name == "stacked"


def small_convolutions():
    return BodyAndHead(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten()), nn.Linear(4 * 36, 4))


def wide():
    return BodyAndHead(nn.Sequential(nn.Linear(6, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU()), nn.Linear(300, 4))


@pytest.mark.parametrize(
    ("build", "layer"),
    [
        (with_random_slopes, "layer 'body.1' (RReLU) does not run under vmap"),
        (with_noise, "layer 'body.1' (Noise) does not run under vmap"),
    ],
)
def test_layers_that_cannot_be_stacked_are_named_and_trained_in_the_loop(build, layer):
    net, sample = make_net(build), torch.zeros(1, 6)
    assert why_not_stackable(net, sample).startswith(layer)
    with pytest.raises(BadInput) as caught:
        make_engine("stacked", net, sample, ON_CPU, 1, 5)
    sentence = str(caught.value)
    assert sentence.startswith(f"--backend stacked cannot train this network: {layer}")
    assert sentence.endswith("; use --backend loop.")
    assert "\n" not in sentence
    assert make_engine("auto", net, sample, ON_CPU, 1, 5).name == "loop"


def test_a_layer_of_the_head_that_cannot_be_stacked_is_named_as_in_the_users_module():
    net = make_net(lambda: BodyAndHead(nn.Linear(6, 8), nn.Sequential(nn.RReLU(), nn.Linear(8, 4))))
    assert why_not_stackable(net, torch.zeros(1, 6)).startswith("layer 'head.0' (RReLU)")


class Gate(nn.Module):
    """A layer whose control flow depends on values, called after another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        h = self.inner(x)
        return h if h.sum() > 0 else -h


class Stubborn(torch.autograd.Function):
    """Runs under vmap, but its gradient does not."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient * gradient.sum().item()


class Scale(nn.Module):
    def forward(self, x):
        return Stubborn.apply(x)


class Jumpy(nn.Module):
    """The control flow of the network's own forward depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        h = self.body(x)
        return self.head(h if h.sum() > 0 else -h)


@pytest.mark.parametrize(
    ("build", "blamed"),
    [
        (lambda: split(nn.Linear(6, 8), Gate(), nn.ReLU()), "layer 'body.1' (Gate) does not run under vmap"),
        (
            lambda: split(nn.Linear(6, 8), Scale(), nn.Linear(8, 8)),
            "layer 'body.1' (Scale) cannot be differentiated under vmap",
        ),
        (Jumpy, "the network's own forward does not run under vmap"),
    ],
)
def test_the_error_names_the_layer_that_fails(build, blamed):
    assert why_not_stackable(make_net(build), torch.ones(1, 6)).startswith(blamed)


class Words(nn.Module):
    """Begins with an embedding, so that it accepts only integers."""

    def __init__(self, vocabulary=50) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(vocabulary, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.table(x).mean(dim=1))


def sentences(kind=np.int64):
    generator = np.random.default_rng(0)
    y = generator.integers(0, 4, 60)
    x = 12 * y[:, None] + generator.integers(0, 12, (60, 5))  # each class has its own words
    return Federation.from_arrays(x.astype(kind), y, np.repeat([0, 1, 2], 20), classes=4)


def words(vocabulary=50):
    torch.manual_seed(0)
    return Net(Words(vocabulary), torch.zeros(2, 5))


def test_integers_reach_an_embedding_in_both_backends_and_are_learnt():
    local = LocalTraining(epochs=5, batch=5, lr=0.5)
    ends = []
    for backend in ("loop", "stacked"):
        simulator, state, records = run_simulation(words(), sentences(), local, rounds=10, backend=backend)
        assert simulator.train.x.dtype == torch.int64
        assert simulator.train.padded(slice(None), simulator.train.counts).mask.dtype == torch.float64
        ends.append(state.params.merged())
    assert records[-1]["accuracy"] > 0.9
    assert distance(*ends) < 1e-9


@pytest.mark.parametrize("method", registry())
def test_every_method_accepts_integers(method):
    kind = registry()[method]
    _, _, records = run_simulation(words(), sentences(), LocalTraining(epochs=1, batch=5), kind, rounds=2)
    assert np.isfinite(records[-1]["loss"])


def test_integers_are_converted_for_networks_of_floats():
    simulator, _, _ = run_simulation(
        Net(BodyAndHead(nn.Linear(5, 8), nn.Linear(8, 4)), torch.zeros(2, 5)), sentences(), LocalTraining(), rounds=1
    )
    assert simulator.train.x.dtype == torch.float64


def test_indices_outside_an_embedding_are_refused():
    with pytest.raises(BadInput, match=r"x of client '[012]' has [34][0-9]; the network's embedding takes 0 to 29\."):
        run_simulation(words(30), sentences(), LocalTraining())
    fractions = dataclasses.replace(sentences(), x=sentences().x + np.float32(0.5))
    with pytest.raises(BadInput, match="The network takes integers, as for an embedding, but x holds fractions"):
        run_simulation(words(), fractions, LocalTraining())
    run_simulation(words(), sentences(np.float32), LocalTraining(), rounds=1)  # integers stored as floats


def test_checking_whether_a_network_can_be_stacked_does_not_change_it():
    net = make_net(lambda: split(nn.Linear(6, 8), nn.ReLU()))
    before = {name: value.clone() for name, value in net.initial.items()}
    assert why_not_stackable(net, torch.ones(1, 6)) is None
    assert all(torch.equal(net.initial[name], before[name]) for name in before)
    assert not any(value.requires_grad for value in net.initial.values())
    assert not any(layer._forward_pre_hooks for _, layer in net.layers())


@pytest.mark.parametrize("backend", BACKENDS)
def test_recurrent_networks_train(backend):
    local = LocalTraining(epochs=5, batch=5, lr=0.1)
    _, _, records = run_simulation(make_net(Recurrent), make_federation(), local, rounds=4, backend=backend)
    assert records[-1]["loss"] < records[0]["loss"]


# Every client uses all its samples in each step: the seed then only affects random layers.
WHOLE = LocalTraining(epochs=3, batch=1000, lr=0.1)


def test_dropout_depends_on_the_seed():
    federation = make_federation()
    first, again, other = (
        run_simulation(make_net(with_dropout), federation, WHOLE, seed=seed)[1] for seed in (0, 0, 1)
    )
    for name, value in first.params.common.items():
        assert torch.equal(value, again.params.common[name])
    assert distance(first.params.common, other.params.common) > 1e-3
    still = [run_simulation(make_net(lambda: with_dropout(0.0)), federation, WHOLE, seed=seed)[1] for seed in (0, 1)]
    assert distance(still[0].params.common, still[1].params.common) < 1e-12


def test_dropout_depends_on_the_clients_name_and_not_on_its_row():
    federation = make_federation()
    _, straight, _ = run_simulation(make_net(with_dropout), federation, WHOLE)
    _, turned, _ = run_simulation(make_net(with_dropout), federation.reorder([3, 1, 0, 2]), WHOLE)
    assert distance(straight.params.common, turned.params.common) < 1e-12


def test_training_does_not_change_torchs_global_random_state():
    before = torch.get_rng_state()
    run_simulation(make_net(with_dropout), make_federation(), WHOLE)
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_is_off_in_predictions():
    federation = make_federation()
    simulator, state, _ = run_simulation(make_net(with_dropout), federation, WHOLE)
    cohort = simulator.cohort(state, torch.arange(4))
    predicted = simulator.engine.predictions(simulator.method, cohort, simulator.test)
    assert torch.equal(predicted, simulator.engine.predictions(simulator.method, cohort, simulator.test))
    params = state.params.common
    hidden = (simulator.test.x @ params["body.0.weight"].T + params["body.0.bias"]).relu()
    expected = (hidden @ params["head.weight"].T + params["head.bias"]).argmax(-1)
    real = torch.arange(expected.shape[1]) < simulator.test.counts[:, None]
    assert torch.equal(predicted, torch.where(real, expected, -1))


@pytest.mark.parametrize("backend", ["loop", "stacked"])
def test_running_statistics_are_averaged_like_weights(backend):
    federation = make_federation()
    local = LocalTraining(epochs=1, batch=1000, lr=0.1)
    _, state, _ = run_simulation(make_net(with_batch_norm), federation, local, rounds=1, backend=backend)
    train = federation.split("train")
    # One step on all samples: running statistics move from (0, 1) by a tenth towards each client's own.
    own = [train.x[row, :count].astype(float) for row, count in enumerate(train.count)]
    means = np.stack([0.1 * x.mean(0) for x in own])
    variances = np.stack([0.9 + 0.1 * x.var(0, ddof=1) for x in own])
    shares = train.count / train.count.sum()
    assert state.params.common["body.0.running_mean"].numpy() == pytest.approx(shares @ means, abs=1e-12)
    assert state.params.common["body.0.running_var"].numpy() == pytest.approx(shares @ variances, abs=1e-12)
    assert "body.0.running_mean" not in state.velocity
    assert "body.0.weight" in state.velocity


@pytest.mark.parametrize("backend", ["loop", "stacked"])
def test_a_network_with_batch_norm_learns(backend):
    local = LocalTraining(epochs=3, batch=5, lr=0.1)
    _, _, records = run_simulation(make_net(with_batch_norm), make_federation(), local, rounds=6, backend=backend)
    assert records[-1]["loss"] < 0.7 * records[0]["loss"]
    assert records[-1]["accuracy"] > 0.6


def image_federation(shape, counts=(4, 7, 3)):
    """Random pixels; every client keeps one image for testing."""
    generator = np.random.default_rng(0)
    client = np.repeat(np.arange(len(counts)), counts)
    test = np.diff(client, prepend=-1) > 0
    x = generator.integers(0, 256, (len(client), *shape), dtype=np.uint8)
    return Federation.from_arrays(x, generator.integers(0, 10, len(client)), client, split=test, classes=10)


@pytest.mark.parametrize(
    ("network", "shape"), [("cnn", (1, 28, 28)), ("alexnet", (3, 32, 32)), ("cnn-bn", (1, 28, 28))]
)
def test_the_papers_networks_train_equally_in_both_backends(network, shape):
    federation = image_federation(shape)
    local = LocalTraining(epochs=1, batch=2, lr=0.05, drop_incomplete=False)
    states, losses = [], []
    for backend in ("loop", "stacked"):
        net = build_net(Network(net=network), shape, 10, seed=0)
        _, state, records = run_simulation(net, federation, local, FedReMa, rounds=1, backend=backend)
        states.append(state)
        losses.append(records[0]["client_loss"])
    for row in range(3):
        assert distance(states[0].params.row(row), states[1].params.row(row)) < 1e-9
    assert distance(states[0].velocity, states[1].velocity) < 1e-9
    assert losses[0] == pytest.approx(losses[1], abs=1e-9)
    # The parameters have changed.
    initial = net.initial
    assert distance(states[0].params.row(0), initial) > 1e-4
