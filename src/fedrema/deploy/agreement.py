"""What the nodes agree on before round 1: preprocessing of tables, names and counts of classes, scale of the target.

Each node sends statistics of its training samples. The server checks them, merges them, and fits the agreement, which
it then sends with every request. The samples stay on their nodes.
"""

import json
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from fedrema.config.settings import Settings
from fedrema.data.checks import list_names
from fedrema.data.preprocessing import Preprocessing, fit_preprocessing
from fedrema.data.roles import TableOptions
from fedrema.data.statistics import (
    CategorySummary,
    NumberSummary,
    Statistics,
    check_statistics,
    merge_numbers,
    merge_statistics,
)
from fedrema.data.table import sorted_categories
from fedrema.data.text_columns import DAYS
from fedrema.deploy.limits import LARGEST_COUNT, LARGEST_SUM, quoted
from fedrema.deploy.refusals import Refusal, Refused, refusing
from fedrema.deploy.run_config import Plan
from fedrema.errors import BadInput

LARGEST_MESSAGE = 10**7
"""Bytes of a node's statistics."""
LONGEST_NAME = 200
"""Characters of the name of a class."""
IMBALANCE = 10
"""A node may have this many times as many samples, or categories in a column, as the median node."""
FEW = 10
"""Smallest median number of samples or categories that limits are computed from."""
LARGEST_RATIO = 1000
"""A node's values in a column may be this many times as large as the median node's: more is another unit."""


@dataclass(frozen=True)
class Needs:
    """What a federation has to agree on."""

    columns: tuple[str, ...] = ()
    """Input columns of tables, for which preprocessing is fitted."""
    moments: bool = True
    """Whether mean and standard deviation of columns are needed; not if each node scales by its own."""
    class_names: bool = False
    class_counts: bool = False
    target: bool = False
    """Whether mean and standard deviation of the target are needed."""

    @classmethod
    def of(cls, settings: Settings, plan: Plan) -> "Needs":
        """Return what the settings and the plan leave open."""
        task = plan.predicted
        return cls(
            listed(settings.data.columns) if plan.is_table else (),
            settings.data.scale != "site",
            task.has_classes and not plan.classes,
            task.has_classes and settings.local.class_weights == "balanced" and not plan.class_counts,
            not task.has_classes and not plan.target_scale,
        )

    def __bool__(self) -> bool:
        return bool(self.columns) or self.class_names or self.class_counts or self.target


def listed(names: str | None) -> tuple[str, ...]:
    """Return names that are separated by commas."""
    return tuple(name.strip() for name in (names or "").split(",") if name.strip())


@dataclass(frozen=True)
class NodeStatistics:
    """What a node sends before round 1; only what the federation needs."""

    samples: int
    """Number of training samples."""
    columns: Statistics | None = None
    """Statistics of the input columns of a table."""
    classes: dict[str, int] = field(default_factory=dict)
    """Names of the classes that occur, with their training samples; 0 where these are not needed."""
    target: NumberSummary | None = None
    """Count, mean and spread of the target."""

    def encoded(self) -> bytes:
        """Return the statistics as a message."""
        return msgspec.json.encode(self)

    def described(self, needs: Needs) -> str:
        """Return in one sentence what they reveal, for the log of the node."""
        parts = []
        if self.columns is not None:
            what = "count, mean and variance" if needs.moments else "count"
            parts += [f"{what} of {name}" for name in self.columns.numbers]
            parts += [f"names and counts of {name}'s categories" for name in self.columns.categories]
        parts += ["names and counts of the classes"] * bool(self.classes)
        parts += ["mean and variance of the target"] * (self.target is not None)
        return f"sent statistics of {self.samples} training samples: {', '.join(parts)}"


@dataclass(frozen=True)
class Agreement:
    """What all nodes use from round 1 on."""

    preprocessing: Preprocessing | None = None
    class_names: tuple[str, ...] = ()
    class_counts: tuple[int, ...] = ()
    centre: float = 0.0
    scale: float = 0.0

    def encoded(self) -> bytes:
        """Return the agreement as a message."""
        return msgspec.json.encode(self)

    @classmethod
    def decoded(cls, message: bytes) -> "Agreement":
        """Return the agreement in a message."""
        try:
            return msgspec.json.decode(message, type=cls)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise BadInput(f"the preprocessing that the server sent cannot be read: {quoted(str(error))}") from error

    def within(self, settings: Settings, plan: Plan) -> Plan:
        """Return the plan with an agreement that a server sent; refuses what the approved plan does not leave open."""
        needs = Needs.of(settings, plan)
        sent = {
            "preprocessing": (self.preprocessing is not None, bool(needs.columns)),
            "the names of the classes": (bool(self.class_names), needs.class_names),
            "the numbers of samples of the classes": (bool(self.class_counts), needs.class_counts),
            "the scale of the target": (bool(self.centre or self.scale), needs.target),
        }
        for what, (is_sent, is_open) in sent.items():
            if is_sent != is_open:
                raise Refused(Refusal.AGREEMENT, what=what)
        if self.preprocessing is not None and not _fits(self.preprocessing, needs, settings):
            raise Refused(Refusal.AGREEMENT, what="other preprocessing")
        if self.scale and not (0 < self.scale < math.inf and math.isfinite(self.centre)):
            raise Refused(Refusal.AGREEMENT, what="an infinite scale of the target")
        with refusing(Refusal.REQUEST):
            return self.applied(plan)

    def applied(self, plan: Plan) -> Plan:
        """Return the plan with everything that the nodes have agreed on."""
        changes: dict[str, str | int | float] = {}
        if self.preprocessing is not None:
            changes["sample_shape"] = "x".join(map(str, input_shape(self.preprocessing)))
        if self.class_names:
            changes |= {"classes": len(self.class_names), "class_names": json.dumps(self.class_names)}
        if self.class_counts:
            changes["class_counts"] = json.dumps(self.class_counts)
        if self.scale:
            changes |= {"target_centre": self.centre, "target_scale": self.scale}
        return replace(plan, **changes)  # type: ignore[arg-type]  # by name


def _fits(preprocessing: Preprocessing, needs: Needs, settings: Settings) -> bool:
    """Return whether preprocessing is for the columns of the federation, and as its settings say."""
    numbers, categories = preprocessing.numbers, preprocessing.categories
    named = [*(rule.column for rule in numbers), *(rule.column for rule in categories), *preprocessing.left_out]
    finite = all(math.isfinite(rule.mean) and 0 < rule.deviation < math.inf for rule in numbers)
    options = settings.data.table_options
    as_approved = (preprocessing.scale, preprocessing.encoding) == (options.scale, options.categories)
    columns = preprocessing.inputs == needs.columns and sorted(named) == sorted(needs.columns)
    return finite and as_approved and columns and not preprocessing.images


def input_shape(preprocessing: Preprocessing) -> tuple[int, ...]:
    """Return the shape of a sample after preprocessing."""
    if preprocessing.images:
        (rule,) = preprocessing.images
        return rule.channels, rule.height, rule.width
    return (len(preprocessing.output_names),)


def read_statistics(message: object, needs: Needs) -> NodeStatistics:
    """Return the statistics in a message from a node; refuses any that are malformed or not as needed."""
    if not isinstance(message, bytes) or len(message) > LARGEST_MESSAGE:
        raise BadInput(f"its statistics must be at most {LARGEST_MESSAGE} bytes")
    try:
        found = msgspec.json.decode(message, type=NodeStatistics)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise BadInput(f"its statistics cannot be read: {quoted(str(error))}") from error
    if not 1 <= found.samples <= LARGEST_COUNT:
        raise BadInput(f"its statistics are of {found.samples} training samples")
    if (found.columns is not None) != bool(needs.columns) or (found.target is not None) != needs.target:
        raise BadInput("its statistics are not those that the federation needs")
    if found.columns is not None:
        found = replace(found, columns=_checked_columns(found.columns, found.samples, needs))
    if found.target is not None:
        _check_moments("the target", found.target, found.samples)
        if found.target.count != found.samples:
            raise BadInput("its statistics have missing targets")
    _check_classes(found, needs)
    return found


def _checked_columns(found: Statistics, samples: int, needs: Needs) -> Statistics:
    try:
        check_statistics(found, needs.columns)
    except BadInput as error:
        raise BadInput(f"its statistics are not valid: {quoted(str(error))}") from error
    if found.samples != samples:
        raise BadInput(f"its statistics are of {found.samples} and of {samples} training samples")
    if found.images or not set(found.units.values()) <= {DAYS}:
        raise BadInput("its statistics have images or units, which a table of this federation cannot have")
    for name, numbers in found.numbers.items():
        _check_moments(f"column {name!r}", numbers, samples)
    return replace(found, inputs=needs.columns)  # in the order of the federation


def _check_moments(what: str, numbers: NumberSummary, samples: int) -> None:
    valid = min(numbers.count, numbers.missing) >= 0 and numbers.count + numbers.missing == samples
    if not valid or not abs(numbers.mean) <= LARGEST_SUM or not 0 <= numbers.m2 <= LARGEST_SUM:
        raise BadInput(
            f"its statistics of {what} are not valid: counts, a finite mean and a finite variance are needed"
        )


def _check_classes(found: NodeStatistics, needs: Needs) -> None:
    needed = needs.class_names or needs.class_counts
    if bool(found.classes) != needed:
        raise BadInput("its statistics must have the names of classes if, and only if, the federation needs them")
    if any(not 0 < len(name) <= LONGEST_NAME for name in found.classes):
        raise BadInput(f"its statistics have names of classes that are empty or longer than {LONGEST_NAME} characters")
    if any(not 0 <= count <= found.samples for count in found.classes.values()):
        raise BadInput(f"its statistics have classes with more than its {found.samples} training samples")


def unusual(found: Mapping[str, NodeStatistics], most_samples: int = 0) -> dict[str, str]:
    """Return the nodes whose statistics differ too much from the other nodes' to be used, and why."""
    refused: dict[str, str] = {}
    median = max(FEW, statistics.median_low([each.samples for each in found.values()] or [0]))
    most = most_samples or IMBALANCE * median
    for name, each in found.items():
        if each.samples > most:
            refused[name] = f"it reports {each.samples} training samples, more than {most} (--most-samples)"
    for get, what in _compared(found):
        values = {name: value for name, each in found.items() if (value := get(each)) is not None}
        refused = _other_kind(values, what) | _too_large(values, what) | refused
    return refused


def _compared(found: Mapping[str, NodeStatistics]) -> list[tuple["_Get", str]]:
    """Return functions that get the summary of each column, and of the target, from a node's statistics."""
    names = next((each.columns.inputs for each in found.values() if each.columns is not None), ())
    parts: list[tuple[_Get, str]] = [(_Get(name), f"column {name!r}") for name in names]
    return [*parts, (_Get(None), "the target")]


@dataclass(frozen=True)
class _Get:
    column: str | None
    """None: the target."""

    def __call__(self, found: NodeStatistics) -> NumberSummary | CategorySummary | None:
        if self.column is None:
            return CategorySummary(found.classes) if found.classes else found.target
        columns = found.columns
        assert columns is not None
        numbers = columns.numbers.get(self.column)
        if numbers is not None and not numbers.count:
            return None  # without values, their kind is not known
        return numbers if numbers is not None else columns.categories.get(self.column)


def _other_kind(values: Mapping[str, NumberSummary | CategorySummary], what: str) -> dict[str, str]:
    """Return the nodes with text where most have numbers, or the other way round."""
    texts = [name for name, value in values.items() if isinstance(value, CategorySummary)]
    numbers = [name for name in values if name not in texts]
    if not texts or not numbers:
        return {}
    if len(texts) == len(numbers):
        why = f"{what} holds text at {list_names(texts)} and numbers at {list_names(numbers)}"
        return dict.fromkeys(values, why)
    few, here, there = (texts, "text", "numbers") if len(texts) < len(numbers) else (numbers, "numbers", "text")
    return dict.fromkeys(few, f"{what} holds {here} at this node, but {there} at most others")


def _too_large(values: Mapping[str, NumberSummary | CategorySummary], what: str) -> dict[str, str]:
    """Return the nodes with many more categories, or much larger numbers, than the median node."""
    counts = {name: len(value.counts) for name, value in values.items() if isinstance(value, CategorySummary)}
    most = IMBALANCE * max(FEW, statistics.median_low([*counts.values(), *([] if counts else [0])]))
    refused = {
        name: f"{what} has {count} categories at this node, more than {IMBALANCE} times the median"
        for name, count in counts.items()
        if count > most
    }
    sizes = {
        name: (value.mean**2 + value.deviation**2) ** 0.5
        for name, value in values.items()
        if isinstance(value, NumberSummary) and value.count
    }
    usual = statistics.median_low([*sizes.values(), *([] if sizes else [0])])
    return refused | {
        name: f"the values of {what} are {size / usual:.0f} times as large at this node as at the median one"
        for name, size in sizes.items()
        if usual and size > LARGEST_RATIO * usual
    }


def agree(found: Mapping[str, NodeStatistics], needs: Needs, plan: Plan, options: TableOptions) -> Agreement:
    """Return the agreement that follows from the checked statistics of all nodes."""
    ordered = [found[name] for name in sorted(found)]
    preprocessing = None
    if needs.columns:
        merged = merge_statistics([each.columns for each in ordered if each.columns is not None])
        preprocessing = fit_preprocessing(check_statistics(merged, needs.columns), options)
    names = sorted_categories(list({name for each in ordered for name in each.classes}))
    if needs.class_names and len(names) < 2:
        raise BadInput(f"the nodes have samples of a single class, {list_names(names)}; there must be at least two.")
    if needs.class_names and plan.task == "binary" and len(names) != 2:
        raise BadInput(f"the task binary needs two classes, but the nodes have {list_names(names)}.")
    known = tuple(names) if needs.class_names else plan.names
    counts = tuple(sum(each.classes.get(name, 0) for each in ordered) for name in known) if needs.class_counts else ()
    centre = scale = 0.0
    if needs.target:
        target = NumberSummary()
        for each in ordered:
            assert each.target is not None
            target = merge_numbers(target, each.target)
        centre, scale = target.mean, (target.deviation if plan.task == "regression" else 1.0) or 1.0
    return Agreement(preprocessing, tuple(names) if needs.class_names else (), counts, centre, scale)
