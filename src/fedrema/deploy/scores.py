"""Scores of a client's model: the sums from which metrics are computed, and the checks of those that a node sends."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedrema.deploy.limits import LARGEST_SUM, count, quoted
from fedrema.errors import BadInput
from fedrema.simulation.scoring import MetricSums
from fedrema.tasks import Metric, Task, find_metric

Quotient = tuple[float, float]
"""Numerator and denominator of a metric."""
Sums = tuple[Quotient, Quotient, Quotient]
"""Quotients of a metric over the first half, the second half and all of a client's test samples."""
ROUNDING = 1e-9
"""Relative error that sums may have."""


@dataclass(frozen=True)
class Score:
    """How well a model predicts a client's test samples."""

    total: tuple[int, int]
    """Number of test samples in each half."""
    sums: dict[str, Sums] = field(default_factory=dict)
    """By name of the metric, the primary one first."""

    @classmethod
    def of(cls, sums: MetricSums, samples: int) -> "Score | None":
        """Return the score of the only client; None without test samples."""
        if not samples:
            return None
        by_name = {name: tuple((float(n), float(d)) for n, d in found[0].tolist()) for name, found in sums.items()}
        return cls((samples - samples // 2, samples // 2), by_name)  # type: ignore[arg-type]  # three pairs

    def value(self, name: str) -> float | None:
        """Return a metric over all test samples; None where it is undefined."""
        return find_metric(name).value(*self.sums[name][2]) if name in self.sums else None

    def described(self) -> str:
        """Return the primary metric as text."""
        name = next(iter(self.sums))
        metric, value = find_metric(name), self.value(name)
        return f"{metric.title} {'undefined' if value is None else shown(metric, value)}"

    def facts(self, name: str) -> dict[str, list[int] | list[float]]:
        """Return the score as facts of a reply, whose names begin with `name`."""
        facts: dict[str, list[int] | list[float]] = {f"{name}-total": list(self.total)}
        return facts | {f"{name}-{metric}": [n for pair in sums for n in pair] for metric, sums in self.sums.items()}


def shown(metric: Metric, value: float) -> str:
    """Return the value of a metric as text."""
    return f"{metric.shown(value)}%" if metric.percent else metric.shown(value)


def joined_sums(scores: Sequence[Score], names: Iterable[str]) -> MetricSums:
    """Return the sums of several clients' scores for these metrics."""
    return {name: np.array([score.sums[name] for score in scores], np.float64).reshape(-1, 3, 2) for name in names}


@dataclass(frozen=True)
class ScoreChecks:
    """Checks of scores against the task and its metrics; what a node sends is not trusted."""

    task: Task
    metrics: tuple[Metric, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the metrics."""
        return tuple(metric.name for metric in self.metrics)

    @property
    def facts(self) -> set[str]:
        """The names of the facts that the scores in a reply consist of."""
        return {f"{name}-{part}" for name in ("received", "trained") for part in ("total", *self.names)}

    def read(self, facts: Mapping[str, Any], name: str) -> Score | None:
        """Return the score whose facts begin with `name`; None if there is none."""
        given = {part: facts.get(f"{name}-{part}") for part in ("total", *self.names)}
        if all(value is None for value in given.values()):
            return None
        total = given.pop("total")
        if not isinstance(total, list) or len(total) != 2:
            raise BadInput(f"its {name} score must be over a pair of numbers of samples, got {quoted(repr(total))}")
        first, second = (count(number, f"{name} score") for number in total)
        samples = (first, second, first + second)
        sums = {metric.name: self._sums(name, metric, given[metric.name], samples) for metric in self.metrics}
        return Score((first, second), sums)

    def _sums(self, name: str, metric: Metric, given: object, samples: tuple[int, int, int]) -> Sums:
        """Return the checked sums of a metric over the halves and over all samples."""
        if not isinstance(given, list) or len(given) != 6:
            raise BadInput(f"its {name} score must have six numbers for {metric.title}, got {quoted(repr(given))}")
        numbers = [self._number(name, metric, number) for number in given]
        sums: Sums = ((numbers[0], numbers[1]), (numbers[2], numbers[3]), (numbers[4], numbers[5]))
        for (numerator, denominator), expected in zip(sums, samples, strict=True):
            valid = {"samples": (expected,), "samples or 0": (expected, 0), "other": (denominator,)}[metric.denominator]
            if denominator not in valid:
                raise BadInput(
                    f"its {name} score has {metric.title} over {denominator:g} samples instead of {expected}"
                )
            if denominator < 0 or numerator < -ROUNDING * (1 + denominator):
                raise BadInput(f"its {name} score has a negative {metric.title}: {numerator:g} of {denominator:g}")
            largest = metric.highest * denominator if denominator else 0.0
            if metric.denominator != "other" and numerator > largest * (1 + ROUNDING):
                raise BadInput(_too_high(name, metric, sums, samples))
        parts = sums[0][0] + sums[1][0]
        if metric.denominator == "samples" and not abs(parts - sums[2][0]) <= ROUNDING * (1 + abs(parts)):
            raise BadInput(f"its {name} score has {metric.title} {sums[2][0]:g} in all, but {parts:g} in both halves")
        return sums

    def _number(self, name: str, metric: Metric, value: object) -> float:
        whole = metric.name == "accuracy" and self.task.name != "multilabel"  # a number of correct predictions
        if whole and isinstance(value, float) and value.is_integer():
            return float(count(int(value), f"{name} score"))
        if whole:
            return float(count(value, f"{name} score"))
        if type(value) not in (int, float) or not abs(value) <= LARGEST_SUM:  # type: ignore[arg-type]  # int or float
            raise BadInput(f"its {name} score must have finite numbers for {metric.title}, got {quoted(repr(value))}")
        return float(value)  # type: ignore[arg-type]


def _too_high(name: str, metric: Metric, sums: Sums, samples: tuple[int, int, int]) -> str:
    if metric.name == "accuracy":
        (first, _), (second, _), _ = sums
        return (
            f"its {name} score has {first:.0f} and {second:.0f} correct predictions of {samples[0]} and {samples[1]}"
            " samples"
        )
    return f"its {name} score has {metric.title} above {metric.highest:g}"
