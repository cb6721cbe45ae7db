"""ResNet, MobileNetV2 and the vision transformer: structure, parameter counts, and shapes that they take."""

import itertools

import pytest
import torch
from torch import nn

from fedrema.errors import BadInput
from fedrema.models.networks import NETWORKS, Network, build_net
from fedrema.models.vision import BasicBlock, InvertedResidual, Patches

CIFAR = (3, 32, 32)


def size(module):
    return sum(value.numel() for value in module.parameters())


def convolution(inputs, outputs, kernel):
    """Return the parameters of a convolution without bias, and of the norm after it."""
    return inputs * outputs * kernel**2 + 2 * outputs


def block(inputs, outputs):
    """Return the parameters of a ResNet block; where the width changes, the shortcut has a convolution."""
    shortcut = convolution(inputs, outputs, 1) if inputs != outputs else 0
    return convolution(inputs, outputs, 3) + convolution(outputs, outputs, 3) + shortcut


def inverted(inputs, outputs, expansion):
    hidden = expansion * inputs
    widening = convolution(inputs, hidden, 1) if expansion > 1 else 0
    return widening + convolution(1, hidden, 3) + convolution(hidden, outputs, 1)


@pytest.mark.parametrize("name", ["resnet8", "resnet8-bn"])
def test_resnet8_has_one_block_per_stage(name):
    wanted = convolution(3, 16, 3) + block(16, 16) + block(16, 32) + block(32, 64) + (64 * 10 + 10)
    assert size(NETWORKS[name](CIFAR, 10)) == wanted == 78_042


@pytest.mark.parametrize("name", ["resnet18", "resnet18-bn"])
def test_resnet18_has_two_blocks_per_stage(name):
    stages = ((64, 64), (64, 64), (64, 128), (128, 128), (128, 256), (256, 256), (256, 512), (512, 512))
    wanted = convolution(3, 64, 3) + sum(block(*stage) for stage in stages) + (512 * 10 + 10)
    assert size(NETWORKS[name](CIFAR, 10)) == wanted == 11_173_962


@pytest.mark.parametrize("name", ["mobilenet", "mobilenet-bn"])
def test_mobilenet_has_the_parameters_of_mobilenet_v2(name):
    widths = [16, *[24] * 2, *[32] * 3, *[64] * 4, *[96] * 3, *[160] * 3, 320]
    blocks = inverted(32, 16, 1) + sum(inverted(*pair, 6) for pair in itertools.pairwise(widths))
    wanted = convolution(3, 32, 3) + blocks + convolution(320, 1280, 1)
    module = NETWORKS[name](CIFAR, 10)
    assert size(module.body) == wanted == 2_223_872
    assert size(module) == wanted + 1280 * 10 + 10 == 2_236_682


def test_vit_has_six_layers_of_width_192():
    attention = (192 * 3 * 192 + 3 * 192) + (192 * 192 + 192)
    layer = attention + (192 * 768 + 768) + (768 * 192 + 192) + 2 * 2 * 192
    wanted = (3 * 16 * 192 + 192) + 64 * 192 + 6 * layer + (192 * 10 + 10)
    assert size(NETWORKS["vit"](CIFAR, 10)) == wanted == 2_692_810


def kinds_of_norm(module):
    return {type(layer) for layer in module.modules() if type(layer) in (nn.GroupNorm, nn.BatchNorm2d)}


@pytest.mark.parametrize("name", ["resnet8", "resnet18", "mobilenet"])
def test_group_norm_has_8_groups_and_bn_replaces_it(name):
    plain, batch_norm = (NETWORKS[each](CIFAR, 10) for each in (name, f"{name}-bn"))
    assert kinds_of_norm(plain) == {nn.GroupNorm}
    assert {layer.num_groups for layer in plain.modules() if isinstance(layer, nn.GroupNorm)} == {8}
    assert kinds_of_norm(batch_norm) == {nn.BatchNorm2d}
    assert [value.shape for value in plain.parameters()] == [value.shape for value in batch_norm.parameters()]


@pytest.mark.parametrize(
    ("name", "heights"),
    [
        ("resnet8", [32, 16, 8]),
        ("resnet18", [32, 32, 16, 16, 8, 8, 4, 4]),
        ("mobilenet", [*[32] * 3, *[16] * 3, *[8] * 7, *[4] * 4]),
    ],
)
def test_strides_fit_images_of_32_pixels(name, heights):
    seen = []
    module = NETWORKS[name](CIFAR, 10)
    for layer in module.body:
        if isinstance(layer, (BasicBlock, InvertedResidual)):
            layer.register_forward_hook(lambda _, given, output: seen.append(output.shape[2]))
    module(torch.zeros(1, *CIFAR))
    assert seen == heights


def with_ones(module):
    """Set the weights of all convolutions to one."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.ones_(layer.weight)
    return module


def no_norm(channels):
    return nn.Identity()


def test_a_block_adds_its_input():
    x = torch.tensor([[[[1.0]], [[2.0]]]])
    # Both channels: 3 after the first convolution, 6 after the second; the input is added.
    assert with_ones(BasicBlock(2, 2, 1, no_norm))(x).flatten().tolist() == [7, 8]
    # Three channels: 9 after the second convolution; the shortcut's convolution adds 3.
    assert with_ones(BasicBlock(2, 3, 1, no_norm))(x).flatten().tolist() == [12, 12, 12]
    assert with_ones(BasicBlock(2, 2, 1, no_norm))(-x).flatten().tolist() == [0, 0]


def test_an_inverted_residual_is_linear_at_its_end_and_adds_its_input():
    x = torch.tensor([[[[-1.0]], [[2.0]]]])
    # Each of 4 hidden channels is 1; the sum of 4 is added to the input without an activation.
    assert with_ones(InvertedResidual(2, 2, 1, 2, no_norm))(x).flatten().tolist() == [3, 6]
    # 20 is clipped to 6 by ReLU6 in each hidden channel; a different width has no shortcut.
    assert with_ones(InvertedResidual(2, 1, 1, 2, no_norm))(10 * x + 5).flatten().tolist() == [24]
    assert with_ones(InvertedResidual(2, 2, 2, 2, no_norm))(x).flatten().tolist() == [4, 4]


def test_patches_are_read_row_by_row():
    patches = Patches(1, 1, 4)
    nn.init.ones_(patches.embedding.weight)
    nn.init.zeros_(patches.embedding.bias)
    image = torch.zeros(1, 1, 8, 12)
    image[0, 0, 0, 4] = 5  # the second patch of the first row
    image[0, 0, 7, 0] = 7  # the first patch of the second row
    assert patches(image).squeeze().tolist() == [0, 5, 0, 7, 0, 0]


def test_vit_knows_where_a_patch_is_by_the_learnt_positions_only():
    torch.manual_seed(0)
    module = NETWORKS["vit"]((1, 4, 8), 3).eval()
    image = torch.randn(2, 1, 4, 8)
    swapped = image.roll(4, dims=3)
    with torch.no_grad():
        assert not torch.allclose(module(image), module(swapped), atol=1e-4)
        module.get_parameter("body.1.positions").zero_()
        torch.testing.assert_close(module(image), module(swapped), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(3, 30, 32), (1, 8, 6)])
def test_vit_needs_whole_patches(shape):
    with pytest.raises(BadInput) as caught:
        build_net(Network(net="vit"), shape, 10, seed=0)
    assert str(caught.value) == (
        f"--net vit cannot take samples of shape {shape}: height and width must be multiples of 4, the size of a patch."
    )


@pytest.mark.parametrize("name", ["resnet8", "mobilenet", "vit", "mobilenet-bn"])
@pytest.mark.parametrize("shape", [(1, 28, 28), (2, 8, 12), (3, 4, 4)])
def test_images_may_have_any_channels_and_sizes(name, shape):
    assert build_net(Network(net=name), shape, 5, seed=0).classes == 5
