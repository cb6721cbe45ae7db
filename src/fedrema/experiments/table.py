"""An experiment as a table: our results next to published ones, the difference, and whether it exceeds noise."""

import csv
import io
import statistics
from dataclasses import dataclass

from fedrema.experiments.finished_run import FinishedRun
from fedrema.experiments.spec import Cell, Experiment, Published
from fedrema.experiments.store import Store
from fedrema.experiments.tasks import finished_runs
from fedrema.reporting.latex import escaped, tabular
from fedrema.reporting.statistics import welch_interval
from fedrema.reporting.tables import markdown_lines

EXPLANATION = (
    "Accuracy in percent, mean ± standard deviation over {seeds}. best: the round is chosen by the samples that"
    " score it, as papers report it; honest: by the other half of them; final: mean of the last 5 evaluated rounds."
)
SEEDS = {"training": "training seeds", "both": "seeds that vary both the partition and training"}
ABOUT_PUBLISHED = (
    " Within noise: Welch's 95 % interval of the difference contains 0; both need a deviation and at least two seeds."
)
ABOUT_ALSO = " In brackets: what was published."
ABOUT_SECONDS = " Seconds: of all rounds; rounds that compile programs are counted like the others."
ABOUT_SHARED = " Seconds marked * were taken while other runs shared the device."
ABOUT_OUTDATED = " Marked †: computed by an older revision of the method or of the engine; run it again."
MISSING = "–"
OUTDATED = "†"


@dataclass(frozen=True)
class Statistic:
    """Mean and standard deviation over seeds; accuracies in percent."""

    mean: float
    deviation: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.1f} ± {self.deviation:.1f}" if self.count > 1 else f"{self.mean:.1f}"


def values_of(runs: list[FinishedRun], quantity: str) -> dict[int, float]:
    """Return a quantity by seed, for runs that have it; accuracies in percent."""
    if quantity == "seconds":
        return {run.seed: run.seconds for run in runs if not run.failed}
    scale = 1 if quantity.endswith("_rounds") else 100
    found = {run.seed: run.summary.get(quantity) for run in runs}
    return {seed: scale * float(value) for seed, value in found.items() if value is not None}


def statistic(runs: list[FinishedRun], quantity: str) -> Statistic | None:
    """Return mean and deviation of a quantity over a cell's runs; None where no run has it."""
    values = list(values_of(runs, quantity).values())
    if not values:
        return None
    return Statistic(statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0, len(values))


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
        self.shared = any(run.shared_device for run in every)
        self.outdated = any(run.outdated for run in every)
        self.lines = [self._line(cell) for cell in experiment.cells]

    @property
    def headings(self) -> list[str]:
        """The headings of the columns."""
        published = ["published", "difference", "within noise"] if self.compares else []
        first = ["method", *(["data"] if self.columned else []), "seeds", "best (peeks)", *published, "honest", "final"]
        return [*first, *self.details]

    @property
    def details(self) -> list[str]:
        """The headings of the last columns, which a narrow terminal leaves out."""
        return [*(name.replace("_", " ") for name in self.periods), "seconds"]

    @property
    def explanation(self) -> str:
        """What the columns mean."""
        with_what = f" Published numbers are compared with {self.experiment.quantity.replace('_', ' ')}."
        sentences = [EXPLANATION.format(seeds=SEEDS[self.experiment.cells[0].vary])]
        sentences += [with_what + ABOUT_PUBLISHED] if self.compares else []
        sentences += [ABOUT_ALSO] if self.experiment.also else []
        sentences += [ABOUT_OUTDATED] if self.outdated else []
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
            self._text(cell, runs, "best_accuracy"),
            *(self._compared(runs, cell.published) if self.compares else []),
            self._text(cell, runs, "honest_accuracy"),
            self._text(cell, runs, "final_accuracy"),
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
        deviation = "" if published.deviation is None else f" ± {published.deviation:.1f}"
        shown = f"{published.mean:.1f}{deviation}"
        if ours is None:
            return [shown, MISSING, MISSING]
        verdict = within_noise(ours, published, self.experiment.seeds)
        noise = {None: MISSING, True: "yes", False: "no"}[verdict]
        return [shown, f"{ours.mean - published.mean:+.1f}{mark}", f"{noise}{mark}"]

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
        titles = [column.title or "Accuracy" for column in experiment.columns]
        best = {column.name: self._highest(column.name) for column in experiment.columns}
        rows = [
            [
                escaped(row.title),
                *(self._latex_cell(experiment.cell(row.name, name), top) for name, top in best.items()),
            ]
            for row in experiment.rows
        ]
        about = f"% {experiment.title}: {experiment.quantity.replace('_', ' ')}, mean ± standard deviation, percent"
        about += "; in brackets: published" if self.compares else ""
        about += "; with a dagger: computed by an older revision" if self.outdated else ""
        headings = ["Method", *map(escaped, titles)]
        return "\n".join([about, *tabular(headings, rows, "l" + "c" * len(titles)), ""])

    def _highest(self, column: str) -> float | None:
        found = [statistic(runs, self.experiment.quantity) for (_, name), runs in self.runs.items() if name == column]
        means = [one.mean for one in found if one]
        return max(means) if len(means) > 1 else None

    def _latex_cell(self, cell: Cell, highest: float | None) -> str:
        runs = self.runs[cell.row.name, cell.column.name]
        found = statistic(runs, self.experiment.quantity)
        ours = "--" if found is None else f"{found}".replace(" ± ", r"{\,\pm\,}")
        if found is not None:
            ours += r"^{\dagger}" if any(run.outdated for run in runs) else ""
            ours = rf"$\mathbf{{{ours}}}$" if found.mean == highest else f"${ours}$"
        return ours if cell.published is None else f"{ours} ({cell.published.mean:.1f})"
