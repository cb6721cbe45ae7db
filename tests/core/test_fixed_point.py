"""Sums as whole numbers: checked by hand, exact in any order, and without overflow at the extremes."""

import numpy as np
import pytest
import torch

from fedrema.core import Simulation
from fedrema.core.fixed_point import TRAILER, WORDS, FixedPoint, QuantisedSum
from fedrema.errors import BadInput

SMALL = FixedPoint(32, bound=2.0, samples=1000)
WIDE = FixedPoint()


def values(*numbers):
    return {"w": torch.tensor(numbers, dtype=torch.float64)}


def test_the_scale_is_the_largest_power_of_two_that_cannot_overflow():
    # (2^31 − 1) / 1000 − 1/2 = 2147483.1…, and half of it is between 2^20 = 1048576 and 2^21.
    assert SMALL.scale == 2.0**20
    assert WIDE.scale == 2.0**26
    for fixed in (SMALL, WIDE):
        assert fixed.samples * (fixed.bound * fixed.scale + 0.5) < 2 ** (fixed.bits - 1)
        assert fixed.samples * (fixed.bound * 2 * fixed.scale + 0.5) > 2 ** (fixed.bits - 1)


def test_a_sum_by_hand():
    summed = QuantisedSum(SMALL, values(1.0, -1.0))
    summed.add({"w": torch.tensor([[1.5, -1.0], [1.0, 2.0]], dtype=torch.float64)}, torch.tensor([3, 1]))
    # Changes (0.5, 0) and (0, 3): the last one is clipped to 2. Sum: 3 · 0.5 and 1 · 2, in steps of 2^-20.
    assert summed.totals["w"].tolist() == [3 * 2**19, 2 * 2**20]
    assert (summed.samples, summed.clients, summed.clipped_clients, summed.clipped_values) == (4, 2, 1, 1)
    assert summed.mean()["w"].tolist() == [1.0 + 1.5 / 4, -1.0 + 2.0 / 4]
    assert summed.vector().tolist() == [3 * 2**19, 2 * 2**20, 4, 2, 1]


def test_halves_are_rounded_to_even():
    summed = QuantisedSum(FixedPoint(32, 2.0, 1000), values(0.0, 0.0, 0.0))
    summed.add({"w": torch.tensor([[0.5, 1.5, -2.5]], dtype=torch.float64) / 2**20}, torch.tensor([1]))
    assert summed.totals["w"].tolist() == [0, 2, -2]


@pytest.mark.parametrize("fixed", [SMALL, WIDE], ids=["32 bits", "64 bits"])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("clients", [1, 10, 1000])
def test_the_largest_possible_sum_does_not_overflow(fixed, sign, clients):
    summed = QuantisedSum(fixed, values(0.0))
    count = fixed.samples // clients
    fixed.check_samples(count, clients)
    for _ in range(clients):
        summed.add({"w": torch.full((1, 1), sign * 1e30, dtype=torch.float64)}, torch.tensor([count]))
    exact = clients * round(sign * count * fixed.bound * fixed.scale)  # with Python's unlimited integers
    assert summed.totals["w"].tolist() == [exact]
    read = QuantisedSum(fixed, values(0.0)).read(summed.vector(), clients)
    assert read.totals["w"].tolist() == [exact]
    assert (read.samples, read.clipped_clients) == (count * clients, clients)
    assert read.mean()["w"].item() == pytest.approx(sign * fixed.bound)
    with pytest.raises(BadInput, match=f"must be at least {(count + 1) * clients}"):
        fixed.check_samples(count + 1, clients)


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("power", [2, 8, 10])
@pytest.mark.parametrize("bound", [1.0, 2.0, 64.0, 3.0, 1 - 2.0**-53])
def test_at_powers_of_two_full_saturation_does_not_overflow(bits, power, bound):
    fixed = FixedPoint(bits, bound, 2**power)
    for clients in (1, 4):
        summed, count = QuantisedSum(fixed, values(0.0)), 2**power // clients
        for _ in range(clients):
            summed.add({"w": torch.full((1, 1), 1e30, dtype=torch.float64)}, torch.tensor([count]))
        assert summed.totals["w"].item() < 2 ** (bits - 1)
        read = QuantisedSum(fixed, values(0.0)).read(summed.vector(), clients)
        assert read.mean()["w"].item() == pytest.approx(bound)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_change_that_is_not_finite_is_refused(value):
    summed = QuantisedSum(SMALL, values(0.0, 0.0))
    with pytest.raises(BadInput, match="The change of 'w' is not finite, so it cannot be summed"):
        summed.add({"w": torch.tensor([[0.5, value]], dtype=torch.float64)}, torch.tensor([3]))


def test_the_order_and_the_grouping_of_clients_do_not_matter():
    generator = torch.Generator().manual_seed(0)
    params = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    counts = torch.tensor([3, 14, 15, 92])
    totals = set()
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)):
        summed = QuantisedSum(WIDE, values(0.0, 0.0, 0.0, 0.0, 0.0))
        for row in order:
            summed.add({"w": params[row : row + 1]}, counts[row : row + 1])
        totals.add(tuple(summed.vector().tolist()))
    at_once = QuantisedSum(WIDE, values(0.0, 0.0, 0.0, 0.0, 0.0))
    at_once.add({"w": params}, counts)
    assert totals == {tuple(at_once.vector().tolist())}
    expected = (params * counts[:, None]).sum(dim=0) / counts.sum()
    torch.testing.assert_close(at_once.mean()["w"], expected, rtol=0, atol=4 / (2 * WIDE.scale * 124))


@pytest.mark.parametrize("fixed", [SMALL, WIDE], ids=["32 bits", "64 bits"])
def test_vectors_of_several_clients_add_up_modulo_the_word(fixed):
    before = {"b": torch.zeros(2, 2), "a": torch.ones(1)}
    parts = [QuantisedSum(fixed, before) for _ in range(3)]
    whole = QuantisedSum(fixed, before)
    for row, part in enumerate(parts):
        params = {"b": torch.full((1, 2, 2), -0.25 * row), "a": torch.full((1, 1), 1.5)}
        for each in (part, whole):
            each.add(params, torch.tensor([row + 1]))
    total = sum((part.vector() for part in parts), np.zeros(5 + TRAILER, WORDS[fixed.bits]))
    read = QuantisedSum(fixed, before).read(total, 3)
    assert all(torch.equal(read.totals[name], whole.totals[name]) for name in before)
    assert {name: value.dtype for name, value in read.mean().items()} == dict.fromkeys(before, torch.float32)


def test_a_vector_that_is_no_sum_of_the_clients_is_refused():
    summed = QuantisedSum(SMALL, values(0.0))
    summed.add({"w": torch.ones(2, 1)}, torch.tensor([1, 1]))
    with pytest.raises(BadInput, match="not one of these clients"):
        summed.read(summed.vector(), 3)
    with pytest.raises(BadInput, match="not one of these clients"):
        summed.read(np.random.default_rng(0).integers(0, 2**32, 4, dtype=np.uint32), 2)


def test_rounding_never_makes_a_variance_negative():
    coarse = FixedPoint(32, 100.0, 100_000)
    assert coarse.scale == 128
    summed = QuantisedSum(coarse, values(0.003), frozenset({"w"}))
    summed.add({"w": torch.tensor([[0.001]])}, torch.tensor([2]))
    assert summed.totals["w"].tolist() == [-1]
    assert summed.mean()["w"].item() == 0.0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"secure_bits": 48}, "--secure-bits must be 32 or 64, got 48"),
        ({"secure_bits": 32}, "--secure-bits 32 is too few for --secure-range 100 and --secure-samples 1000000000"),
        ({"secure_range": 0.0}, "--secure-range must be above 0"),
        ({"secure_range": float("nan")}, "--secure-range must be above 0"),
        ({"secure_samples": 0}, "--secure-samples must be from 1"),
        ({"defence": "median"}, "--secure-aggregation cannot be combined with --defence median"),
        ({"secure_aggregation": False, "secure_range": 2.0}, "--secure-range has no effect without"),
    ],
)
def test_invalid_settings_are_refused_in_one_sentence(settings, sentence):
    with pytest.raises(BadInput, match=sentence):
        Simulation(**{"secure_aggregation": True, **settings})
