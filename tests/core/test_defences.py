"""Robust means, compared with numbers that are computed by hand from the papers' definitions."""

import pytest
import torch

from fedrema.core.defences import (
    assumed_attackers,
    coordinate_median,
    krum,
    norm_bounded_mean,
    robust_mean,
    squared_distances,
    trimmed_mean,
)
from tests.fixtures import tensor


def rows(*values):
    return {"w": tensor(values)}


def test_the_median_is_taken_in_each_coordinate():
    found = coordinate_median(rows([1, 9], [2, -5], [100, 3]))["w"]
    assert found.tolist() == [2, 3]


def test_the_median_of_an_even_number_is_the_mean_of_the_middle_two():
    assert coordinate_median(rows([1.0], [2.0], [4.0], [50.0]))["w"].tolist() == [3]


def test_the_trimmed_mean_drops_the_smallest_and_largest_values_of_each_coordinate():
    found = trimmed_mean(rows([0, 7], [1, 1], [2, 2], [6, 3], [1000, -50]), trimmed=1)["w"]
    assert found.tolist() == [3, 2]  # (1 + 2 + 6) / 3 and (1 + 2 + 3) / 3
    assert trimmed_mean(rows([0.0], [1.0], [5.0]), trimmed=0)["w"].tolist() == [2]


def test_with_few_clients_the_trimmed_mean_keeps_at_least_one_value():
    assert trimmed_mean(rows([1.0], [5.0]), trimmed=1)["w"].tolist() == [3]
    assert trimmed_mean(rows([1.0], [5.0], [6.0]), trimmed=3)["w"].tolist() == [5]


def test_krum_chooses_the_update_with_the_closest_neighbours():
    # k = 6 and f = 1: the score is the sum over the 6 − 1 − 2 = 3 closest others.
    given = rows([0.0], [1.0], [2.0], [4.0], [7.0], [100.0])
    # 0: 1 + 4 + 16 = 21; 1: 1 + 1 + 9 = 11; 2: 1 + 4 + 4 = 9; 4: 4 + 9 + 9 = 22; 7: 9 + 25 + 36 = 70.
    assert krum(given, attackers=1) == 2
    # With f = 0 the four closest count: 1: 1 + 1 + 9 + 36 = 47; 2: 1 + 4 + 4 + 25 = 34; 4: 4 + 9 + 9 + 16 = 38.
    assert krum(given, attackers=0) == 2
    # With f = 3 only the closest one: 0, 1 and 2 have 1, and the first of them is chosen.
    assert krum(given, attackers=3) == 0


def test_distances_are_over_all_tensors():
    given = {"w": tensor([[0.0, 0.0], [3.0, 0.0]]), "b": tensor([0.0, 4.0])}
    assert squared_distances(given).tolist() == [[0, 25], [25, 0]]


def test_norm_bounding_scales_changes_down_and_keeps_the_weights():
    before = {"w": tensor([1.0, 1.0])}
    given = rows([1.0 + 3.0, 1.0 + 4.0], [1.0 + 0.6, 1.0 + 0.8])  # changes of norm 5 and 1
    found = norm_bounded_mean(given, before, tensor([0.75, 0.25]), bound=2.0)["w"]
    # 0.75 · 2/5 · (3, 4) + 0.25 · (0.6, 0.8)
    assert found.tolist() == pytest.approx([1 + 0.9 + 0.15, 1 + 1.2 + 0.2])


def test_without_a_bound_the_median_norm_is_used():
    before = {"w": tensor([0.0])}
    found = norm_bounded_mean(rows([1.0], [2.0], [30.0]), before, tensor([1.0, 1.0, 1.0]), bound=0.0)["w"]
    assert found.tolist() == pytest.approx([(1 + 2 + 2) / 3])


def test_a_change_of_norm_zero_stays_zero():
    before = {"w": tensor([2.0])}
    assert norm_bounded_mean(rows([2.0], [2.0]), before, tensor([1.0, 1.0]), 0.0)["w"].tolist() == [2]


def test_the_share_of_attackers_is_rounded_up():
    assert [assumed_attackers(share, 10) for share in (0.0, 0.2, 0.21, 0.3)] == [0, 2, 3, 3]


@pytest.mark.parametrize("defence", ["median", "trimmed-mean", "krum", "norm-bound"])
def test_every_defence_limits_one_large_update_and_changes_no_input(defence):
    given = {"w": torch.cat([torch.ones(9, 3).double() + 0.01 * torch.arange(9)[:, None], tensor([[1e6] * 3])])}
    copy = given["w"].clone()
    before = {"w": torch.zeros(3).double()}
    found = robust_mean(defence, given, before, torch.full((10,), 0.1).double(), share=0.2, bound=0.0)["w"]
    assert found.shape == (3,)
    assert (found > 0.9).all()
    assert (found < 1.1).all()
    assert torch.equal(given["w"], copy)


@pytest.mark.parametrize("defence", ["median", "trimmed-mean", "krum", "norm-bound"])
def test_a_single_client_is_used_as_it_is(defence):
    given, before = rows([1.0, 2.0]), {"w": tensor([0.0, 0.0])}
    assert robust_mean(defence, given, before, tensor([1.0]), 0.2, 0.0)["w"].tolist() == pytest.approx([1, 2])
