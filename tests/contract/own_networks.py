"""Small networks as people write them, by name: `NETWORKS[name]()` returns the module and the shape of a sample."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

VECTOR, IMAGE, SIGNAL, VOLUME, STEPS, TOKENS = (6,), (2, 6, 6), (2, 12), (1, 4, 4, 4), (5, 3), (7,)
CLASSES = 4


class Forward(nn.Module):
    """Modules by name, and a function of them and the input."""

    def __init__(self, forward: Callable[["Forward", Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


def convolution(*after: nn.Module, flatten: Callable[[Tensor], Tensor], head: str = "fc") -> nn.Module:
    """Return a convolution, some layers and a linear one."""

    def forward(net: Forward, x: Tensor) -> Tensor:
        return getattr(net, head)(flatten(net.after(functional.relu(net.conv(x)))))

    return Forward(forward, conv=nn.Conv2d(2, 4, 3), after=nn.Sequential(*after), **{head: nn.Linear(64, CLASSES)})


class Tied(nn.Module):
    """Two layers of the body with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.fc = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, CLASSES)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.second(torch.tanh(self.first(x)))))


class TiedHead(nn.Module):
    """An embedding whose weight is the classifier's, as in language models."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.output = nn.Embedding(CLASSES, 5), nn.Linear(5, CLASSES)
        self.output.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.output(torch.tanh(self.table(x % CLASSES)).mean(dim=1))


class Buffers(nn.Module):
    """A float buffer and an integer one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, CLASSES)
        self.register_buffer("mean", torch.full((6,), 0.1))
        self.register_buffer("order", torch.arange(5, -1, -1))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc((x - self.mean)[:, self.order])


class Parameters(nn.Module):
    """Parameters of the module itself, without a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.randn(6, CLASSES)), nn.Parameter(torch.ones(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight) * self.scale


class Recurrent(nn.Module):
    """A recurrent layer, of which the last output is classified."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn, self.fc = kind(3, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.rnn(x)
        return self.fc(outputs[:, -1])


class Attention(nn.Module):
    """Attention over steps, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.attention = nn.Linear(3, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return self.head(x.mean(dim=1))


class DependsOnData(nn.Module):
    """Control flow that depends on values, which vmap cannot run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.fc = nn.Linear(6, 5), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = torch.tanh(x) if float(x.detach().mean()) > 0 else torch.sigmoid(x)
        return self.fc(x)


def nested_head() -> nn.Module:
    return Forward(
        lambda net, x: net.classifier(net.base(x)).squeeze(-1),
        base=nn.Sequential(nn.Linear(6, 5), nn.Tanh()),
        classifier=nn.Sequential(nn.Dropout(0.0), nn.Linear(5, CLASSES), nn.Unflatten(1, (CLASSES, 1))),
    )


def mlp(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), *layers, nn.Linear(5, CLASSES))


def images(*layers: nn.Module) -> nn.Module:
    return convolution(*layers, flatten=lambda x: torch.flatten(x, 1))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "sequential": (lambda: mlp(nn.Tanh()), VECTOR),
    "linear": (lambda: nn.Linear(6, CLASSES), VECTOR),
    "in place": (lambda: mlp(nn.LayerNorm(5), nn.ReLU(inplace=True)), VECTOR),
    "view": (lambda: convolution(flatten=lambda x: x.view(x.size(0), -1)), IMAGE),
    "reshape": (lambda: convolution(flatten=lambda x: x.reshape(len(x), -1)), IMAGE),
    "functional": (lambda: convolution(flatten=lambda x: functional.dropout(x, 0.0).flatten(1), head="out"), IMAGE),
    "tied in the body": (Tied, VECTOR),
    "tied head": (TiedHead, TOKENS),
    "weight norm": (lambda: mlp(nn.Tanh(), parametrizations.weight_norm(nn.Linear(5, 5)), nn.Tanh()), VECTOR),
    "weight norm of the head": (
        lambda: nn.Sequential(nn.Tanh(), parametrizations.weight_norm(nn.Linear(6, CLASSES))),
        VECTOR,
    ),
    "buffers": (Buffers, VECTOR),
    "parameters": (Parameters, VECTOR),
    "batch norm": (lambda: mlp(nn.BatchNorm1d(5), nn.ReLU()), VECTOR),
    "batch norm of images": (lambda: images(nn.BatchNorm2d(4)), IMAGE),
    "group norm": (lambda: images(nn.GroupNorm(2, 4)), IMAGE),
    "instance norm": (lambda: images(nn.InstanceNorm2d(4, affine=True)), IMAGE),
    "layer norm": (lambda: mlp(nn.LayerNorm(5), nn.GELU()), VECTOR),
    "dropout": (lambda: mlp(nn.Tanh(), nn.Dropout(0.3)), VECTOR),
    "dropout of channels": (lambda: images(nn.Dropout2d(0.3)), IMAGE),
    "alpha dropout": (lambda: mlp(nn.SELU(), nn.AlphaDropout(0.3)), VECTOR),
    "rrelu": (lambda: mlp(nn.RReLU()), VECTOR),
    "rnn": (lambda: Recurrent(nn.RNN), STEPS),
    "lstm": (lambda: Recurrent(nn.LSTM), STEPS),
    "gru": (lambda: Recurrent(nn.GRU), STEPS),
    "attention": (Attention, STEPS),
    "embedding": (lambda: nn.Sequential(nn.EmbeddingBag(CLASSES, 5), nn.Linear(5, CLASSES)), TOKENS),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(2, 2, 2), nn.Flatten(), nn.Linear(98, CLASSES)), IMAGE),
    "1-d convolution": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(30, CLASSES)),
        SIGNAL,
    ),
    "3-d convolution": (
        lambda: nn.Sequential(nn.Conv3d(1, 2, 2), nn.Tanh(), nn.Flatten(), nn.Linear(54, CLASSES)),
        VOLUME,
    ),
    "1×1 convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(2, 5, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Conv2d(5, CLASSES, 1), nn.Flatten()
        ),
        IMAGE,
    ),
    "average of maps": (lambda: nn.Sequential(nn.Conv2d(2, CLASSES, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()), IMAGE),
    "lazy": (lambda: nn.Sequential(nn.LazyConv2d(3, 3), nn.Tanh(), nn.Flatten(), nn.LazyLinear(CLASSES)), IMAGE),
    "nested head": (nested_head, VECTOR),
    "two heads": (
        lambda: Forward(
            lambda net, x: net.one(x) + net.two(torch.tanh(x)), one=nn.Linear(6, CLASSES), two=nn.Linear(6, CLASSES)
        ),
        VECTOR,
    ),
    "residual": (
        lambda: Forward(
            lambda net, x: net.fc(x + torch.tanh(net.inner(x))), inner=nn.Linear(6, 6), fc=nn.Linear(6, CLASSES)
        ),
        VECTOR,
    ),
    "log softmax": (
        lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, CLASSES), nn.LogSoftmax(dim=1)),
        VECTOR,
    ),
    "scaled": (
        lambda: Forward(
            lambda net, x: 2.5 * net.last(torch.tanh(net.first(x))), first=nn.Linear(6, 5), last=nn.Linear(5, CLASSES)
        ),
        VECTOR,
    ),
    "called twice": (
        lambda: Forward(
            lambda net, x: net.fc(torch.tanh(net.inner(torch.tanh(net.inner(x))))),
            inner=nn.Linear(6, 6),
            fc=nn.Linear(6, CLASSES),
        ),
        VECTOR,
    ),
    "head called twice": (
        lambda: Forward(lambda net, x: net.fc(x[:, :3]) + net.fc(x[:, 3:]), fc=nn.Linear(3, CLASSES)),
        VECTOR,
    ),
    "control flow": (DependsOnData, VECTOR),
}

NO_HEAD = {"linear", "tied head", "parameters", "average of maps", "two heads", "head called twice"}
"""Networks that methods with a head of their own refuse."""
RANDOM = {"dropout", "dropout of channels", "alpha dropout", "rrelu"}
"""Networks that draw random numbers in training, so that PyTorch's own draws differ."""
