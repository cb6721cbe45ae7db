"""Quantities of a run's summary, such as the honest accuracy: names, units, and which values are better."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from fedrema.errors import BadInput
from fedrema.tasks import METRICS, Metric

Kind = Literal["honest", "best", "final", "worst_tenth"]
KINDS: tuple[Kind, ...] = get_args(Kind)
WORST_TENTH = "worst_tenth"
PERCENT = 100
LARGE, HUGE = 999.5, 1e6
"""From these values on, a number is shown without decimals, and in scientific notation."""


@dataclass(frozen=True)
class Quantity:
    """One number per run: a metric in its best round, its honest or final value, or that of the worst tenth."""

    kind: Kind
    metric: Metric
    is_primary: bool = True
    """Whether the metric is the task's primary one."""

    @property
    def name(self) -> str:
        """Its key in summary.json."""
        if self.kind == WORST_TENTH:
            return WORST_TENTH if self.is_primary else f"{WORST_TENTH}_{self.metric.name}"
        return f"{self.kind}_{self.metric.name}"

    @property
    def words(self) -> str:
        """Its name in sentences."""
        if self.kind == WORST_TENTH:
            return "worst tenth" if self.is_primary else f"worst tenth by {self.metric.title}"
        return f"{self.kind} {self.metric.title}"

    @property
    def factor(self) -> int:
        """Factor from its value to the number that is shown."""
        return factor(self.metric)

    @property
    def sign(self) -> Literal[1, -1]:
        """1 if higher values are better, -1 if lower ones are."""
        return 1 if self.metric.higher_is_better else -1

    @property
    def difference_unit(self) -> str:
        """What differences are given in; for a metric without a unit, which of them are better."""
        if self.metric.percent:
            return "percentage points" if self.metric.higher_is_better else "percentage points; negative is better"
        return f"{'positive' if self.metric.higher_is_better else 'negative'} is better"

    def text(self, mean: float, spread: float | None = None) -> str:
        """Return a value as text, with its standard deviation if there is one."""
        return metric_text(self.metric, mean, spread)

    def signed(self, difference: float) -> str:
        """Return a difference as text."""
        return f"{PERCENT * difference:+.1f}" if self.metric.percent else signed_number(difference)

    def best(self, values: Iterable[float]) -> float:
        """Return the best of some values."""
        return max(values, key=lambda value: self.sign * value)


def find_quantity(wanted: str, primary: str, source: str = "--quantity") -> Quantity:
    """Return a quantity by its name: KIND, which is that of the primary metric, or KIND_METRIC."""
    for kind in KINDS:
        name = wanted.removeprefix(kind).removeprefix("_")
        if wanted.startswith(kind) and wanted in (kind, f"{kind}_{name}"):
            if not name:
                return Quantity(kind, METRICS[primary])
            if name in METRICS:
                return Quantity(kind, METRICS[name], name == primary)
    valid = f"{', '.join(KINDS)}, or one of them with a metric, such as honest_{primary}"
    raise BadInput(f"{source} {wanted!r} is unknown; valid are {valid}.")


def factor(metric: Metric) -> int:
    """Return the factor from a metric's value to the number that is shown."""
    return PERCENT if metric.percent else 1


def metric_text(metric: Metric, mean: float, spread: float | None = None) -> str:
    """Return a metric as text: in percent with one decimal, or with three significant digits."""
    if metric.percent:
        return f"{PERCENT * mean:.1f}" + ("" if spread is None else f" ± {PERCENT * spread:.1f}")
    shown = number(mean)
    if spread is None:
        return shown
    decimals = 0 if "e" in shown else len(shown.partition(".")[2])
    return f"{shown} ± {number(spread) if 'e' in shown else f'{spread:.{decimals}f}'}"


def with_unit(metric: Metric, value: float) -> str:
    """Return a metric as text, with its unit."""
    return f"{metric_text(metric, value)} %" if metric.percent else metric_text(metric, value)


def number(value: float) -> str:
    """Return a number with three significant digits; large ones without decimals."""
    if LARGE <= abs(value) < HUGE:
        return f"{value:.0f}"
    return f"{value:#.3g}".removesuffix(".") if value else "0"


def signed_number(value: float) -> str:
    """Return a number with its sign and three significant digits."""
    return f"{'-' if value < 0 else '+'}{number(abs(value))}"


def capitalised(title: str) -> str:
    """Return a title for the start of a sentence or an axis."""
    return f"{title[:1].upper()}{title[1:]}"


def axis_title(metric: Metric) -> str:
    """Return a metric's title with its unit."""
    return f"{capitalised(metric.title)} (%)" if metric.percent else capitalised(metric.title)


def explanation(metrics: Sequence[Metric], seeds: str = "seeds", best: str = "", worst_tenth: bool = True) -> str:
    """Explain the columns of a table whose first metric is the primary one; of the others it has the final values.

    `seeds` is what the mean is over; `best` is added to the explanation of the best value.
    """
    primary, *others = metrics
    unit, direction = " in percent" if primary.percent else "", "" if primary.higher_is_better else ", lower is better"
    text = (
        f"{capitalised(primary.title)}{unit}{direction}, mean ± standard deviation over {seeds}. best: the round is"
        f" chosen by the samples that score it{best}; honest: by the other half of them; final: mean of the last 5"
        " evaluated rounds"
    )
    if worst_tenth:
        extreme = "lowest" if primary.higher_is_better else "highest"
        text += f"; worst tenth: final, of the tenth of the clients with the {extreme} {primary.title}"
    return f"{text}.{_others(others)}"


def _others(metrics: Sequence[Metric]) -> str:
    if not metrics:
        return ""
    words = []
    for metric in metrics:
        facts = ["percent"] * metric.percent + ["lower is better"] * (not metric.higher_is_better)
        words.append(f"{metric.title} ({', '.join(facts)})" if facts else metric.title)
    return f" Also final: {', '.join(words)}."
