"""LSTM, GRU and transformer: structure, parameter counts, and shapes that they take."""

import pytest
import torch
from torch import nn

from fedrema.errors import BadInput
from fedrema.models.networks import NETWORKS, Network, build_net
from fedrema.models.sequence import Rows, TokenEncoder

SEQUENCES = (32, 96)


def size(name, shape):
    return sum(value.numel() for value in NETWORKS[name](shape, 10).parameters())


@pytest.mark.parametrize("shape", [SEQUENCES, (3, 32, 32)])
def test_recurrent_networks_have_one_layer_of_128_units(shape):
    gate, head = 128 * (96 + 128 + 2), 128 * 10 + 10
    assert size("lstm", shape) == 4 * gate + head == 117_002
    assert size("gru", shape) == 3 * gate + head == 88_074


@pytest.mark.parametrize("shape", [SEQUENCES, (3, 32, 32)])
def test_the_transformer_has_two_layers_of_width_128(shape):
    attention = (128 * 3 * 128 + 3 * 128) + (128 * 128 + 128)
    layer = attention + (128 * 512 + 512) + (512 * 128 + 128) + 2 * 2 * 128
    wanted = (96 * 128 + 128) + 32 * 128 + 2 * layer + (128 * 10 + 10)
    assert size("transformer", shape) == wanted == 414_346


def test_an_image_is_read_row_by_row():
    image = torch.arange(12.0).reshape(1, 2, 3, 2)  # two channels, three rows of two pixels
    assert Rows()(image).tolist() == [[[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]]


@pytest.mark.parametrize(("name", "kind"), [("lstm", nn.LSTM), ("gru", nn.GRU)])
def test_the_features_are_the_output_after_the_last_step(name, kind):
    module = NETWORKS[name]((7, 5), 3)
    recurrent = module.body[-1].recurrent
    assert type(recurrent) is kind
    steps = torch.randn(4, 7, 5)
    _, last = recurrent(steps)
    torch.testing.assert_close(module.body(steps), (last[0] if name == "lstm" else last)[0])


def test_every_layer_of_a_transformer_has_its_own_initial_weights():
    first, second = TokenEncoder(tokens=3, width=8, depth=2, heads=2).encoder.layers
    assert not torch.equal(first.linear1.weight, second.linear1.weight)
    assert not torch.equal(first.self_attn.in_proj_weight, second.self_attn.in_proj_weight)


def test_a_transformer_of_two_layers_is_two_layers_one_after_the_other():
    encoder = TokenEncoder(tokens=3, width=8, depth=2, heads=2)
    tokens = torch.randn(5, 3, 8)
    first, second = encoder.encoder.layers
    assert first.norm_first
    assert first.linear1.out_features == 32
    torch.testing.assert_close(encoder(tokens), second(first(tokens + encoder.positions)).mean(dim=1))


@pytest.mark.parametrize("name", ["lstm", "gru", "transformer"])
@pytest.mark.parametrize("shape", [(6,), (2, 3, 4, 5)])
def test_samples_that_are_neither_sequences_nor_images_are_refused(name, shape):
    with pytest.raises(BadInput) as caught:
        build_net(Network(net=name), shape, 10, seed=0)
    assert str(caught.value) == (
        f"--net {name} takes sequences [time, features] or images [channels, height, width], not samples of shape"
        f" {shape}: use --net mlp."
    )
