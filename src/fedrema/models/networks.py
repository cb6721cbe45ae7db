"""All built-in networks by name, among them the paper's and a small one for tables; users' own as `module:function`."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fedrema.base.options import option
from fedrema.base.random import seed_of
from fedrema.base.user_code import load_object, raised_at, working_folder_importable
from fedrema.errors import BadInput, at_least
from fedrema.models.body_and_head import BodyAndHead, Net
from fedrema.models.head_search import materialised
from fedrema.models.heads import Shape as Shape
from fedrema.models.heads import check_size, with_head, with_linear_head
from fedrema.models.sequence import SEQUENCE_NETWORKS
from fedrema.models.tabular import EmbedColumns
from fedrema.models.vision import IMAGE_NETWORKS


@dataclass(frozen=True)
class Network:
    """The network that every client trains."""

    net: str = "auto"
    """Network: mlp, cnn or alexnet (the latter two are the paper's); for images also resnet8, resnet18, mobilenet or
    vit; for sequences lstm, gru or transformer; with batch normalisation mlp-bn, cnn-bn, alexnet-bn, resnet8-bn,
    resnet18-bn or mobilenet-bn; your own as module:function; auto chooses by the shape of a sample."""
    head: str | None = None
    """Name of the submodule of your own network that is the classifier. Default: found by running the network."""
    hidden: int = 32
    """Number of hidden units of the mlp."""
    projection: int = 0
    """Width of a two-layer projection between body and classifier, as in MOON's released code; 0: none."""
    embed: str = option("", added=True)
    """Number of category codes of each column of a table, for the embeddings of the mlp; 0 is a column of numbers.
    Default: chosen from the data, if --categories embed is used."""

    def __post_init__(self) -> None:
        """Validate the settings."""
        at_least(1, self, "hidden", most=None)  # a network that is too large is refused with its memory
        at_least(0, self, "projection", most=None)
        if not all(each.strip().isdigit() for each in self.embed.split(",") if self.embed):
            raise BadInput(f"--embed {self.embed!r} must be whole numbers separated by commas.")
        if self.projection and ":" in self.net:
            raise BadInput(
                f"--projection {self.projection} is for built-in networks only: add it to {self.net} itself."
            )

    @property
    def embedded(self) -> tuple[int, ...]:
        """The numbers in `embed`."""
        return tuple(int(each) for each in self.embed.split(",")) if self.embed else ()


def mlp(shape: Shape, classes: int, hidden: int = 32, projection: int = 0, embed: tuple[int, ...] = ()) -> nn.Module:
    """Return a network with one hidden layer as the body and one linear layer as the head.

    `embed` gives the number of category codes of each column of a table; 0 is a column of numbers.
    """
    inputs = int(torch.Size(shape).numel())
    first: nn.Module = nn.Flatten()
    if embed:
        if shape != (len(embed),):
            raise BadInput(f"--embed describes {len(embed)} columns, but a sample has the shape {shape}.")
        first = EmbedColumns(embed)
        inputs = first.width
    check_size(f"--hidden {hidden}", inputs, hidden)
    body = nn.Sequential(first, nn.Linear(inputs, hidden), nn.ReLU())
    return with_linear_head(body, hidden, projection, classes)


def cnn(shape: Shape, classes: int, projection: int = 0) -> nn.Module:
    """Return the paper's network for MNIST and Fashion-MNIST: two 5×5 convolutions, then two linear layers.

    The paper takes the ReLU before pooling. After it, outputs and gradients are the same, of a quarter of the values.
    """
    body = nn.Sequential(
        nn.Conv2d(shape[0], 32, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Conv2d(32, 64, 5), nn.MaxPool2d(2), nn.ReLU(),
        nn.Flatten(),
    )  # fmt: skip
    return with_head(
        body, _features("cnn", body, shape), projection, (512, classes),
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
    return with_head(
        body, _features("alexnet", body, shape), projection, (1024, 512, classes),
        lambda features: nn.Sequential(nn.Linear(features, 1024), nn.Linear(1024, 512), nn.Linear(512, classes)),
    )  # fmt: skip


def _features(name: str, body: nn.Module, shape: Shape) -> int:
    """Return the number of features that a body extracts from a sample."""
    try:
        with torch.no_grad():
            return int(body(torch.zeros(1, *shape)).shape[1])
    except RuntimeError as error:
        raise BadInput(
            f"--net {name} cannot take samples of shape {shape}: use --net mlp or your own network."
        ) from error


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


NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "mlp": mlp,
    "cnn": cnn,
    "alexnet": alexnet,
    "mlp-bn": with_batch_norm(mlp),
    "cnn-bn": with_batch_norm(cnn),
    "alexnet-bn": with_batch_norm(alexnet),
    **IMAGE_NETWORKS,
    **SEQUENCE_NETWORKS,
}
"""Built-in networks by name: functions of a sample's shape, the number of classes and `projection`."""


def build_net(settings: Network, shape: Shape, classes: int, seed: int) -> Net:
    """Build a network, with initial weights drawn from the training seed.

    A user's own function is called as `function(shape, classes)`, or without arguments if it takes none.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_of(seed, "initial weights"))
        module = materialised(_module(settings, shape, classes), torch.zeros(2, *shape))
    return Net(module, torch.zeros(2, *shape), settings.head)


def _module(settings: Network, shape: Shape, classes: int) -> nn.Module:
    name = settings.net
    if name == "auto":
        # The paper's networks fit the sizes of its images; other data are tables or small images.
        name = "alexnet" if shape[1:] == (32, 32) else "cnn" if shape[1:] == (28, 28) else "mlp"
    if name in ("mlp", "mlp-bn"):
        return NETWORKS[name](shape, classes, settings.hidden, settings.projection, settings.embedded)
    if settings.embed:
        raise BadInput(f"--net {name} takes no columns of category codes: use --net mlp, or --categories onehot.")
    if name in NETWORKS:
        if len(shape) != 3 and name not in SEQUENCE_NETWORKS:
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
