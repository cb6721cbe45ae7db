"""An experiment as a table: our results next to published ones, the difference, and whether it exceeds noise."""

import csv
import io
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from fedrema.errors import BadInput
from fedrema.experiments.finished_run import FinishedRun
from fedrema.experiments.spec import Cell, Experiment, Published
from fedrema.experiments.store import Store
from fedrema.experiments.tasks import finished_runs, on_one_partition
from fedrema.reporting.latex import escaped, tabular
from fedrema.reporting.quantities import Quantity, axis_title, explanation, find_quantity, metric_text, signed_number
from fedrema.reporting.statistics import welch_interval
from fedrema.reporting.tables import markdown_lines
from fedrema.tasks import METRICS, Metric

AS_PAPERS = ", as papers report it"
SEEDS = {"training": "training seeds", "both": "replicates, each with its own partition and training seed"}
ABOUT_PUBLISHED = (
    " Within noise: Welch's 95 % interval of the difference contains 0; both need a deviation and at least two {}."
)
ABOUT_ALSO = " In brackets: what was published."
ABOUT_SECONDS = " Seconds: of all rounds; rounds that compile programs are counted like the others."
ABOUT_SHARED = " Seconds marked * were taken while other runs shared the device."
ABOUT_OUTDATED = " Marked †: computed by an older revision of the method or of the engine; run it again."
ABOUT_ONE_PARTITION = " Several runs marked † of one cell are training seeds on one partition, not replicates."
MISSING = "–"
OUTDATED = "†"


@dataclass(frozen=True)
class Statistic:
    """Mean and standard deviation over seeds; shares such as accuracies in percent."""

    mean: float
    deviation: float
    count: int
    metric: Metric | None = None
    """The metric that it is a value of."""

    def __str__(self) -> str:
        deviation = self.deviation if self.count > 1 else None
        if self.metric is not None and not self.metric.percent:
            return metric_text(self.metric, self.mean, deviation)
        return f"{self.mean:.1f}" if deviation is None else f"{self.mean:.1f} ± {deviation:.1f}"


def primary_of(runs: Iterable[FinishedRun]) -> str:
    """Return the name of the runs' primary metric; refuses runs of different tasks."""
    names = list(dict.fromkeys(run.summary.primary for run in runs if run.summary.primary is not None))
    if len(names) > 1:
        raise BadInput(f"The runs of a grid need the same primary metric, but these have {' and '.join(names)}.")
    return names[0] if names else "accuracy"


def measured(quantity: str, runs: Iterable[FinishedRun]) -> Quantity:
    """Return a quantity of runs by its name in a grid file."""
    return find_quantity(quantity, primary_of(runs), "quantity")


def values_of(runs: list[FinishedRun], quantity: str) -> dict[int, float]:
    """Return a quantity by seed, for runs that have it; shares in percent."""
    if quantity == "seconds":
        return {run.seed: run.seconds for run in runs if not run.failed}
    name, scale = (quantity, 1) if quantity.endswith("_rounds") else _name_and_factor(measured(quantity, runs))
    found = {run.seed: run.summary.get(name) for run in runs}
    return {seed: scale * float(value) for seed, value in found.items() if value is not None}


def _name_and_factor(quantity: Quantity) -> tuple[str, int]:
    return quantity.name, quantity.factor


def statistic(runs: list[FinishedRun], quantity: str) -> Statistic | None:
    """Return mean and deviation of a quantity over a cell's runs; None where no run has it."""
    values = list(values_of(runs, quantity).values())
    if not values:
        return None
    metric = None if quantity == "seconds" or quantity.endswith("_rounds") else measured(quantity, runs).metric
    return Statistic(statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0, len(values), metric)


def within_noise(ours: Statistic, published: Published, published_seeds: int) -> bool | None:
    """Whether Welch's 95 % interval of the difference contains 0; None where there is no such interval."""
    if published.deviation is None or min(ours.count, published_seeds) < 2:
        return None
    low, high = welch_interval(
        ours.mean - published.mean, (ours.deviation, ours.count), (published.deviation, published_seeds)
    )
    return low <= 0 <= high


class Sheet:
    """The table of an experiment, with the runs that have finished."""

    def __init__(self, experiment: Experiment, seeds: int, store: Store) -> None:
        self.experiment = experiment
        self.compares = any(cell.published for cell in experiment.cells)
        self.columned = any(cell.column.title for cell in experiment.cells)
        self.runs = {(cell.row.name, cell.column.name): finished_runs(cell, seeds, store) for cell in experiment.cells}
        every = [run for runs in self.runs.values() for run in runs]
        self.periods = list(dict.fromkeys(f"{name}_rounds" for run in every for name in run.summary.period_rounds))
        """Names of the quantities that count the rounds of a method's period."""
        self.quantity = measured(experiment.quantity, every)
        self.primary = METRICS[primary_of(every)]
        names = [name for run in every for name in run.summary.metrics if name != self.primary.name]
        self.others = [METRICS[name] for name in dict.fromkeys(names)]
        """Metrics of which only the final value is shown."""
        self.shared = any(run.shared_device for run in every)
        self.outdated = any(run.outdated for run in every)
        self.on_one_partition = any(
            on_one_partition(cell, self.runs[cell.row.name, cell.column.name]) for cell in experiment.cells
        )
        self.lines = [self._line(cell) for cell in experiment.cells]

    @property
    def headings(self) -> list[str]:
        """The headings of the columns."""
        published = ["published", "difference", "within noise"] if self.compares else []
        # Accuracy is not named in the headings: it is in percent, as in the tables of papers.
        metric = "" if self.primary.name == "accuracy" else f" {_with_unit(self.primary)}"
        kinds = [f"best{metric} (peeks)", *published, f"honest{metric}", f"final{metric}"]
        first = ["method", *(["data"] if self.columned else []), self.experiment.replicates, *kinds]
        return [*first, *(f"final {_with_unit(other)}" for other in self.others), *self.details]

    @property
    def details(self) -> list[str]:
        """The headings of the last columns, which a narrow terminal leaves out."""
        return [*(name.replace("_", " ") for name in self.periods), "seconds"]

    @property
    def explanation(self) -> str:
        """What the columns mean."""
        with_what = f" Published numbers are compared with {self.quantity.words}."
        seeds = SEEDS[self.experiment.cells[0].vary]
        sentences = [explanation([self.primary, *self.others], seeds, AS_PAPERS, worst_tenth=False)]
        sentences += [with_what + ABOUT_PUBLISHED.format(self.experiment.replicates)] if self.compares else []
        sentences += [ABOUT_ALSO] if self.experiment.also else []
        sentences += [ABOUT_OUTDATED] if self.outdated else []
        sentences += [ABOUT_ONE_PARTITION] if self.on_one_partition else []
        return "".join(sentences)

    def _line(self, cell: Cell) -> list[str]:
        runs = self.runs[cell.row.name, cell.column.name]
        current = [run for run in runs if not run.outdated]
        diverged = sum(bool(run.failed) for run in current)
        older = len(runs) - len(current)
        count = f"{len(current) - diverged}" + (f", {diverged} diverged" if diverged else "")
        count += f", {older} outdated" if older else ""
        return [
            cell.row.title,
            *([cell.column.title] if self.columned else []),
            count,
            self._text(cell, runs, f"best_{self.primary.name}"),
            *(self._compared(runs, cell.published) if self.compares else []),
            self._text(cell, runs, f"honest_{self.primary.name}"),
            *(self._text(cell, runs, f"final_{metric.name}") for metric in (self.primary, *self.others)),
            *(self._text(cell, runs, name) for name in self.periods),
            self._text(cell, runs, "seconds") + ("*" if any(run.shared_device for run in runs) else ""),
        ]

    def _text(self, cell: Cell, runs: list[FinishedRun], quantity: str) -> str:
        found, published = statistic(runs, quantity), self.experiment.also.get(quantity, {}).get(cell.row.name)
        shown = MISSING if found is None else f"{found.mean:.3g}" if quantity == "seconds" else str(found)
        shown += OUTDATED if found is not None and any(run.outdated for run in runs) else ""
        return shown if published is None else f"{shown} ({published:g})"

    def _compared(self, runs: list[FinishedRun], published: Published | None) -> list[str]:
        ours, mark = statistic(runs, self.experiment.quantity), OUTDATED if any(run.outdated for run in runs) else ""
        if published is None:
            return [MISSING] * 3
        metric = self.quantity.metric
        count = 1 if published.deviation is None else 2  # with one, no deviation is shown
        shown = str(Statistic(published.mean, published.deviation or 0.0, count, metric))
        if ours is None:
            return [shown, MISSING, MISSING]
        verdict = within_noise(ours, published, self.experiment.seeds)
        noise = {None: MISSING, True: "yes", False: "no"}[verdict]
        difference = ours.mean - published.mean
        text = f"{difference:+.1f}" if metric.percent else signed_number(difference)
        return [shown, f"{text}{mark}", f"{noise}{mark}"]

    def markdown(self) -> str:
        """Return the table as Markdown, with its title and an explanation of its columns."""
        experiment = self.experiment
        lines = [f"## {experiment.title}", "", *([experiment.about, ""] if experiment.about else [])]
        lines += markdown_lines(self.headings, self.lines, texts=2 if self.columned else 1)
        notes = self.explanation + ABOUT_SECONDS + (ABOUT_SHARED if self.shared else "")
        return "\n".join([*lines, "", notes, ""])

    def comma_separated(self) -> str:
        """Return the table as CSV."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([self.headings, *self.lines])
        return out.getvalue()

    def latex(self) -> str:
        """Return rows × columns of the compared quantity for a paper (booktabs), published numbers in brackets."""
        experiment = self.experiment
        metric = self.quantity.metric
        named = "Accuracy" if metric.name == "accuracy" else axis_title(metric)
        titles = [column.title or named for column in experiment.columns]
        best = {column.name: self._best(column.name) for column in experiment.columns}
        rows = [
            [
                escaped(row.title),
                *(self._latex_cell(experiment.cell(row.name, name), top) for name, top in best.items()),
            ]
            for row in experiment.rows
        ]
        about = f"% {experiment.title}: {self.quantity.words}, mean ± standard deviation"
        about += (", percent" if metric.percent else "") + ("" if metric.higher_is_better else ", lower is better")
        about += "; in brackets: published" if self.compares else ""
        about += "; with a dagger: computed by an older revision" if self.outdated else ""
        headings = ["Method", *map(escaped, titles)]
        return "\n".join([about, *tabular(headings, rows, "l" + "c" * len(titles)), ""])

    def _best(self, column: str) -> float | None:
        found = [statistic(runs, self.experiment.quantity) for (_, name), runs in self.runs.items() if name == column]
        means = [one.mean for one in found if one]
        return self.quantity.best(means) if len(means) > 1 else None

    def _latex_cell(self, cell: Cell, best: float | None) -> str:
        runs = self.runs[cell.row.name, cell.column.name]
        found = statistic(runs, self.experiment.quantity)
        ours = "--" if found is None else f"{found}".replace(" ± ", r"{\,\pm\,}")
        if found is not None:
            ours += r"^{\dagger}" if any(run.outdated for run in runs) else ""
            ours = rf"$\mathbf{{{ours}}}$" if found.mean == best else f"${ours}$"
        if cell.published is None:
            return ours
        return f"{ours} ({Statistic(cell.published.mean, 0.0, 1, self.quantity.metric)})"


def _with_unit(metric: Metric) -> str:
    return f"{metric.title} (%)" if metric.percent else metric.title
