"""An experiment as a table: ours beside what was published, the difference, and whether it is more than noise."""

import csv
import io
import math
import statistics
from dataclasses import dataclass

from fedrema.grid.experiment import Cell, Experiment, Published
from fedrema.grid.runner import finished
from fedrema.grid.store import Finished, Store

EXPLANATION = (
    "Accuracy in percent, mean ± standard deviation over training seeds. best: the round is chosen by the samples that"
    " score it, as papers count; honest: by the other half of them; final: mean of the last 5 scored rounds."
)
ABOUT_PUBLISHED = " Within noise: the difference is less than twice its standard error, where both have a deviation."
MISSING = "–"


@dataclass(frozen=True)
class Figure:
    """Mean and standard deviation over seeds, in percent."""

    mean: float
    deviation: float
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.1f} ± {self.deviation:.1f}" if self.count > 1 else f"{self.mean:.1f}"


def figure(runs: list[Finished], quantity: str) -> Figure | None:
    """Return a quantity over a cell's runs; None where no run has it."""
    values = [100 * run.summary[quantity] for run in runs if run.summary.get(quantity) is not None]
    if not values:
        return None
    return Figure(statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0, len(values))


def within_noise(ours: Figure, published: Published, published_seeds: int) -> bool | None:
    """Tell whether a difference is less than twice its standard error; None where that is not known."""
    if published.deviation is None or ours.count < 2:
        return None
    error = math.sqrt(ours.deviation**2 / ours.count + published.deviation**2 / published_seeds)
    return abs(ours.mean - published.mean) < 2 * error


class Sheet:
    """The table of an experiment, as far as it has been run."""

    def __init__(self, experiment: Experiment, seeds: int, store: Store) -> None:
        self.experiment = experiment
        self.compares = any(cell.published for cell in experiment.cells)
        self.columned = any(cell.column.title for cell in experiment.cells)
        self.lines = [self._line(cell, finished(cell, seeds, store)) for cell in experiment.cells]

    @property
    def headings(self) -> list[str]:
        """What the columns are called."""
        published = ["published", "difference", "within noise"] if self.compares else []
        return ["method", *(["data"] if self.columned else []), "seeds", "best (peeks)", *published, "honest", "final"]

    @property
    def explanation(self) -> str:
        """What the columns mean."""
        with_what = f" Published numbers are compared with {self.experiment.quantity.replace('_', ' ')}."
        return EXPLANATION + (with_what + ABOUT_PUBLISHED if self.compares else "")

    def _line(self, cell: Cell, runs: list[Finished]) -> list[str]:
        best, honest, final = (figure(runs, f"{name}_accuracy") for name in ("best", "honest", "final"))
        diverged = sum(bool(run.failed) for run in runs)
        count = f"{len(runs) - diverged}" + (f", {diverged} diverged" if diverged else "")
        return [
            cell.row.title,
            *([cell.column.title] if self.columned else []),
            count,
            _text(best),
            *(self._beside(figure(runs, self.experiment.quantity), cell.published) if self.compares else []),
            _text(honest),
            _text(final),
        ]

    def _beside(self, ours: Figure | None, published: Published | None) -> list[str]:
        if published is None:
            return [MISSING] * 3
        deviation = "" if published.deviation is None else f" ± {published.deviation:.1f}"
        shown = f"{published.mean:.1f}{deviation}"
        if ours is None:
            return [shown, MISSING, MISSING]
        verdict = within_noise(ours, published, self.experiment.seeds)
        noise = {None: MISSING, True: "yes", False: "no"}[verdict]
        return [shown, f"{ours.mean - published.mean:+.1f}", noise]

    def markdown(self) -> str:
        """Return the table as Markdown, with its title and what the columns mean."""
        experiment, texts = self.experiment, 2 if self.columned else 1
        rule = "|" + "---|" * texts + "---:|" * (len(self.headings) - texts)
        lines = [f"## {experiment.title}", "", *([experiment.about, ""] if experiment.about else [])]
        lines += ["| " + " | ".join(line) + " |" for line in (self.headings, *self.lines)]
        lines.insert(-len(self.lines), rule)
        return "\n".join([*lines, "", self.explanation, ""])

    def comma_separated(self) -> str:
        """Return the table as CSV."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([self.headings, *self.lines])
        return out.getvalue()


def _text(value: Figure | None) -> str:
    return MISSING if value is None else str(value)
