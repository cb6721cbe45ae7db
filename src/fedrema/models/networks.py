"""The paper's networks, a small one for tables and digits, and users' own as `module:function`."""

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedrema.base.memory import check_fits
from fedrema.base.random import seed_of
from fedrema.base.user_code import load_object, raised_at, working_folder_importable
from fedrema.errors import BadInput, at_least
from fedrema.models.body_and_head import BodyAndHead, Net

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Network:
    """The network that every client trains."""

    net: str = "auto"
    """Network: mlp, cnn or alexnet (the latter two are the paper's); mlp-bn, cnn-bn or alexnet-bn with batch
    normalisation; your own as module:function; auto chooses by the shape of a sample."""
    head: str | None = None
    """Name of the submodule of your own network that is the classifier. Default: head, classifier or fc."""
    hidden: int = 32
    """Number of hidden units of the mlp."""
    projection: int = 0
    """Width of a two-layer projection between body and classifier, as in MOON's released code; 0: none."""

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(1, self, "hidden")
        at_least(0, self, "projection")
        if self.projection and ":" in self.net:
            raise BadInput(
                f"--projection {self.projection} is for mlp, cnn and alexnet only: add it to {self.net} itself."
            )


def mlp(shape: Shape, classes: int, hidden: int = 32, projection: int = 0) -> nn.Module:
    """Return a network with one hidden layer as the body and one linear layer as the head."""
    inputs = int(torch.Size(shape).numel())
    _check_size(f"--hidden {hidden}", inputs, hidden)
    body = nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU())
    return _with_head("mlp", body, shape, projection, (classes,), lambda features: nn.Linear(features, classes))


def cnn(shape: Shape, classes: int, projection: int = 0) -> nn.Module:
    """Return the paper's network for MNIST and Fashion-MNIST: two 5×5 convolutions, then two linear layers."""
    body = nn.Sequential(
        nn.Conv2d(shape[0], 32, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
    )  # fmt: skip
    return _with_head(
        "cnn", body, shape, projection, (512, classes),
        lambda features: nn.Sequential(nn.Linear(features, 512), nn.ReLU(), nn.Linear(512, classes)),
    )  # fmt: skip


def alexnet(shape: Shape, classes: int, projection: int = 0) -> nn.Module:
    """Return the paper's network for CIFAR-10: five 3×3 convolutions, and three linear layers without activations."""
    body = nn.Sequential(
        nn.Conv2d(shape[0], 32, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.Conv2d(128, 256, 3, padding=1),
        nn.Conv2d(256, 256, 3, padding=1), nn.MaxPool2d(3, 2), nn.ReLU(),
        nn.Flatten(),
    )  # fmt: skip
    return _with_head(
        "alexnet", body, shape, projection, (1024, 512, classes),
        lambda features: nn.Sequential(nn.Linear(features, 1024), nn.Linear(1024, 512), nn.Linear(512, classes)),
    )  # fmt: skip


COPIES_IN_MEMORY = 4
"""Copies of a network in memory before training: the module, the whole, the body with its head, the initial values."""


def _check_size(what: str, *widths: int) -> None:
    """Raise `BadInput` if consecutive linear layers of these widths do not fit into memory."""
    numbers = sum((inputs + 1) * outputs for inputs, outputs in itertools.pairwise(widths))
    check_fits(COPIES_IN_MEMORY * 4 * numbers, f"A network with {what} needs")


def _with_head(
    name: str, body: nn.Sequential, shape: Shape, projection: int, widths: Shape, head: Callable[[int], nn.Module]
) -> nn.Module:
    """Return a body with a head whose layers have these widths, after a two-layer projection if requested."""
    try:
        with torch.no_grad():
            features = int(body(torch.zeros(1, *shape)).shape[1])
    except RuntimeError as error:
        raise BadInput(
            f"--net {name} cannot take samples of shape {shape}: use --net mlp or your own network."
        ) from error
    projected = (features, projection) if projection else ()
    _check_size(f"--projection {projection} and {widths[-1]} classes", features, *projected, *widths)
    if projection:
        body.extend([nn.Linear(features, features), nn.ReLU(), nn.Linear(features, projection)])
    return BodyAndHead(body, head(projection or features))


def with_batch_norm(network: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Return a function that builds a network with batch norm after every convolution and linear layer of its body."""

    def build(*arguments: Any, **options: Any) -> nn.Module:
        module = network(*arguments, **options)
        layers: list[nn.Module] = []
        for layer in module.get_submodule("body").children():
            layers.append(layer)
            if isinstance(layer, nn.Conv2d):
                layers.append(nn.BatchNorm2d(layer.out_channels))
            elif isinstance(layer, nn.Linear):
                layers.append(nn.BatchNorm1d(layer.out_features))
        return BodyAndHead(nn.Sequential(*layers), module.get_submodule("head"))

    return build


_WITHOUT_BATCH_NORM: dict[str, Callable[..., nn.Module]] = {"mlp": mlp, "cnn": cnn, "alexnet": alexnet}
NETWORKS = {
    **_WITHOUT_BATCH_NORM,
    **{f"{name}-bn": with_batch_norm(network) for name, network in _WITHOUT_BATCH_NORM.items()},
}


def build_net(settings: Network, shape: Shape, classes: int, seed: int) -> Net:
    """Build a network, with initial weights drawn from the training seed.

    A user's own function is called as `function(shape, classes)`, or without arguments if it takes none.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(seed, "initial weights"))
        module = _module(settings, shape, classes)
    return Net(module, torch.zeros(2, *shape), settings.head)


def _module(settings: Network, shape: Shape, classes: int) -> nn.Module:
    name = settings.net
    if name == "auto":
        # The paper's networks fit the sizes of its images; other data are tables or small images.
        name = "alexnet" if shape[1:] == (32, 32) else "cnn" if shape[1:] == (28, 28) else "mlp"
    if name in ("mlp", "mlp-bn"):
        return NETWORKS[name](shape, classes, settings.hidden, settings.projection)
    if name in NETWORKS:
        if len(shape) != 3:
            raise BadInput(
                f"--net {name} takes images [channels, height, width], not samples of shape {shape}: use --net mlp."
            )
        return NETWORKS[name](shape, classes, projection=settings.projection)
    if ":" not in name:
        raise BadInput(
            f"--net {name!r} is unknown; valid are auto, {', '.join(NETWORKS)}, or your own as module:function."
        )
    return own_module(name, shape, classes)[0]


def own_module(name: str, shape: Shape, classes: int) -> tuple[nn.Module, str]:
    """Return the network that a user's `module:function` builds, and the text of the call."""
    function = load_object(name, "network")
    if not callable(function) or isinstance(function, nn.Module):
        kind = type(function).__name__
        raise BadInput(f"--net {name!r} must be a function that returns a torch.nn.Module, got {kind}.")
    with working_folder_importable():
        try:
            arguments = (shape, classes) if inspect.signature(function).parameters else ()
            module = function(*arguments)
        except (Exception, SystemExit) as error:  # any error of the user's function is reported in one sentence
            raise BadInput(f"--net {name!r} cannot be built: {raised_at(error)}.") from error
    if not isinstance(module, nn.Module):
        raise BadInput(f"--net {name!r} must return a torch.nn.Module, got {type(module).__name__}.")
    return module, f"{name.partition(':')[2]}({', '.join(map(repr, arguments))})"
