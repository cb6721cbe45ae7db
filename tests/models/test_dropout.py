"""Dropout with keyed masks: the generator, and the four kinds of dropout by hand."""

import math

import pytest
import torch

from fedrema.base.random import random_integers, step_keys
from fedrema.errors import BadInput
from fedrema.models.attention import attention
from fedrema.models.dropout import alpha_dropout, checked, dropout, feature_dropout, kept

KEY = torch.tensor(0x0123456789ABCDEF)


def hashed(value: int) -> int:
    """Return the 32-bit hash, written out with Python's integers."""
    value ^= value >> 16
    value = value * 0x7FEB352D & 0xFFFFFFFF
    value ^= value >> 15
    value = value * 0x846CA68B & 0xFFFFFFFF
    return value ^ value >> 16


def finalised(value: int) -> int:
    """Return the finaliser of SplitMix64."""
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & 2**64 - 1
    value = (value ^ value >> 27) * 0x94D049BB133111EB & 2**64 - 1
    return value ^ value >> 31


@pytest.mark.parametrize("key", [0, 1, 0x0123456789ABCDEF, -1, -(2**63)])
@pytest.mark.parametrize("draw", [1, 2, 77])
def test_integers_are_the_hash_of_key_draw_and_position(key, draw):
    mixed = (key % 2**64) ^ finalised(draw * 0x9E3779B97F4A7C15 & 2**64 - 1)
    low, high = mixed & 0xFFFFFFFF, mixed >> 32
    expected = [hashed((hashed(position ^ low) + high) & 0xFFFFFFFF) & 0xFFFFFF for position in range(50)]
    assert random_integers(torch.tensor(key), draw, 50).tolist() == expected


def test_splitmix64_has_its_published_values():
    # The first two outputs of the generator with seed 0.
    assert finalised(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    assert finalised(2 * 0x9E3779B97F4A7C15 & 2**64 - 1) == 0x6E789E6AA1B965F4


def test_keys_of_steps_are_those_of_splitmix64():
    keys, other = step_keys([0, 12345], 4)
    assert keys.dtype == "int64"
    assert keys[:2].view("uint64").tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    assert other.view("uint64").tolist() == [
        finalised(12345 + n * 0x9E3779B97F4A7C15 & 2**64 - 1) for n in (1, 2, 3, 4)
    ]
    assert keys[:2].tolist() == step_keys([0], 2)[0].tolist()
    assert len({*keys.tolist(), *other.tolist()}) == 8


def test_integers_are_uniform_and_independent():
    count = 200_000
    first, second = random_integers(KEY, 1, count).double(), random_integers(KEY, 2, count).double()
    other = random_integers(KEY + 1, 1, count).double()
    observed = torch.histc(first, 64, 0, 2**24)
    chi_squared = float(((observed - count / 64) ** 2 / (count / 64)).sum())
    assert 63 - 5 * math.sqrt(126) < chi_squared < 63 + 5 * math.sqrt(126)
    bound = 5 / math.sqrt(count)
    for one, two in ((first, second), (first, other), (first[1:], first[:-1]), (first[2:], first[:-2])):
        assert abs(float(torch.corrcoef(torch.stack([one, two]))[0, 1])) < bound
    for bit in range(24):
        share = float((first.long() >> bit & 1).double().mean())
        assert abs(share - 0.5) < 2.5 / math.sqrt(count)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_a_share_of_p_is_dropped_and_the_mean_is_kept(p):
    x = torch.ones(400, 500, dtype=torch.float64)
    y = dropout(x, p, KEY, 1)
    assert y.unique().tolist() == pytest.approx([0.0, 1 / (1 - p)])
    assert float(y.mean()) == pytest.approx(1, abs=5 * math.sqrt(p / (1 - p) / x.numel()))


def test_nothing_is_dropped_with_probability_0_and_everything_with_1():
    x = torch.randn(4, 5)
    assert torch.equal(dropout(x, 0.0, KEY, 1), x)
    assert torch.equal(dropout(x, 1.0, KEY, 1), torch.zeros(4, 5))
    assert torch.equal(alpha_dropout(x, 1.0, KEY, 1), torch.zeros(4, 5))


def test_padding_at_the_end_does_not_change_the_mask():
    assert torch.equal(dropout(torch.ones(9, 3), 0.5, KEY, 1)[:6], dropout(torch.ones(6, 3), 0.5, KEY, 1))
    # With time first, the axis of the samples is found by its length.
    long, short = torch.ones(5, 9, 3), torch.ones(5, 6, 3)
    assert torch.equal(dropout(long, 0.5, KEY, 1, samples=9)[:, :6], dropout(short, 0.5, KEY, 1, samples=6))


def test_feature_dropout_drops_whole_channels():
    y = feature_dropout(torch.ones(50, 8, 3, 3), 0.25, KEY, 1)
    by_channel = y.flatten(2)
    assert torch.equal(by_channel.amin(2), by_channel.amax(2))
    assert torch.equal(by_channel[..., 0], kept(y, (50, 8), 0.25, KEY, 1) / 0.75)


def test_alpha_dropout_keeps_mean_and_variance():
    x = torch.randn(500, 500, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = alpha_dropout(x, 0.2, KEY, 1)
    assert float(y.mean()) == pytest.approx(0, abs=0.01)
    assert float(y.var()) == pytest.approx(1, abs=0.02)
    # By hand: q = 0.8, α' = −1.7580993, a = (q + α'²·q·p)^(−1/2) = 0.8784, b = −a·α'·p = 0.3089; dropped: a·α' + b.
    a = (0.8 + 1.7580993408473766**2 * 0.8 * 0.2) ** -0.5
    dropped = y[kept(x, (500, 500), 0.2, KEY, 1) == 0]
    assert dropped.unique().tolist() == pytest.approx([a * -1.7580993408473766 * 0.8], abs=1e-12)


def test_attention_with_dropout_uses_the_weights_that_are_left():
    q, k, v = (
        torch.randn(2, 2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in (1, 2, 3)
    )
    same = attention(q, k, v, causal=True, drop=lambda weights: weights)
    assert torch.allclose(same, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-12)
    halved = attention(q, k, v, drop=lambda weights: dropout(weights, 0.5, KEY, 1))
    weights = torch.softmax(q @ k.transpose(-2, -1) / 2, dim=-1)
    assert torch.allclose(halved, (weights * kept(weights, (2, 2, 5, 5), 0.5, KEY, 1) * 2) @ v, atol=1e-12)


def test_an_invalid_probability_is_rejected():
    with pytest.raises(BadInput, match=r"must be from 0 to 1, got 1.5"):
        checked(1.5)
