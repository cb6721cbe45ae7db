"""Preprocessing of tables: scaling, imputation and encoding, fitted from statistics of the sites."""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedrema.base.memory import check_fits
from fedrema.data.checks import list_names
from fedrema.data.roles import TableOptions
from fedrema.data.statistics import Statistics, check_statistics, local_statistics, merge_statistics
from fedrema.data.table import CategoryColumn, ImageColumn, NumberColumn, Table
from fedrema.data.text_columns import Kind
from fedrema.errors import BadInput

__all__ = [
    "CategoryRule",
    "ImageRule",
    "NumberRule",
    "Preprocessing",
    "check_statistics",
    "fit_preprocessing",
    "local_statistics",
    "merge_statistics",
]

log = logging.getLogger("fedrema")
_ROWS = 65_536
"""Rows that are transformed at once, to keep temporary arrays small."""
_OTHER = "(other)"


@dataclass(frozen=True)
class NumberRule:
    """How a column of numbers is imputed and scaled."""

    column: str
    mean: float
    """Mean of the training values of all sites; also replaces missing values."""
    deviation: float
    """Standard deviation of the training values of all sites; 1 for constant values."""
    indicator: bool
    """Whether a second output column says whether the value was missing."""
    unit: str = ""
    sites: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Mean and standard deviation of each site, if each site scales its values by its own."""


@dataclass(frozen=True)
class CategoryRule:
    """How a column of categories is encoded."""

    column: str
    categories: tuple[str, ...]
    """All categories of the sites' training samples, sorted; others share one further code."""


@dataclass(frozen=True)
class ImageRule:
    """The size that images must have."""

    column: str
    channels: int
    height: int
    width: int


@dataclass(frozen=True)
class Preprocessing:
    """How the columns of a table become the inputs of a network."""

    inputs: tuple[str, ...]
    """The input columns of the table, in their order; also those that are left out."""
    numbers: tuple[NumberRule, ...] = ()
    categories: tuple[CategoryRule, ...] = ()
    images: tuple[ImageRule, ...] = ()
    """At most one."""
    scale: Literal["federation", "site", "none"] = "federation"
    encoding: Literal["onehot", "embed"] = "onehot"
    left_out: dict[str, str] = field(default_factory=dict)
    """Columns that are not used, with the reason."""

    @property
    def used(self) -> tuple[str, ...]:
        """The input columns that are not left out."""
        return tuple(name for name in self.inputs if name not in self.left_out)

    @property
    def output_names(self) -> tuple[str, ...]:
        """Names of the columns that `transform` returns; empty for images."""
        return tuple(name for rule in self._rules() for name in self._names_of(rule))

    @property
    def cardinalities(self) -> tuple[int, ...]:
        """Number of codes of each column that `transform` returns; 0 for columns that do not hold codes."""
        found: list[int] = []
        for rule in self._rules():
            if isinstance(rule, CategoryRule) and self.encoding == "embed":
                found.append(len(rule.categories) + 1)
            else:
                found += [0] * len(self._names_of(rule))
        return tuple(found)

    def kinds(self) -> dict[str, Kind]:
        """Return what the columns of further tables must hold."""
        numbers = {rule.column: Kind.DATE if rule.unit else Kind.NUMBER for rule in self.numbers}
        return numbers | {rule.column: Kind.TEXT for rule in self.categories}

    def transform(self, table: Table, order: NDArray[np.integer] | None = None) -> NDArray[Any]:
        """Return the inputs of a network for the rows of a table, or for its rows `order`.

        They are float32 [N, columns]; int32 if all columns hold codes for embeddings; uint8 [N, channels, height,
        width] for images. Clients without statistics of their own are scaled by those of the federation.
        """
        if missing := [name for name in self.used if name not in table.inputs]:
            raise BadInput(f"column {missing[0]!r} is missing; the columns are {list_names(list(table.inputs))}.")
        if self.images:
            return self._pixels(table) if order is None else self._pixels(table)[order]
        width = len(self.output_names)
        kind = np.int32 if self.categories and all(self.cardinalities) else np.float32
        samples = len(table) if order is None else len(order)
        check_fits(4 * samples * width, f"{samples:,} samples with {width:,} columns after preprocessing need")
        x = np.zeros((samples, width), kind)
        codes = {rule.column: self._codes(rule, table) for rule in self.categories}
        _warn_unseen(codes, {rule.column: len(rule.categories) for rule in self.categories}, table)
        scales = {rule.column: _scales(rule, table) for rule in self.numbers} if self.scale == "site" else {}
        for start in range(0, samples, _ROWS):
            block = x[start : start + _ROWS]
            rows = np.arange(start, start + len(block)) if order is None else order[start : start + len(block)]
            place = 0
            for rule in self._rules():
                if isinstance(rule, NumberRule):
                    self._fill_numbers(block, place, rule, table, rows, scales.get(rule.column))
                elif self.encoding == "embed":
                    block[:, place] = codes[rule.column][rows]
                else:
                    block[np.arange(len(block)), place + codes[rule.column][rows]] = 1
                place += len(self._names_of(rule))
        return x

    def describe(self) -> list[dict[str, object]]:
        """Return one entry per column of the table, for model cards and reports."""
        entries: dict[str, dict[str, object]] = {
            name: {"column": name, "kind": "left out", "reason": reason} for name, reason in self.left_out.items()
        }
        for rule in self.numbers:
            entries[rule.column] = {
                "column": rule.column, "kind": rule.unit or "number", "scale": self.scale, "mean": rule.mean,
                "standard deviation": rule.deviation, "missing": "mean and indicator" if rule.indicator else "mean",
            }  # fmt: skip
        for each in self.categories:
            entries[each.column] = {
                "column": each.column, "kind": "category", "encoding": self.encoding,
                "categories": list(each.categories),
            }  # fmt: skip
        for image in self.images:
            entries[image.column] = {
                "column": image.column, "kind": "image", "channels": image.channels, "height": image.height,
                "width": image.width,
            }  # fmt: skip
        return [entries[name] for name in self.inputs]

    def _rules(self) -> Iterator[NumberRule | CategoryRule]:
        rules: dict[str, NumberRule | CategoryRule] = {rule.column: rule for rule in self.numbers}
        rules |= {rule.column: rule for rule in self.categories}
        return (rules[name] for name in self.inputs if name in rules)

    def _names_of(self, rule: NumberRule | CategoryRule) -> list[str]:
        if isinstance(rule, NumberRule):
            return [rule.column, f"{rule.column} is missing"] if rule.indicator else [rule.column]
        if self.encoding == "embed":
            return [rule.column]
        return [f"{rule.column}={name}" for name in (*rule.categories, _OTHER)]

    def _pixels(self, table: Table) -> NDArray[np.uint8]:
        (rule,) = self.images
        column = table.inputs[rule.column]
        if not isinstance(column, ImageColumn):
            raise BadInput(f"column {rule.column!r} holds no images.")
        expected = (rule.channels, rule.height, rule.width)
        if column.pixels.shape[1:] != expected:
            raise BadInput(f"the images have the shape {column.pixels.shape[1:]}; the federation's have {expected}.")
        return column.pixels

    def _codes(self, rule: CategoryRule, table: Table) -> NDArray[np.int32]:
        """Return the code of each sample; the last code is for missing and unknown categories."""
        column = table.inputs[rule.column]
        other = len(rule.categories)
        if isinstance(column, NumberColumn) and np.isnan(column.values).all():
            return np.full(len(table), other, np.int32)
        if not isinstance(column, CategoryColumn):
            raise BadInput(f"column {rule.column!r} must hold text, as in the federation.")
        place = {name: code for code, name in enumerate(rule.categories)}
        codes = np.array([*(place.get(name, other) for name in column.categories), other], np.int32)
        return codes[column.codes]

    def _fill_numbers(
        self,
        x: NDArray[Any],
        place: int,
        rule: NumberRule,
        table: Table,
        rows: NDArray[np.integer],
        scales: tuple[NDArray[np.float64], NDArray[np.float64]] | None,
    ) -> None:
        column = table.inputs[rule.column]
        if not isinstance(column, NumberColumn):
            raise BadInput(f"column {rule.column!r} must hold numbers, as in the federation.")
        values = column.values[rows].astype(np.float64)
        missing = np.isnan(values)
        if self.scale == "none":
            values[missing] = rule.mean
        else:
            client = table.client[rows]
            mean, deviation = (rule.mean, rule.deviation) if scales is None else (each[client] for each in scales)
            values = (values - mean) / deviation
            values[missing] = 0.0
        too_large = np.abs(values) > float(np.finfo(np.float32).max)
        if too_large.any():
            row = int(rows[np.argmax(too_large)])
            raise BadInput(
                f"column {rule.column!r} has {column.values[row]:g} in {table.where(row)}, which is too large for "
                "float32; use another --scale."
            )
        x[:, place] = values
        if rule.indicator:
            x[:, place + 1] = missing


def fit_preprocessing(
    merged: Statistics, options: TableOptions, sites: Mapping[str, Statistics] | None = None
) -> Preprocessing:
    """Return the preprocessing that follows from the merged statistics of all sites.

    `sites` are the statistics of the individual sites, which `--scale site` needs. In a deployment a site has only its
    own.
    """
    numbers: list[NumberRule] = []
    categories: list[CategoryRule] = []
    images: list[ImageRule] = []
    left_out: dict[str, str] = {}
    for name in merged.inputs:
        if name in merged.images:
            images.append(ImageRule(name, *merged.images[name]))
        elif name in merged.numbers:
            summary = merged.numbers[name]
            if not summary.count:
                left_out[name] = "all training values are missing"
            elif summary.m2 == 0 and not summary.missing:
                left_out[name] = f"all training values are {summary.mean:g}"
            else:
                own = {
                    site: (part.numbers[name].mean, part.numbers[name].deviation or 1.0)
                    for site, part in (sites or {}).items()
                    if options.scale == "site" and name in part.numbers and part.numbers[name].count
                }
                unit, indicator = merged.units.get(name, ""), summary.missing > 0
                numbers.append(NumberRule(name, summary.mean, summary.deviation or 1.0, indicator, unit, own))
        else:
            texts = merged.categories[name]
            if not texts.counts:
                left_out[name] = "all training values are missing"
            elif len(texts.counts) == 1 and not texts.missing:
                left_out[name] = f"all training values are {min(texts.counts)!r}"
            else:
                categories.append(CategoryRule(name, tuple(sorted(texts.counts))))
    if not numbers and not categories and not images:
        raise BadInput(f"no column can be used: all of them ({list_names(list(merged.inputs))}) are constant or empty.")
    return Preprocessing(
        merged.inputs, tuple(numbers), tuple(categories), tuple(images), options.scale, options.categories, left_out
    )


def _scales(rule: NumberRule, table: Table) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return mean and standard deviation for each client of a table."""
    pairs = [rule.sites.get(name, (rule.mean, rule.deviation)) for name in table.names]
    means, deviations = np.array(pairs, np.float64).T
    return means, deviations


def _warn_unseen(codes: Mapping[str, NDArray[np.int32]], others: Mapping[str, int], table: Table) -> None:
    """Log how many samples have categories that no training sample has."""
    unseen: dict[str, int] = {}
    for name, values in codes.items():
        column = table.inputs[name]
        if isinstance(column, CategoryColumn):
            unseen[name] = int(((values == others[name]) & (column.codes >= 0)).sum())
    if total := sum(unseen.values()):
        columns = list_names([f"{name} ({count})" for name, count in unseen.items() if count])
        log.warning(
            "Warning: %d values are categories that no training sample has; they are encoded as other: %s.",
            total,
            columns,
        )
