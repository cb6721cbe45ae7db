"""Statistics of a site's columns, from which preprocessing is fitted without pooling the samples.

A site computes `local_statistics` of its training samples. The server merges them with `merge_statistics`, which gives
the statistics of all samples together, and fits the preprocessing. In a deployment the server validates what it
receives with `check_statistics`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from fedrema.data.table import CategoryColumn, ImageColumn, NumberColumn, Table
from fedrema.data.text_columns import MAXIMUM_CATEGORIES
from fedrema.errors import BadInput

MAXIMUM_CLASSES = 20
"""A target of whole numbers with at most this many distinct values holds classes, unless a task is given."""
_MAXIMUM_NAMES = 10_000
"""Largest number of classes of a target."""
_MAXIMUM_LENGTH = 200
"""Largest number of characters of a category."""


@dataclass(frozen=True)
class NumberSummary:
    """Count, mean and spread of a column of numbers."""

    count: int = 0
    """Number of values that are present."""
    mean: float = 0.0
    m2: float = 0.0
    """Sum of the squared differences from the mean."""
    missing: int = 0

    @property
    def deviation(self) -> float:
        """Standard deviation (of a population)."""
        return math.sqrt(self.m2 / self.count) if self.count else 0.0


@dataclass(frozen=True)
class CategorySummary:
    """Number of samples of each category."""

    counts: dict[str, int]
    missing: int = 0


@dataclass(frozen=True)
class Statistics:
    """What a site reports about its training samples; also the merged statistics of several sites."""

    samples: int
    inputs: tuple[str, ...]
    """Names of the input columns, in the order of the source."""
    numbers: dict[str, NumberSummary] = field(default_factory=dict)
    """Input columns of numbers."""
    units: dict[str, str] = field(default_factory=dict)
    """Units of those input columns that did not hold numbers, such as dates."""
    categories: dict[str, CategorySummary] = field(default_factory=dict)
    """Input columns of categories."""
    images: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Channels, height and width of input columns of images."""
    target_numbers: dict[str, NumberSummary] = field(default_factory=dict)
    """Target columns of numbers."""
    target_classes: dict[str, CategorySummary] = field(default_factory=dict)
    """Target columns of text, or of at most 20 different whole numbers."""


def local_statistics(table: Table, rows: NDArray[np.integer] | NDArray[np.bool_]) -> Statistics:
    """Return the statistics of these rows of a table; give the training samples of one site."""
    # An array of all rows here would make the time quadratic in the number of sites.
    chosen: NDArray[np.integer] = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows.astype(np.int64)
    numbers: dict[str, NumberSummary] = {}
    units: dict[str, str] = {}
    categories: dict[str, CategorySummary] = {}
    images: dict[str, tuple[int, int, int]] = {}
    for name, column in table.inputs.items():
        if isinstance(column, ImageColumn):
            channels, height, width = column.pixels.shape[1:]
            images[name] = (channels, height, width)
        elif isinstance(column, NumberColumn):
            numbers[name] = summarise_numbers(column.values[chosen])
            if column.unit:
                units[name] = column.unit
        else:
            categories[name] = summarise_categories(column, chosen)
    target_numbers: dict[str, NumberSummary] = {}
    target_classes: dict[str, CategorySummary] = {}
    for name, target in table.targets.items():
        if isinstance(target, CategoryColumn):
            target_classes[name] = summarise_categories(target, chosen)
        else:
            values = target.values[chosen]
            target_numbers[name] = summarise_numbers(values)
            found, counts = np.unique(values[~np.isnan(values)], return_counts=True)
            if len(found) <= MAXIMUM_CLASSES and (np.mod(found, 1) == 0).all():
                by_name = {str(int(value)): int(count) for value, count in zip(found, counts, strict=True)}
                target_classes[name] = CategorySummary(by_name, int(np.isnan(values).sum()))
    return Statistics(
        len(chosen), tuple(table.inputs), numbers, units, categories, images, target_numbers, target_classes
    )


def summarise_numbers(values: NDArray[np.floating]) -> NumberSummary:
    """Return the summary of numbers, of which NaN are missing."""
    present = values[~np.isnan(values)].astype(np.float64)
    missing = len(values) - len(present)
    if not len(present):
        return NumberSummary(missing=missing)
    # Differences from the first value: exactly 0 for constant columns, and precise for values far from 0.
    differences = present - present[0]
    shift = float(differences.mean())
    with np.errstate(over="ignore"):  # `check_statistics` refuses sums that are not finite
        m2 = float(np.square(differences - shift).sum())
    return NumberSummary(len(present), float(present[0]) + shift, m2, missing)


def summarise_categories(column: CategoryColumn, rows: NDArray[np.integer]) -> CategorySummary:
    """Return the number of samples of each category that occurs in these rows."""
    codes = column.codes[rows]
    present, counts = np.unique(codes[codes >= 0], return_counts=True)
    by_name = {column.categories[code]: int(count) for code, count in zip(present, counts, strict=True)}
    return CategorySummary(by_name, int(np.count_nonzero(codes < 0)))


def merge_statistics(parts: Iterable[Statistics]) -> Statistics:
    """Return the statistics of the samples of all sites together."""
    return reduce(_merge_two, parts)


def _merge_two(one: Statistics, other: Statistics) -> Statistics:
    if different := set(one.inputs) ^ set(other.inputs):
        raise BadInput(f"one site has a column {min(different)!r} and another has none; all need the same columns.")
    numbers: dict[str, NumberSummary] = {}
    categories: dict[str, CategorySummary] = {}
    for name in one.inputs:
        kinds = {name in part.images for part in (one, other)}
        texts = [part.categories[name] for part in (one, other) if name in part.categories]
        values = [part.numbers[name] for part in (one, other) if name in part.numbers]
        if texts and all(value.count == 0 for value in values):  # a site without values cannot know their kind
            categories[name] = reduce(_merge_categories, texts, CategorySummary({}, sum(v.missing for v in values)))
        elif len(values) == 2:
            numbers[name] = merge_numbers(*values)
        elif kinds != {True}:
            raise BadInput(f"column {name!r} holds numbers at one site and text at another; all must hold the same.")
    if one.images != other.images:
        raise BadInput("the sites have images of different sizes; set --image-size.")
    target_numbers = {
        name: merge_numbers(one.target_numbers[name], other.target_numbers[name])
        for name in one.target_numbers
        if name in other.target_numbers
    }
    target_classes = {
        name: _merge_categories(one.target_classes[name], other.target_classes[name])
        for name in one.target_classes
        if name in other.target_classes
    }
    for name in {**one.target_numbers, **one.target_classes}:
        if name not in target_numbers and name not in target_classes:
            raise BadInput(f"target {name!r} holds numbers at one site and text at another; all must hold the same.")
    return Statistics(
        one.samples + other.samples,
        one.inputs,
        numbers,
        {**one.units, **other.units},
        categories,
        one.images,
        target_numbers,
        target_classes,
    )


def merge_numbers(one: NumberSummary, other: NumberSummary) -> NumberSummary:
    """Merge two summaries as Chan, Golub and LeVeque (1983) do."""
    count, missing = one.count + other.count, one.missing + other.missing
    if not one.count or not other.count:
        filled = one if one.count else other
        return NumberSummary(count, filled.mean, filled.m2, missing)
    difference = other.mean - one.mean
    mean = one.mean + difference * (other.count / count)
    m2 = one.m2 + other.m2 + difference * difference * (one.count / count) * other.count
    return NumberSummary(count, mean, m2, missing)


def _merge_categories(one: CategorySummary, other: CategorySummary) -> CategorySummary:
    counts = dict(one.counts)
    for name, count in other.counts.items():
        counts[name] = counts.get(name, 0) + count
    return CategorySummary(dict(sorted(counts.items())), one.missing + other.missing)


def check_statistics(statistics: Statistics, inputs: Sequence[str], targets: Sequence[str] = ()) -> Statistics:
    """Validate statistics that a site sent, and return them.

    `inputs` and `targets` are the columns that the federation uses.
    """
    described = {**statistics.numbers, **statistics.categories, **statistics.images}
    parts = len(statistics.numbers) + len(statistics.categories) + len(statistics.images)
    if set(statistics.inputs) != set(inputs) or set(described) != set(inputs) or parts != len(set(inputs)):
        different = min(set(statistics.inputs) ^ set(inputs) | set(described) ^ set(inputs), default="")
        raise BadInput(f"the statistics do not have the federation's columns; they differ in {different!r}.")
    if not set(statistics.units) <= set(statistics.numbers):
        raise BadInput("the statistics have units of columns that do not hold numbers.")
    found = set(statistics.target_numbers) | set(statistics.target_classes)
    if found != set(targets):
        raise BadInput(
            f"the statistics do not have the federation's targets; they differ in {min(found ^ set(targets))!r}."
        )
    if statistics.samples < 0:
        raise BadInput(f"the statistics are of {statistics.samples} samples; the number must be 0 or more.")
    for name, numbers in (*statistics.numbers.items(), *statistics.target_numbers.items()):
        _check_numbers(name, numbers, statistics.samples)
    for name, shape in statistics.images.items():
        if len(shape) != 3 or min(shape) < 1:
            raise BadInput(f"the statistics of column {name!r} have images of the shape {shape}.")
    _check_categories(statistics.categories, MAXIMUM_CATEGORIES, statistics.samples)
    _check_categories(statistics.target_classes, _MAXIMUM_NAMES, statistics.samples)
    return statistics


def _check_numbers(name: str, summary: NumberSummary, samples: int) -> None:
    valid = min(summary.count, summary.missing) >= 0 and summary.count + summary.missing == samples
    if not valid or not math.isfinite(summary.mean) or not 0 <= summary.m2 < math.inf:
        raise BadInput(
            f"the statistics of column {name!r} are not valid: counts must add up to {samples}, and the mean and the "
            "sum of squares must be finite."
        )


def _check_categories(summaries: Mapping[str, CategorySummary], limit: int, samples: int) -> None:
    for name, summary in summaries.items():
        if len(summary.counts) > limit:
            raise BadInput(
                f"column {name!r} has {len(summary.counts):,} categories; at most {limit:,} are valid: name the "
                "columns to use with --columns."
            )
        if summary.missing < 0 or min(summary.counts.values(), default=1) < 1:
            raise BadInput(f"the statistics of column {name!r} have counts below 1.")
        if sum(summary.counts.values()) + summary.missing != samples:
            raise BadInput(f"the statistics of column {name!r} do not add up to {samples} samples.")
        for category in summary.counts:
            if not 0 < len(category) <= _MAXIMUM_LENGTH:
                raise BadInput(
                    f"column {name!r} has a category of {len(category)} characters; 1 to {_MAXIMUM_LENGTH} are valid: "
                    "name the columns to use with --columns."
                )
