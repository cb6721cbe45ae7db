"""Paired comparisons, Holm's correction and average ranks, against numbers from books and by hand."""

import math

import numpy as np
import pytest

from fedrema.experiments.comparisons import compare, compare_rows, compare_with_reference, corrected, scores
from fedrema.reporting.statistics import (
    PairedTest,
    cliques,
    critical_difference,
    holm,
    paired_test,
    pairs_needed,
    rank,
    variance_components,
)
from tests.experiments.made_runs import made_run, made_summary

# Ranks of four variants of C4.5 on 14 datasets that give the averages of Demšar's example, JMLR 7 (2006), section 3.2.
C45 = [
    (4, 3, 2, 1), (1, 2, 3, 4), (4, 1, 2, 3), (4, 1, 3, 2), (4, 2, 3, 1), (1, 2.5, 4, 2.5), (3, 2, 4, 1),
    (2.5, 2.5, 4, 1), (4, 3, 2, 1), (2.5, 2.5, 2.5, 2.5), (4, 2.5, 1, 2.5), (3, 2, 4, 1), (4, 1, 2, 3), (3, 1, 4, 2),
]  # fmt: skip
C45_TABLE = {
    name: {(f"data{block:02}", 0): -float(ranks[place]) for block, ranks in enumerate(C45)}
    for place, name in enumerate(("C4.5", "+m", "+cf", "+m+cf"))
}


def by_seed(*values):
    return dict(enumerate(values))


def in_column(*values, column="c"):
    return {(column, seed): value for seed, value in enumerate(values)}


def test_a_paired_difference_equals_a_calculation_by_hand():
    # Differences 1 … 5: mean 3, standard error √(2.5 / 5), t = 4.243; with 4 degrees of freedom t₀.₉₇₅ = 2.776445.
    found = compare("a", "b", "c", by_seed(11, 22, 33, 44, 55), by_seed(10, 20, 30, 40, 50))
    margin = 2.776445 * math.sqrt(0.5)
    assert (found.row, found.other, found.column, found.pairs, found.test.reason) == ("a", "b", "c", 5, "")
    assert (found.mean, found.test.low, found.test.high) == (3, pytest.approx(3 - margin), pytest.approx(3 + margin))
    assert found.test.p == pytest.approx(0.0132356, abs=1e-7)
    assert math.isnan(found.corrected)
    back = compare("b", "a", "c", by_seed(10, 20, 30, 40, 50), by_seed(11, 22, 33, 44, 55))
    assert (back.mean, back.test.low, back.test.high) == pytest.approx((-3, -3 - margin, -3 + margin))
    assert back.test.p == pytest.approx(found.test.p)


def test_a_paired_difference_equals_an_example_of_penn_state():
    # STAT 200, example 8.3.2.1: nine students, mean 1/9, t = 0.127, p = 0.90.
    first, second = (98, 100, 95, 90, 90, 92, 80, 78, 88), (94, 98, 98, 88, 89, 91, 84, 80, 88)
    found = compare("first", "second", "", by_seed(*first), by_seed(*second))
    assert found.mean == pytest.approx(1 / 9)
    assert found.test.p == pytest.approx(0.902, abs=0.001)


def test_only_common_seeds_are_compared():
    found = compare("a", "b", "c", {0: 99.0, 1: 5, 2: 7, 3: 6}, {1: 4, 2: 5, 3: 3, 9: 0.0})
    assert (found.pairs, found.mean) == (3, 2)


@pytest.mark.parametrize(
    ("mine", "theirs", "pairs", "reason"),
    [({0: 1.0}, {1: 2.0}, 0, "no seed in common"), ({0: 3.0, 1: 1.0}, {0: 2.0}, 1, "one seed in common: no test")],
)
def test_too_few_seeds_are_not_tested(mine, theirs, pairs, reason):
    found = compare("a", "b", "c", mine, theirs)
    assert (found.pairs, found.test.reason, found.tested) == (pairs, reason, False)
    assert math.isnan(found.test.low)
    assert math.isnan(found.mean) if pairs == 0 else found.mean == 1


def test_equal_differences_for_all_seeds_are_tested_by_the_sign_test():
    # 0.1 three times up to rounding; scipy would divide by the rounding error. Sign test: 2 · 0.5³.
    found = compare("a", "b", "c", by_seed(0.6, 0.7, 0.8), by_seed(0.5, 0.6, 0.7))
    assert (found.mean, found.test.low, found.test.high) == pytest.approx((0.1, 0.1, 0.1))
    assert found.test.p == pytest.approx(0.25)
    assert "sign test" in found.test.reason
    level = compare("a", "b", "c", by_seed(0.6, 0.7), by_seed(0.6, 0.7))
    assert (level.mean, level.test.p, level.test.reason) == (0, 1, "no difference for any seed")


def test_holms_method_equals_a_calculation_by_hand():
    # 4 · 0.005, 3 · 0.01, 2 · 0.03; 1 · 0.04 may not be smaller than the one before it.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.4, 0.6]) == [0.8, 0.8]
    assert holm([0.7, 0.7, 0.7]) == [1, 1, 1]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


def test_comparisons_without_a_test_are_not_part_of_the_family():
    tested = compare("a", "b", "c", by_seed(11, 22, 33, 44, 55), by_seed(10, 20, 30, 40, 50))
    one = compare("a", "d", "c", by_seed(1.0), by_seed(2.0))
    first, second, third = corrected([tested, one, tested])
    assert (first.corrected, third.corrected) == pytest.approx((2 * tested.test.p, 2 * tested.test.p))
    assert second is one


def test_rows_are_compared_within_a_column():
    table = {
        "a": in_column(11, 22, 33, 44, 55) | in_column(0, 0, column="d"),
        "b": in_column(10, 20, 30, 40, 50),
        "e": in_column(11, 22, 33, 44, 55),
    }
    found = compare_rows(table, "c", ("a", "b"), ("b", "e"))
    assert [(each.row, each.other) for each in found] == [("a", "b"), ("a", "e"), ("b", "e")]
    assert [each.mean for each in found] == [3, 0, -3]
    assert [each.corrected for each in found] == pytest.approx([3 * 0.0132356, 1, 3 * 0.0132356], abs=1e-6)


def test_all_rows_are_compared_with_the_best_of_each_column_or_with_a_named_one():
    table = {
        "a": in_column(1, 2) | in_column(9, 7, column="d"),
        "b": in_column(3, 5) | in_column(1, 2, column="d"),
        "gone": {},
    }
    found = compare_with_reference(table, ("c", "d", "empty"))
    assert [(each.row, each.other, each.column) for each in found] == [
        ("a", "b", "c"), ("gone", "b", "c"), ("b", "a", "d"), ("gone", "a", "d"),
    ]  # fmt: skip
    assert [each.mean for each in found if each.tested] == [-2.5, -6.5]
    assert found[0].corrected == pytest.approx(min(1, max(found[0].test.p, 2 * min(found[0].test.p, found[2].test.p))))
    assert [each.other for each in compare_with_reference(table, ("c", "d"), "a")] == ["a"] * 4


def test_nemenyis_critical_values_are_the_published_ones():
    # Demšar's table 5a; his q is the critical difference over √(k (k + 1) / 6 N).
    for rows, q in zip(range(2, 11), (1.960, 2.343, 2.569, 2.728, 2.850, 2.949, 3.031, 3.102, 3.164), strict=True):
        assert critical_difference(rows, 1) / math.sqrt(rows * (rows + 1) / 6) == pytest.approx(q, abs=0.0011)
    assert critical_difference(4, 14) == pytest.approx(1.25, abs=0.005)


def test_ranks_equal_those_of_demsars_example():
    found = rank(C45_TABLE)
    assert found.names == ("+m+cf", "+m", "+cf", "C4.5")
    assert found.ranks == pytest.approx((1.964, 2.000, 2.893, 3.143), abs=0.0005)
    assert found.critical_difference == pytest.approx(1.25, abs=0.005)
    assert found.blocks == 14
    assert found.blocks_are == "14 columns, each the mean over its seeds"
    assert found.cliques == (found.names,)  # 3.143 - 1.964 = 1.18 is less than 1.25, as he says
    assert found.left_out == ()
    # χ² = 12 · 14 / (4 · 5) · (Σ R² - 4 · 25 / 4) = 9.28 as published, over 1 - 78 / 840 for the ties, which he omits:
    # with 3 degrees of freedom p = 0.0167.
    squares = sum(value**2 for value in found.ranks)
    assert 8.4 * (squares - 25) == pytest.approx(9.28, abs=0.005)
    assert found.p == pytest.approx(0.016722, abs=1e-6)


def test_cliques_are_the_largest_groups_without_significant_differences():
    names = ("a", "b", "c", "d", "e")
    assert cliques(names, (1.0, 1.5, 2.5, 4.0, 4.5), 1.6) == (("a", "b", "c"), ("c", "d"), ("d", "e"))
    assert cliques(names, (1, 2, 3, 4, 5), 1) == ()  # exactly the critical difference is significant
    assert cliques(names, (1, 1.1, 3, 5, 5), 1) == (("a", "b"), ("d", "e"))
    assert cliques(names, (3, 3, 3, 3, 3), 0.5) == (names,)


def test_blocks_are_means_of_columns_and_not_single_seeds():
    # In column c0, a wins two of three seeds by little and loses the third by much: its mean is the lower.
    table = {
        "a": in_column(2, 2, 0, column="c0") | in_column(3, column="c1") | in_column(3, column="c2"),
        "b": in_column(1, 1, 9, column="c0") | in_column(2, column="c1") | in_column(2, column="c2"),
        "d": in_column(0, 0, 1, column="c0") | in_column(1, column="c1") | in_column(1, column="c2"),
    }
    found = rank(table)
    assert (found.blocks, found.names) == (3, ("a", "b", "d"))
    assert found.ranks == pytest.approx((4 / 3, 5 / 3, 3))


def test_with_few_columns_blocks_are_seeds_and_the_result_says_so():
    table = {"a": in_column(5, 6, 7), "b": in_column(5, 5, 5), "d": in_column(1, 2, 3), "gone": {}}
    found = rank(table)
    assert found.left_out == ("gone",)
    assert (found.blocks, found.ranks) == (3, pytest.approx((3.5 / 3, 5.5 / 3, 3)))
    assert found.blocks_are == "3 runs, the seeds of 1 column: not independent datasets, so p is too small"
    two = {row: values | {("d", 0): value} for value, (row, values) in enumerate(table.items()) if values}
    assert "the seeds of 2 columns" in rank(two).blocks_are


def test_rows_are_ranked_by_common_seeds():
    # With its second seed, a would be last in c0; the other rows do not have that seed.
    columns = ("c0", "c1", "c2")
    table = {
        row: {key: value for column in columns for key, value in in_column(first, column=column).items()}
        for row, first in (("a", 3), ("b", 2), ("d", 1))
    }
    table["a"]["c0", 1] = -99
    found = rank(table | {"gone": in_column(9, column="c0")})
    assert (found.names, found.ranks, found.left_out) == (("a", "b", "d"), (1, 2, 3), ("gone",))
    assert found.blocks_are == "3 columns, each the mean over the seeds that all have (1)"
    for row, seed in (("b", 0), ("d", 0)):
        table[row]["c1", 1] = table[row].pop(("c1", seed))
    assert rank(table) is None  # a has seed 0 alone in c1, the others seed 1


def test_too_few_rows_or_blocks_are_not_ranked():
    assert rank({"a": in_column(1, 2), "b": in_column(2, 3)}) is None  # two rows: compare them
    assert rank({name: in_column(1) for name in "abd"}) is None  # one block
    assert rank({"a": in_column(1, 2), "b": in_column(2, 3), "d": {}}) is None
    assert rank({name: {} for name in "abd"}) is None
    level = rank({name: in_column(1, 2) for name in "abd"})
    assert (level.p, level.ranks, level.cliques) == (1, (2, 2, 2), (("a", "b", "d"),))


def test_scores_are_percentages_of_runs_that_have_them():
    def run(seed, **summary):
        return made_run(seed=seed, summary=made_summary(**summary), failed="" if summary else "diverged")

    runs = {
        ("a", "c"): [run(0, best_accuracy=0.5), run(3, best_accuracy=None), run(4)],
        ("a", "d"): [run(0, best_accuracy=0.0)],
        ("b", "c"): [],
    }
    assert scores(runs, "best_accuracy") == {"a": {("c", 0): 50, ("d", 0): 0}, "b": {}}


@pytest.mark.parametrize(("effect", "pairs"), [(0.2, 199), (0.5, 34), (0.8, 15), (1.0, 10), (1.5, 6)])
def test_the_pairs_that_a_test_needs_equal_published_tables(effect, pairs):
    # Two-sided paired t test, level 0.05, power 0.8; Cohen's small, medium and large effect, as in G*Power.
    assert pairs_needed(PairedTest(5, 10 * effect, deviation=10.0), 0.05) == pairs
    assert pairs_needed(PairedTest(5, -10 * effect, deviation=10.0), 0.05) == pairs


def test_the_pairs_that_a_test_needs_in_special_cases():
    assert pairs_needed(paired_test({0: 3.0}, {0: 2.0}), 0.05) is None  # no deviation
    assert pairs_needed(paired_test(by_seed(1, 2, 3), by_seed(3, 2, 1)), 0.05) is None  # no difference
    # Always 1: with five, the sign test has p = 2 / 2⁵ = 0.0625; with six, 0.031.
    assert pairs_needed(paired_test(by_seed(2, 3, 4), by_seed(1, 2, 3)), 0.05) == 6
    assert pairs_needed(PairedTest(5, 0.01, deviation=10.0), 0.05) is None  # more than a thousand


def test_variance_components_equal_a_calculation_by_hand():
    # Rows 10, 20, 30 plus columns -1, 1 plus a rest of ±1 in the first two rows: means of rows 10, 20, 30, of columns
    # 19 and 21. Mean squares: rows 2 · 200 / 2 = 200; columns 3 · 2 / 1 = 6; rest (4 · 1) / 2 = 2.
    values = np.array([[10 - 1 + 1, 10 + 1 - 1], [20 - 1 - 1, 20 + 1 + 1], [30 - 1, 30 + 1]], float)
    found = variance_components(values)
    assert (found.mean, found.partitions, found.seeds) == (20, 3, 2)
    assert found.partition**2 == pytest.approx((200 - 2) / 2)
    assert found.seed**2 == pytest.approx((6 - 2) / 3)
    assert found.rest**2 == pytest.approx(2)
    assert found.shares == pytest.approx([part / (99 + 4 / 3 + 2) for part in (99, 4 / 3, 2)])


def test_variance_components_that_would_be_negative_are_zero():
    found = variance_components(np.array([[0.0, 1.0], [1.0, 0.0]]))  # equal means of rows and columns
    assert (found.partition, found.seed, found.rest) == (0, 0, 1)
    assert variance_components(np.ones((2, 2))).shares == (0, 0, 0)
    assert variance_components(np.ones((1, 4))) is None
