"""Built-in networks and a user's own."""

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from fedrema.base.options import field_documentation
from fedrema.base.user_code import load_object
from fedrema.core import LocalTraining
from fedrema.data import Federation
from fedrema.errors import BadInput
from fedrema.methods.fedavg import FedAvg
from fedrema.models.networks import NETWORKS, Network, build_net
from tests.fixtures import make_simulator, snapshot

DIGIT = (1, 8, 8)
FOR_DIGITS = [name for name in NETWORKS if name.removesuffix("-bn") not in ("cnn", "alexnet")]


def sizes(net, part):
    return sum(value.numel() for name, value in net.initial.items() if name.startswith(part + "."))


def refusal(settings, shape=(6,), classes=4):
    with pytest.raises(BadInput) as caught:
        build_net(settings, shape, classes, seed=0)
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def test_the_cnn_is_the_papers():
    net = build_net(Network(net="cnn"), (1, 28, 28), 10, seed=0)
    assert net.features_count == 1024
    assert sizes(net, "body") == (1 * 32 * 25 + 32) + (32 * 64 * 25 + 64)
    assert sizes(net, "head") == (1024 * 512 + 512) + (512 * 10 + 10)
    kinds = [type(layer) for _, layer in net.layers()]
    assert kinds == [
        *(nn.Conv2d, nn.MaxPool2d, nn.ReLU, nn.Conv2d, nn.MaxPool2d, nn.ReLU, nn.Flatten),
        *(nn.Linear, nn.ReLU, nn.Linear),
    ]


def test_the_cnn_computes_the_same_as_with_the_papers_order_of_relu_and_pooling():
    module = NETWORKS["cnn"]((1, 28, 28), 10)
    layers = [*module.get_submodule("body").children()]
    first, second = (nn.Sequential(*(layers[place] for place in order)) for order in ((0, 2, 1), (3, 5, 4)))
    paper = nn.Sequential(first, second, nn.Flatten(), module.get_submodule("head"))
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 1, 28, 28, generator=generator), torch.randint(0, 10, (20,), generator=generator)
    x[:5] = 0  # windows of equal values
    losses = [nn.functional.cross_entropy(network(x), y) for network in (module, paper)]
    assert torch.equal(*losses)
    gradients = [torch.autograd.grad(loss, [*module.parameters()]) for loss in losses]
    assert all(map(torch.equal, *gradients))


def test_the_alexnet_is_the_papers():
    net = build_net(Network(net="alexnet"), (3, 32, 32), 10, seed=0)
    assert net.features_count == 2304
    convolutions = [value for name, value in net.initial.items() if net.in_body(name) and value.dim() == 4]
    assert [tuple(value.shape) for value in convolutions] == [
        *((32, 3, 3, 3), (64, 32, 3, 3), (128, 64, 3, 3), (256, 128, 3, 3), (256, 256, 3, 3)),
    ]
    assert sizes(net, "head") == (2304 * 1024 + 1024) + (1024 * 512 + 512) + (512 * 10 + 10)
    kinds = [(name.split(".")[0], type(layer)) for name, layer in net.layers()]
    # No activation between the last three convolutions, none in the head.
    assert [kind for part, kind in kinds if part == "body"] == [
        *(nn.Conv2d, nn.MaxPool2d, nn.ReLU) * 2,
        *(nn.Conv2d, nn.Conv2d, nn.Conv2d, nn.MaxPool2d, nn.ReLU, nn.Flatten),
    ]
    assert [kind for part, kind in kinds if part == "head"] == [nn.Linear] * 3


def test_the_mlp_has_one_hidden_layer():
    net = build_net(Network(net="mlp", hidden=9), (2, 3), 4, seed=0)
    assert net.features_count == 9
    assert sizes(net, "body") == 6 * 9 + 9
    assert sizes(net, "head") == 9 * 4 + 4


@pytest.mark.parametrize(
    ("shape", "features"),
    [((3, 32, 32), 2304), ((1, 28, 28), 1024), ((3, 28, 28), 1024), ((1, 8, 8), 32), ((13,), 32), ((64, 64), 32)],
)
def test_auto_depends_on_the_shape_of_a_sample(shape, features):
    assert build_net(Network(), shape, 4, seed=0).features_count == features


def test_a_width_of_zero_is_refused():
    with pytest.raises(BadInput, match="--hidden must be at least 1, got 0"):
        Network(hidden=0)


@pytest.mark.parametrize("name", ["cnn", "alexnet"])
def test_images_that_are_too_small_are_refused(name):
    assert refusal(Network(net=name), (1, 4, 4)) == (
        f"--net {name} cannot take samples of shape (1, 4, 4): use --net mlp or your own network."
    )
    assert refusal(Network(net=name), (30,)) == (
        f"--net {name} takes images [channels, height, width], not samples of shape (30,): use --net mlp."
    )


def test_an_unknown_network_is_refused():
    assert refusal(Network(net="resnet")) == (
        f"--net 'resnet' is unknown; valid are auto, {', '.join(NETWORKS)}, or your own as module:function."
    )


def words(text):
    return set(re.findall(r"[a-z0-9]+(?:-bn)?", text))


def test_help_and_documentation_list_every_network():
    _, meaning = field_documentation(Network)["net"]
    assert set(NETWORKS) <= words(meaning)
    page = Path(__file__).parents[2] / "docs" / "own-data.md"
    section = page.read_text().partition("### Built-in networks")[2].partition("###")[0]
    listed = re.findall(r"^\| (`.*?) \|", section, re.M)
    assert {name for cell in listed for name in re.findall(r"`(.*?)`", cell)} == set(NETWORKS)


def test_weights_depend_on_the_seed_and_global_random_states_are_unchanged():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (build_net(Network(), (6,), 4, seed).initial for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


INITIAL = {
    "mlp": ("7909fc80fc661975", "35106a3f4b6cadc7"),
    "cnn": ("8a7ef9166b28c1ec", "e4ecb1d9386eef7b"),
    "alexnet": ("8286352481da38e1", "26edbc2d6868e8e4"),
    "mlp-bn": ("aa42774ef4be2012", "d96a4096276a92fa"),
    "cnn-bn": ("86b672b6d9588254", "4d95e4de2bb73737"),
    "alexnet-bn": ("98b3fc56c4b4b999", "17fdef72a9cf3d7d"),
}
"""Digests of names and values of all initial tensors, without and with a projection of width 6."""


@pytest.mark.parametrize("name", INITIAL)
def test_a_seed_gives_the_same_initial_weights_in_every_version(name):
    shape = {"mlp": (6,), "cnn": (1, 28, 28), "alexnet": (3, 32, 32)}[name.removesuffix("-bn")]
    found = []
    for projection in (0, 6):
        digest = hashlib.sha256()
        for tensor, value in build_net(Network(net=name, projection=projection), shape, 10, seed=0).initial.items():
            digest.update(tensor.encode() + value.numpy().tobytes())
        found.append(digest.hexdigest()[:16])
    assert tuple(found) == INITIAL[name]


@pytest.mark.parametrize("name", FOR_DIGITS)
def test_a_projection_is_between_body_and_head(name):
    net = build_net(Network(net=name, projection=5), DIGIT, 4, seed=0)
    assert net.features_count == 5
    linear = [layer for part, layer in net.layers() if isinstance(layer, nn.Linear)]
    assert [layer.out_features for layer in linear[-3:]] == [linear[-3].in_features, 5, 4]


@pytest.fixture(scope="module")
def digits():
    x, y = load_digits(return_X_y=True)
    x, client = (x[:24].reshape(-1, *DIGIT) / 8 - 1).astype(np.float32), np.repeat(np.arange(2), 12)
    return Federation.from_arrays(x, y[:24], client, classes=10)


@pytest.mark.parametrize("name", FOR_DIGITS)
def test_a_round_on_digits_trains_every_layer(name, digits):
    local = LocalTraining(epochs=1, batch=5, lr=0.05)
    run = make_simulator(FedAvg(), digits, local, net=name, rounds=1, backend="loop", precision="float32")
    state = run.start()
    before = snapshot(state)
    (finished,) = run.run(state)
    after = snapshot(state)
    assert 0 <= finished.record.accuracy <= 1
    assert [name for name in run.net.trainable if torch.equal(before[f"common/{name}"], after[f"common/{name}"])] == []


OWN = """
from torch import nn

def sized(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(shape[0], 11), nn.ReLU(), nn.Linear(11, classes))

def fixed():
    return Own((6,), 4)

class Own(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.body, self.classifier = nn.Linear(shape[0], 5), nn.Linear(5, classes)

    def forward(self, x):
        return self.classifier(self.body(x).tanh())

class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.skip = nn.Linear(6, 4, bias=False)

    def forward(self, x):
        return self.head(self.body(x)) + self.skip(x)

def number(shape, classes):
    return 3

def greedy(shape, classes, more):
    return None

def failing(shape, classes):
    raise ValueError("no such layer")

ready = nn.Linear(6, 4)
text = "a network"
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A user's folder with a file of networks."""
    (tmp_path / "my_own_networks.py").write_text(OWN)
    (tmp_path / "my_broken_networks.py").write_text("import torch\n1 / 0\n")
    monkeypatch.chdir(tmp_path)
    # Forget modules that were imported from another folder.
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "my_own_networks", raising=False)


@pytest.mark.usefixtures("own")
def test_an_own_network_is_built_with_shape_and_classes():
    net = build_net(Network(net="my_own_networks:sized", head="3"), (6,), 4, seed=0)
    assert net.features_count == 11
    assert net.classes == 4
    assert build_net(Network(net="my_own_networks:Own"), (6,), 4, seed=0).features_count == 5
    first, again = (build_net(Network(net="my_own_networks:Own"), (6,), 4, seed=3).initial for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.usefixtures("own")
def test_an_own_network_may_take_no_arguments():
    net = build_net(Network(net="my_own_networks:fixed"), (6,), 4, seed=0)
    assert net.features_count == 5


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("number", "--net 'my_own_networks:number' must return a torch.nn.Module, got int."),
        ("text", "--net 'my_own_networks:text' must be a function that returns a torch.nn.Module, got str."),
        ("ready", "--net 'my_own_networks:ready' must be a function that returns a torch.nn.Module, got Linear."),
        (
            "greedy",
            "--net 'my_own_networks:greedy' cannot be built: TypeError: greedy() missing 1 required positional"
            " argument: 'more'.",
        ),
        (
            "failing",
            "--net 'my_own_networks:failing' cannot be built: ValueError: no such layer (my_own_networks.py, line 34).",
        ),
        (
            "absent",
            "The network 'my_own_networks:absent' cannot be loaded: my_own_networks has no 'absent'.",
        ),
    ],
)
def test_objects_that_are_not_networks_are_refused(name, sentence):
    assert refusal(Network(net=f"my_own_networks:{name}")) == sentence


@pytest.mark.usefixtures("own")
def test_a_network_with_a_connection_that_bypasses_its_last_layer_has_no_head():
    net = build_net(Network(net="my_own_networks:Skipping"), (6,), 4, seed=0)
    assert not net.head_name
    assert net.no_head == "the output of its last linear layer, 'skip', does not become the logits"
    assert "is not the last submodule that the network calls" in refusal(
        Network(net="my_own_networks:Skipping", head="head")
    )


@pytest.mark.usefixtures("own")
def test_a_network_that_cannot_be_loaded_is_refused_in_one_sentence():
    assert refusal(Network(net="no_such_module:net")) == (
        "The network 'no_such_module:net' cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'."
    )
    assert refusal(Network(net="my_broken_networks:net")) == (
        "The network 'my_broken_networks:net' cannot be loaded: ZeroDivisionError: division by zero"
        " (my_broken_networks.py, line 2)."
    )
    for reference in (":net", "module:", "module"):
        with pytest.raises(BadInput, match="must have the form module:name"):
            load_object(reference, "network")


def test_modules_are_searched_in_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", list(__import__("sys").path))
    (tmp_path / "only_in_this_folder.py").write_text("answer = 42\n")
    monkeypatch.chdir(tmp_path)
    assert load_object("only_in_this_folder:answer", "number") == 42


def test_a_projection_requires_a_built_in_network():
    with pytest.raises(BadInput, match="--projection 4 is for built-in networks only: add it to mine:net itself"):
        Network(net="mine:net", projection=4)
    with pytest.raises(BadInput, match="--projection must be 0 or more, got -1"):
        Network(projection=-1)


@pytest.mark.parametrize(
    "name", [name for name in FOR_DIGITS if name not in ("resnet18", "resnet18-bn", "mobilenet-bn")]
)
def test_built_in_networks_train_the_same_in_both_backends(name, digits):
    local = LocalTraining(epochs=1, batch=6, lr=0.02, drop_incomplete=False)
    states = []
    for backend in ("loop", "stacked"):
        net = build_net(Network(net=name), DIGIT, 10, seed=0)
        simulator = make_simulator(FedAvg(), digits, local, net, backend=backend, rounds=1)
        state = simulator.start()
        simulator.run_round(state)
        states.append(snapshot(state))
    looped, stacked = states
    assert max(float((looped[each] - stacked[each]).abs().max()) for each in looped) < 1e-8
