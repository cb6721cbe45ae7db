import itertools
import tracemalloc
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from fedrema.data.statistics import (
    CategorySummary,
    NumberSummary,
    Statistics,
    check_statistics,
    local_statistics,
    merge_statistics,
)
from fedrema.data.table import CategoryColumn, ImageColumn, NumberColumn, Table
from fedrema.errors import BadInput


def random_table(rows=400, clients=7, seed=0):
    generator = np.random.default_rng(seed)
    far = 1e6 + generator.normal(size=rows)
    skewed = np.exp(3 * generator.normal(size=rows))
    for values in (far, skewed):
        values[generator.random(rows) < 0.2] = np.nan
    client = generator.integers(0, clients, rows)
    far[client == 2] = np.nan  # one site has no values
    codes = generator.integers(-1, 3, rows).astype(np.int32)
    return Table(
        {
            "far": NumberColumn(far),
            "skewed": NumberColumn(skewed),
            "constant": NumberColumn(np.full(rows, 0.1)),
            "colour": CategoryColumn(codes, ("blue", "green", "red")),
        },
        {"y": NumberColumn(generator.integers(0, 3, rows).astype(np.float64))},
        client,
        tuple(f"site {number}" for number in range(clients)),
    )


def test_merged_statistics_equal_those_of_all_samples_together():
    table = random_table()
    parts = [local_statistics(table, rows) for rows in table.rows_by_client()]
    pooled = local_statistics(table, np.arange(len(table)))
    for order in itertools.islice(itertools.permutations(parts), 0, None, 500):
        merged = merge_statistics(order)
        assert merged.samples == 400
        assert merged.categories == pooled.categories
        assert merged.target_classes == pooled.target_classes
        for name, found in {**merged.numbers, **merged.target_numbers}.items():
            expected = {**pooled.numbers, **pooled.target_numbers}[name]
            assert (found.count, found.missing) == (expected.count, expected.missing)
            assert found.mean == pytest.approx(expected.mean, rel=1e-9)
            assert found.deviation == pytest.approx(expected.deviation, rel=1e-9)
        assert merged.numbers["constant"].m2 == 0


def test_statistics_of_one_site_by_hand():
    table = Table(
        {"a": NumberColumn(np.array([1.0, np.nan, 3.0, 99.0], np.float32)),
         "b": CategoryColumn(np.array([0, -1, 0, 1], np.int32), ("x", "z")),
         "days": NumberColumn(np.array([0.0, 1, 2, 3]), "days since 1970-01-01"),
         "image": ImageColumn(np.zeros((4, 3, 5, 6), np.uint8))},
        {"y": NumberColumn(np.array([1.0, 0, 1, 7])),
         "z": CategoryColumn(np.array([1, 1, 0, 0], np.int32), ("n", "y"))},
        np.zeros(4, np.int64), ("only",),
    )  # fmt: skip
    found = local_statistics(table, np.array([True, True, True, False]))
    assert found == Statistics(
        3,
        ("a", "b", "days", "image"),
        {"a": NumberSummary(2, 2.0, 2.0, 1), "days": NumberSummary(3, 1.0, 2.0, 0)},
        {"days": "days since 1970-01-01"},
        {"b": CategorySummary({"x": 2}, 1)},
        {"image": (3, 5, 6)},
        {"y": NumberSummary(3, pytest.approx(2 / 3), pytest.approx(2 / 3), 0)},
        {"y": CategorySummary({"0": 1, "1": 2}), "z": CategorySummary({"n": 1, "y": 2})},
    )
    sent = msgspec.json.encode(msgspec.to_builtins(found))
    assert msgspec.convert(msgspec.json.decode(sent), Statistics) == found


def test_quantities_have_no_classes():
    table = random_table()
    many = replace(table, targets={"y": NumberColumn(np.arange(400.0))})
    assert local_statistics(many, np.arange(400)).target_classes == {}


def site(**changes):
    made = Statistics(3, ("a", "b"), {"a": NumberSummary(2, 1.0, 1.0, 1)}, {}, {"b": CategorySummary({"x": 3})})
    return replace(made, **changes)


def test_sites_must_agree_on_their_columns():
    text = site(numbers={}, categories={"a": CategorySummary({"q": 3}), "b": CategorySummary({"x": 3})})
    with pytest.raises(BadInput, match=r"column 'a' holds numbers at one site and text at another"):
        merge_statistics([site(), text])
    with pytest.raises(BadInput, match=r"one site has a column 'b' and another has none"):
        merge_statistics([site(), Statistics(3, ("a",), {"a": NumberSummary(3)})])
    empty = site(numbers={"a": NumberSummary(missing=3)})
    for order in ([empty, text], [text, empty]):
        assert merge_statistics(order).categories["a"] == CategorySummary({"q": 3}, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inputs": ("a",)}, "do not have the federation's columns; they differ in 'b'"),
        ({"numbers": {}}, "they differ in 'a'"),
        ({"numbers": {"b": NumberSummary(3)}}, "they differ in 'a'"),
        ({"units": {"b": "days"}}, "units of columns that do not hold numbers"),
        ({"target_numbers": {"y": NumberSummary(3)}}, "do not have the federation's targets; they differ in 'y'"),
        ({"samples": -1}, "of -1 samples"),
        ({"samples": 4}, "counts must add up to 4"),
        ({"numbers": {"a": NumberSummary(-1, 0.0, 0.0, 4)}}, "column 'a' are not valid"),
        ({"numbers": {"a": NumberSummary(3, float("nan"), 0.0)}}, "column 'a' are not valid"),
        ({"numbers": {"a": NumberSummary(3, 0.0, float("inf"))}}, "column 'a' are not valid"),
        ({"numbers": {"a": NumberSummary(3, 0.0, -1.0)}}, "column 'a' are not valid"),
        ({"categories": {"b": CategorySummary({"x": 4}, -1)}}, "column 'b' have counts below 1"),
        ({"categories": {"b": CategorySummary({"x": 4, "z": -1})}}, "column 'b' have counts below 1"),
        ({"categories": {"b": CategorySummary({"x": 4})}}, "column 'b' do not add up to 3 samples"),
        ({"categories": {"b": CategorySummary({"x" * 201: 3})}}, "column 'b' has a category of 201 characters"),
        ({"categories": {"b": CategorySummary(dict.fromkeys(map(str, range(1001)), 1))}}, "has 1,001 categories"),
        ({"inputs": ("a", "b", "c"), "images": {"c": (0, 1, 1)}}, "they differ in 'c'"),
    ],
)
def test_invalid_statistics_are_refused(change, message):
    assert check_statistics(site(), ("a", "b")) == site()
    with pytest.raises(BadInput, match=message):
        check_statistics(site(**change), ("a", "b"))


def test_statistics_of_a_few_rows_need_no_memory_for_all_rows_and_categories():
    rows = 10**6
    table = Table(
        {"a": NumberColumn(np.zeros(rows)), "b": CategoryColumn(np.zeros(rows, np.int32), ("x",) * 10**6)},
        {"y": NumberColumn(np.zeros(rows))},
        np.zeros(rows, np.int64),
        ("all",),
    )
    tracemalloc.start()
    try:
        found = local_statistics(table, np.arange(3))
        assert tracemalloc.get_traced_memory()[1] < 10**5
    finally:
        tracemalloc.stop()
    assert found.categories["b"].counts == {"x": 3}
