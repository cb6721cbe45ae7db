"""The Triton kernels, in Triton's interpreter on the CPU, against torch in float64."""

import os

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional

if os.environ.get("TRITON_INTERPRET") != "1":  # on a machine with a GPU, where benchmarks/check_kernels.py checks them
    pytest.skip("needs Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from fedrema.engine.kernels import Operators, descriptors, products, sums, tiles, usable
from fedrema.engine.kernels.autograd import convolve
from fedrema.engine.kernels.products import Geometry
from fedrema.models.body_and_head import BodyAndHead, Net

TOLERANCE = 3e-6


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill new tensors with NaN, so that values which are not written are detected."""
    made = torch.Tensor.new_empty

    def poisonous(self, size, **keywords):
        fresh = made(self, size, **keywords)
        return fresh.fill_(float("nan")) if fresh.is_floating_point() else fresh.fill_(201)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisonous)
    monkeypatch.setattr(torch, "empty_like", lambda like, **keywords: poisonous(like, like.shape, **keywords))


def distance(found, expected):
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


def last(*shape):
    """Return random numbers [k, n, channels, height, width] with channels last in memory."""
    return torch.randn(shape[0], shape[1], *shape[3:], shape[2]).permute(0, 1, 4, 2, 3)


def random_shape(seed):
    generator = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    kernel = pick(1, 2, 3, 5), pick(1, 3, 4)
    return {
        "k": pick(1, 2, 3), "n": pick(1, 2, 5), "channels": pick(1, 3, 5, 16, 17, 33), "outputs": pick(1, 7, 17, 35),
        "size": (pick(5, 6, 8), pick(5, 7, 9)), "kernel": kernel, "stride": (pick(1, 2), pick(1, 2)),
        "padding": (pick(0, 1, 2), pick(0, 1, 2)),
    }  # fmt: skip


# Shapes whose operands are copied as boxes: widths are powers of two, channels multiples of 8; several steps and parts.
BOXES = [
    {"k": 2, "n": 3, "channels": 16, "outputs": 40, "size": (8, 8), "kernel": (3, 3), "padding": (1, 1)},
    {"k": 2, "n": 2, "channels": 32, "outputs": 72, "size": (5, 6), "kernel": (2, 3), "padding": (0, 0)},
    {"k": 1, "n": 5, "channels": 80, "outputs": 136, "size": (4, 4), "kernel": (3, 1), "padding": (1, 0)},
    {"k": 3, "n": 4, "channels": 24, "outputs": 64, "size": (2, 8), "kernel": (1, 1), "padding": (0, 0)},
    {"k": 1, "n": 5, "channels": 16, "outputs": 48, "size": (16, 16), "kernel": (1, 3), "padding": (0, 1)},
]


def assert_products(k, n, channels, outputs, size, kernel, padding, stride=(1, 1)):
    torch.manual_seed(k + n + channels + outputs)
    geometry = Geometry(stride, padding, "float32")
    x, weight, bias = last(k, n, channels, *size), last(k, outputs, channels, *kernel), torch.randn(k, outputs)
    narrow = products.narrowed(weight, geometry)
    y = products.forward(x, narrow, bias, geometry)
    g = torch.randn(y.shape)
    dx = products.input_gradient(g, narrow, size, torch.float32, geometry)
    dw, db = products.weight_gradient(x, g, kernel, geometry)
    assert dw.permute(0, 1, 3, 4, 2).is_contiguous()
    for c in range(k):
        leaves = [value[c].double().requires_grad_() for value in (x, weight, bias)]
        expected = functional.conv2d(*leaves, stride=stride, padding=padding)
        wanted = torch.autograd.grad(expected, leaves, g[c].double())
        for found, right in zip((y[c], dx[c], dw[c], db[c]), (expected.detach(), *wanted), strict=True):
            assert found.shape == right.shape
            assert distance(found, right) < TOLERANCE


@pytest.mark.parametrize("seed", range(24))
def test_products_of_random_shapes(seed):
    assert_products(**random_shape(seed))


@pytest.mark.parametrize("shape", BOXES)
def test_products_with_operands_copied_as_boxes(shape, monkeypatch):
    taken = []
    for name in ("product", "gradient"):
        original = getattr(descriptors, name)

        def watched(*arguments, original=original, name=name, **keywords):
            done = original(*arguments, **keywords)
            if done is not None and done is not False:
                taken.append(name)
            return done

        monkeypatch.setattr(descriptors, name, watched)
    assert_products(**shape)
    assert taken


def test_weight_gradients_with_operands_copied_as_boxes(monkeypatch):
    monkeypatch.setattr(tiles, "gradient_tile", None)  # the other way is not gone
    assert_products(2, 3, 16, 40, (8, 8), (3, 3), (1, 1))
    assert_products(1, 5, 16, 24, (16, 16), (3, 1), (1, 0))


# Small tiles, so that several tiles and steps are needed, and sizes that are not multiples of a tile.
@pytest.mark.parametrize(("rows", "channels", "outputs"), [(1, 64, 40), (16, 96, 8), (7, 160, 24)])
def test_linear_layers_with_operands_copied_as_boxes(rows, channels, outputs, monkeypatch):
    monkeypatch.setattr(tiles, "linear_tile", lambda: tiles.Tile(16, 16, 8, 4, 2))
    monkeypatch.setattr(tiles, "linear_gradient_tile", lambda rows: tiles.Tile(16, 32, 16, 4, 2))
    monkeypatch.setattr(tiles, "LINEAR_STEPS", 2)
    for name in ("forward_tile", "gradient_tile"):
        monkeypatch.setattr(tiles, name, None)  # the other way is not gone
    torch.manual_seed(rows)
    geometry = Geometry(linear=True)
    x, weight, bias = last(3, rows, channels, 1, 1), last(3, outputs, channels, 1, 1), torch.randn(3, outputs)
    g = last(3, rows, outputs, 1, 1)
    narrow = products.narrowed(weight, geometry)
    y = products.forward(x, narrow, bias, geometry).flatten(2)
    dx = products.input_gradient(g, narrow, (1, 1), torch.float32, geometry).flatten(2)
    dw, db = products.weight_gradient(x, g, (1, 1), geometry)
    x, weight, g = (value.flatten(2).double() for value in (x, weight, g))
    assert distance(y, x @ weight.mT + bias[:, None]) < TOLERANCE
    assert distance(dx, g @ weight) < TOLERANCE
    assert distance(dw.flatten(2), g.mT @ x) < TOLERANCE
    assert distance(db, g.sum(1)) < TOLERANCE
    one = [value[1:2].float().unflatten(2, (-1, 1, 1)) for value in (x, g)]
    alone = products.weight_gradient(*one, (1, 1), geometry)
    assert torch.equal(alone[0], dw[1:2])
    assert torch.equal(alone[1], db[1:2])


def test_many_rows_are_split_into_parts():
    counts = [tiles.parts(rows, across, 64)[0] for rows, across in ((5000, 9), (5000, 64), (100, 1))]
    assert counts[0] > 1
    assert counts[1:] == [1, 1]
    assert_products(1, 21, 3, 5, (9, 9), (3, 3), (0, 0), stride=(1, 1))
    assert_products(2, 11, 17, 5, (9, 9), (2, 2), (1, 1), stride=(1, 1))


def test_all_parts_are_added():
    parts = torch.randn(37, 3, 50)  # more than one step adds
    assert torch.allclose(sums.added(parts), parts.sum(0), atol=1e-5)


@pytest.mark.parametrize("channels", [3, 16])
def test_a_clients_result_is_bit_identical_for_any_number_of_stacked_clients(channels):
    geometry = Geometry((1, 1), (0, 0), "float32")
    x, weight = last(3, 9, channels, 12, 12), last(3, 40, channels, 1, 1)
    g = last(3, 9, 40, 12, 12)
    narrow = products.narrowed(weight, geometry)
    together = products.forward(x, narrow, None, geometry), *products.weight_gradient(x, g, (1, 1), geometry)
    alone = (
        products.forward(x[1:2], narrow[1:2], None, geometry),
        *products.weight_gradient(x[1:2], g[1:2], (1, 1), geometry),
    )
    for many, one in zip(together, alone, strict=True):
        assert torch.equal(many[1:2], one)


class Network(nn.Module):
    """A network with all layers that the kernels replace, and many that they do not."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 17, 3, padding=1), nn.MaxPool2d(3, 2, padding=1), nn.ReLU(),
            nn.Conv2d(17, 20, (3, 2), stride=2, padding=(1, 0)), nn.GroupNorm(2, 20),
            nn.Conv2d(20, 20, 1, groups=2), nn.Conv2d(20, 6, 2, dilation=2, padding=2), nn.MaxPool2d(2, ceil_mode=True),
            nn.Flatten(), nn.Linear(24, 5, bias=False), nn.GELU(), nn.Linear(5, 3),
        )  # fmt: skip

    def forward(self, x):
        return self.layers(x)


def stacked(net, k):
    return {
        name: (value.detach() + 0.1 * torch.randn(k, *value.shape)).requires_grad_()
        for name, value in net.named_parameters()
    }


def loss_of(net):
    return lambda params, x: functional_call(net, params, (x,)).logsumexp(-1).pow(2).sum()


def by_loop(net, params, x, common=()):
    """Loss and gradients of each client in float64, one after another."""
    net = net.double()
    leaves = {name: value.detach().double().requires_grad_() for name, value in params.items()}
    rows = [{name: v if name in common else v[c] for name, v in leaves.items()} for c in range(len(x))]
    values = torch.stack([loss_of(net)(row, one.double()) for row, one in zip(rows, x, strict=True)])
    found = torch.autograd.grad(values.sum(), list(leaves.values()))
    net.float()
    return values, found


def assert_same(values, gradients, expected, wanted, tolerance=1e-5):
    assert distance(values, expected) < tolerance
    for found, right in zip(gradients, wanted, strict=True):
        assert distance(found, right) < tolerance


def test_a_network_under_vmap():
    torch.manual_seed(0)
    net, x = Network(), torch.randn(3, 2, 3, 8, 7)
    params = stacked(net, 3)
    with Operators("float32"):
        values = vmap(loss_of(net))(params, x)
    gradients = torch.autograd.grad(values.sum(), list(params.values()))
    assert_same(values, gradients, *by_loop(net, params, x))


def test_the_kernels_replace_the_layers(monkeypatch):
    calls = []
    original = products.forward
    monkeypatch.setattr(products, "forward", lambda *given: calls.append(given[0].shape) or original(*given))
    net, x = Network(), torch.randn(2, 2, 3, 8, 7)
    with Operators("float32"):
        vmap(loss_of(net))(stacked(net, 2), x)
    assert [tuple(shape)[:3] for shape in calls] == [(2, 2, 3), (2, 2, 17), (2, 2, 24), (2, 2, 5)]


def test_no_gradient_is_computed_for_the_samples(monkeypatch):
    net, x = nn.Conv2d(16, 4, 3), torch.randn(2, 1, 16, 5, 5)
    monkeypatch.setattr(products, "input_gradient", None)  # a call would fail
    params = stacked(net, 2)
    with Operators("float32"):
        values = vmap(loss_of(net))(params, x)
    torch.autograd.grad(values.sum(), list(params.values()))


def test_weights_shared_by_all_clients():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(17, 5, 3), nn.Flatten(), nn.Linear(45, 4))
    x = torch.randn(3, 2, 17, 5, 5)
    params = {**stacked(net, 3), **{n: v.detach().requires_grad_() for n, v in net[0].named_parameters("0")}}
    common = ("0.weight", "0.bias")
    axes = {name: None if name in common else 0 for name in params}
    with Operators("float32"):
        values = vmap(loss_of(net), in_dims=(axes, 0))(params, x)
    gradients = torch.autograd.grad(values.sum(), list(params.values()))
    assert_same(values, gradients, *by_loop(net, params, x, common))


@pytest.mark.parametrize("channels", [3, 17])
def test_samples_shared_by_all_clients(channels):
    torch.manual_seed(2)
    net = nn.Sequential(nn.Conv2d(channels, 5, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(5, 4))
    x = torch.randn(2, channels, 5, 5)
    params = stacked(net, 3)
    with Operators("float32"):
        values = vmap(loss_of(net), in_dims=(0, None))(params, x)
    gradients = torch.autograd.grad(values.sum(), list(params.values()))
    assert_same(values, gradients, *by_loop(net, params, x.expand(3, *x.shape)))


def test_without_vmap_and_with_gradients_per_client():
    torch.manual_seed(3)
    net, x = nn.Sequential(nn.Conv2d(3, 17, 3), nn.Conv2d(17, 2, 2)), torch.randn(2, 2, 3, 5, 5)
    params = stacked(net, 2)
    expected, wanted = by_loop(net, params, x)
    with Operators("float32"):
        one = loss_of(net)({name: value[1] for name, value in params.items()}, x[1])
        inner = vmap(torch.func.grad(loss_of(net)))({name: v.detach() for name, v in params.items()}, x)
    assert distance(one, expected[1]) < TOLERANCE
    for name, right in zip(params, wanted, strict=True):
        assert distance(inner[name], right) < 1e-5


def test_gradients_can_be_differentiated():
    torch.manual_seed(4)
    net = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(16, 3, 2))
    x = torch.randn(2, 2, 3, 9, 9)
    params = stacked(net, 2)

    def penalty(params, x, net):
        """The squared norm of the gradient with respect to weights and samples."""
        x = x.detach().requires_grad_()
        value = loss_of(net)(params, x) if x.dim() == 4 else vmap(loss_of(net))(params, x).sum()
        found = torch.autograd.grad(value, [*params.values(), x], create_graph=True)
        return sum(g.pow(2).sum() for g in found)

    with Operators("float32"):
        value = penalty(params, x, net)
    gradients = torch.autograd.grad(value, list(params.values()))
    net.double()
    leaves = {name: v.detach().double().requires_grad_() for name, v in params.items()}
    expected = sum(penalty({name: v[c] for name, v in leaves.items()}, x[c].double(), net) for c in range(2))
    wanted = torch.autograd.grad(expected, list(leaves.values()), allow_unused=True, materialize_grads=True)
    assert_same(value, gradients[:3], expected, wanted[:3])
    assert gradients[3].abs().max() <= 1e-5 * wanted[0].abs().max() or distance(gradients[3], wanted[3]) < 1e-5


@pytest.mark.parametrize(("stride", "padding", "channels"), [(1, 1, 3), (2, 0, 16), (2, 1, 17)])
def test_every_product_has_the_right_second_derivatives(stride, padding, channels):
    torch.manual_seed(5)
    geometry = Geometry((stride, stride), (padding, padding), "float32")
    inputs = [torch.randn(1, 2, channels, 5, 4), torch.randn(1, 3, channels, 3, 2), torch.randn(1, 3)]

    def mixed(function, inputs, probes):
        inputs = [value.detach().to(probes[0].dtype).requires_grad_() for value in inputs]
        first = torch.autograd.grad(function(*inputs), inputs, probes[0], create_graph=True)
        total = sum((one.sin() * probe).sum() for one, probe in zip(first, probes[1:], strict=True))
        return torch.autograd.grad(total, inputs[:2])

    shape = functional.conv2d(inputs[0][0], inputs[1][0], stride=stride, padding=padding).shape
    probes = [torch.randn(1, *shape), *(torch.randn(value.shape) for value in inputs)]
    found = mixed(lambda x, w, b: convolve(x, w, b, geometry), inputs, probes)
    wanted = mixed(
        lambda x, w, b: functional.conv2d(x[0], w[0], b[0], stride=stride, padding=padding)[None],
        inputs,
        [probe.double() for probe in probes],
    )
    for ours, right in zip(found, wanted, strict=True):
        assert distance(ours, right) < 1e-5


def test_bf16_is_converted_to_float32_where_precision_matters():
    with Operators("bf16"):
        x = torch.randn(3, 4).bfloat16()
        assert torch.relu(x).dtype == torch.bfloat16
        assert x.reshape(4, 3).dtype == torch.bfloat16
        assert x.logsumexp(0).dtype == torch.float32
        assert functional.group_norm(x, 2).dtype == torch.float32
        assert functional.conv2d(x[None, :, None].repeat(1, 2, 1, 1), torch.randn(4, 3, 1, 1), groups=2) is not None


def test_only_float32_on_a_gpu_is_usable():
    assert not usable(torch.device("cpu"), torch.float32, "float32")
    assert not usable(torch.device("cuda"), torch.float64, "float64")


def test_batch_norm_between_our_layers_sees_real_samples_only():
    torch.manual_seed(0)
    # A bias before batch norm would have no gradient but rounding.
    convolution = nn.Conv2d(3, 16, 3, padding=1, bias=False)
    body = nn.Sequential(convolution, nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    net = Net(BodyAndHead(body, nn.Linear(64, 3)), torch.zeros(2, 3, 4, 4))
    net.train(True)
    x, real = torch.randn(3, 4, 3, 4, 4), [4, 2, 0]
    mask = (torch.arange(4) < torch.tensor(real)[:, None]).float()
    stacked = {name: value.expand(3, *value.shape).clone() for name, value in net.initial.items()}

    def loss(own, x, mask):
        with net.batch_context(mask, own):
            return (net(own, x).logsumexp(-1).pow(2) * mask).sum()

    def found(values, params):
        leaves = [params[name] for name in sorted(net.trainable)]
        return [
            *torch.autograd.grad(values.sum(), leaves),
            *(params[f"body.1.running_{name}"] for name in ("mean", "var")),
        ]

    leaves = {name: value.requires_grad_(name in net.trainable) for name, value in stacked.items()}
    with Operators("float32"):
        values = vmap(loss)(leaves, x, mask)
    ours = found(values, leaves)
    exact = net.to(torch.device("cpu"), torch.float64)
    for row, count in enumerate(real[:2]):
        alone = {name: value.clone().requires_grad_(name in net.trainable) for name, value in exact.initial.items()}
        wanted = found(loss(alone, x[row, :count].double(), torch.ones(count)), alone)
        for one, other in zip(ours, wanted, strict=True):
            assert distance(one[row], other) < 1e-5
    assert torch.equal(ours[-1][2], torch.ones(16))  # a finished client is unchanged
