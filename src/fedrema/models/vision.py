"""Networks for small images [channels, height, width]: ResNet, MobileNetV2 and a vision transformer.

Group norm is the default, because batch statistics differ between clients; `-bn` variants have batch norm.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from fedrema.errors import BadInput
from fedrema.models.heads import Shape, with_linear_head
from fedrema.models.sequence import TokenEncoder

Norm = Callable[[int], nn.Module]
"""Returns a normalisation layer for a number of channels."""
GROUPS = 8
"""Groups of group norm; they divide the channels of every layer below."""


def group_norm(channels: int) -> nn.Module:
    """Return group norm with 8 groups."""
    return nn.GroupNorm(GROUPS, channels)


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut, which is a 1×1 convolution if the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False), norm(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False), norm(outputs),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both paths, after ReLU."""
        activated: Tensor = self.activation(self.residual(x) + self.shortcut(x))
        return activated


def resnet8(shape: Shape, classes: int, projection: int = 0, norm: Norm = group_norm) -> nn.Module:
    """Return ResNet-8: the CIFAR ResNet of He et al. (6n + 2 layers) with n = 1.

    A 3×3 convolution with 16 channels, one block each with 16, 32 and 64 channels, and a linear head. Its shortcuts are
    1×1 convolutions where the shape changes.
    """
    return _resnet(shape, classes, projection, norm, widths=(16, 32, 64), blocks=1)


def resnet18(shape: Shape, classes: int, projection: int = 0, norm: Norm = group_norm) -> nn.Module:
    """Return ResNet-18 for small images: a 3×3 instead of a 7×7 first convolution, and no max-pooling."""
    return _resnet(shape, classes, projection, norm, widths=(64, 128, 256, 512), blocks=2)


def _resnet(shape: Shape, classes: int, projection: int, norm: Norm, widths: tuple[int, ...], blocks: int) -> nn.Module:
    """Return a ResNet with stages of these widths; every stage but the first halves height and width."""
    channels = widths[0]
    body = nn.Sequential(nn.Conv2d(shape[0], channels, 3, padding=1, bias=False), norm(channels), nn.ReLU())
    for stage, width in enumerate(widths):
        for number in range(blocks):
            stride = 2 if stage > 0 and number == 0 else 1
            body.append(BasicBlock(channels, width, stride, norm))
            channels = width
    body.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten()])
    return with_linear_head(body, channels, projection, classes)


class InvertedResidual(nn.Module):
    """A 1×1 convolution that widens, a 3×3 convolution of each channel, and a linear 1×1 convolution that narrows."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int, norm: Norm) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.layers = nn.Sequential()
        if expansion > 1:
            self.layers.extend([nn.Conv2d(inputs, hidden, 1, bias=False), norm(hidden), nn.ReLU6()])
        self.layers.extend([
            nn.Conv2d(hidden, hidden, 3, stride, padding=1, groups=hidden, bias=False), norm(hidden), nn.ReLU6(),
            nn.Conv2d(hidden, outputs, 1, bias=False), norm(outputs),
        ])  # fmt: skip
        self.adds_input = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """Return the narrow output, added to the input if both have the same shape."""
        narrow: Tensor = self.layers(x)
        return x + narrow if self.adds_input else narrow


MOBILENET_STAGES = (
    (1, 16, 1, 1), (6, 24, 2, 1), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
)  # fmt: skip
"""Expansion, channels, blocks and stride of each stage: table 2 of the MobileNetV2 paper, but stride 1 in the second
stage."""
MOBILENET_FEATURES = 1280


def mobilenet(shape: Shape, classes: int, projection: int = 0, norm: Norm = group_norm) -> nn.Module:
    """Return MobileNetV2 of width 1.0 for small images: the first convolution and the second stage have stride 1."""
    channels = 32
    body = nn.Sequential(nn.Conv2d(shape[0], channels, 3, padding=1, bias=False), norm(channels), nn.ReLU6())
    for expansion, width, blocks, first_stride in MOBILENET_STAGES:
        for number in range(blocks):
            stride = first_stride if number == 0 else 1
            body.append(InvertedResidual(channels, width, stride, expansion, norm))
            channels = width
    body.extend([
        nn.Conv2d(channels, MOBILENET_FEATURES, 1, bias=False), norm(MOBILENET_FEATURES), nn.ReLU6(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(),
    ])  # fmt: skip
    return with_linear_head(body, MOBILENET_FEATURES, projection, classes)


VIT_PATCH, VIT_WIDTH, VIT_DEPTH, VIT_HEADS = 4, 192, 6, 3


class Patches(nn.Module):
    """A linear embedding of the patches of an image."""

    def __init__(self, channels: int, width: int, patch: int) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(channels, width, patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        """Return one token per patch, [n, patches, width]."""
        embedded: Tensor = self.embedding(images)
        return embedded.flatten(2).transpose(1, 2)


def vit(shape: Shape, classes: int, projection: int = 0) -> nn.Module:
    """Return a vision transformer: patches of 4×4, 6 layers of width 192, 3 attention heads, mean over the patches."""
    channels, height, width = shape
    if height % VIT_PATCH or width % VIT_PATCH:
        raise BadInput(
            f"--net vit cannot take samples of shape {shape}: height and width must be multiples of {VIT_PATCH},"
            " the size of a patch."
        )
    tokens = (height // VIT_PATCH) * (width // VIT_PATCH)
    body = nn.Sequential(Patches(channels, VIT_WIDTH, VIT_PATCH), TokenEncoder(tokens, VIT_WIDTH, VIT_DEPTH, VIT_HEADS))
    return with_linear_head(body, VIT_WIDTH, projection, classes)


IMAGE_NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "resnet8": resnet8,
    "resnet18": resnet18,
    "mobilenet": mobilenet,
    "vit": vit,
    "resnet8-bn": partial(resnet8, norm=nn.BatchNorm2d),
    "resnet18-bn": partial(resnet18, norm=nn.BatchNorm2d),
    "mobilenet-bn": partial(mobilenet, norm=nn.BatchNorm2d),
}
