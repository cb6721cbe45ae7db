"""Paired comparisons between the rows of an experiment, corrected for their number, and tables of them."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan, nan

import numpy as np

from fedrema.experiments.finished_run import FinishedRun
from fedrema.experiments.spec import Cell, Experiment
from fedrema.experiments.store import Store
from fedrema.experiments.table import ABOUT_OUTDATED, MISSING, OUTDATED, measured
from fedrema.experiments.tasks import finished_runs
from fedrema.reporting.quantities import signed_number
from fedrema.reporting.statistics import PairedTest, Scores, holm, paired_test, pairs_needed
from fedrema.reporting.tables import markdown_lines
from fedrema.tasks import METRICS, Metric

HEADINGS = ["row", "data", "compared with", "difference", "95 %", "p", "corrected p", "seeds"]
"""The last is `replicates` where the runs of a cell vary the partition too."""
EXPLANATION = (
    "Differences in {unit}, paired by {pairs}, with their 95 % t intervals and the p of a paired t test;"
    " corrected for their number by Holm's method, over all of this table."
)
ACCURACY = METRICS["accuracy"]

Runs = Mapping[tuple[str, str], list[FinishedRun]]
"""By names of row and column."""


@dataclass(frozen=True)
class Comparison:
    """A row minus another in one column, over the seeds or replicates that both have."""

    row: str
    other: str
    column: str
    test: PairedTest
    corrected: float = nan
    """p by Holm's method, over all comparisons made together with this one."""
    made_together: int = 1
    """How many comparisons these are."""

    @property
    def mean(self) -> float:
        """The mean difference; NaN without a seed in common."""
        return self.test.mean

    @property
    def pairs(self) -> int:
        """The number of seeds in common."""
        return self.test.pairs

    @property
    def tested(self) -> bool:
        """Whether there were enough seeds."""
        return self.test.tested

    def pairs_needed(self, significant: float) -> int | None:
        """Return how many pairs would decide this comparison; None if none would, or without a deviation.

        The level is divided by the number of comparisons made together, which is at least what Holm's method requires.
        """
        return pairs_needed(self.test, significant / self.made_together)


def runs_of(cells: Iterable[Cell], seeds: int, store: Store) -> Runs:
    """Return the finished runs of cells, including those that diverged."""
    return {(cell.row.name, cell.column.name): finished_runs(cell, seeds, store) for cell in cells}


def scores(runs: Runs, quantity: str) -> Scores:
    """Return a quantity of all runs that have it; shares in percent."""
    measure = measured(quantity, (run for several in runs.values() for run in several))
    found: dict[str, dict[tuple[str, int], float]] = {row: {} for row, _ in runs}
    for (row, column), several in runs.items():
        for run in several:
            if run.summary.get(measure.name) is not None:
                found[row][column, run.seed] = measure.factor * run.summary[measure.name]
    return found


def compare(row: str, other: str, column: str, mine: Mapping[int, float], theirs: Mapping[int, float]) -> Comparison:
    """Compare the values of two rows by seed."""
    return Comparison(row, other, column, paired_test(mine, theirs))


def compare_rows(table: Scores, column: str, rows: Iterable[str], over: Sequence[str]) -> list[Comparison]:
    """Compare each of some rows with each of others in a column, corrected over all of these."""
    pairs = [(row, other) for row in rows for other in over if row != other]
    return corrected([_compared(table, row, other, column) for row, other in pairs])


def compare_with_reference(
    table: Scores, columns: Iterable[str], reference: str | None = None, higher_is_better: bool = True
) -> list[Comparison]:
    """Compare all rows with one, in every column, corrected over all of these.

    Parameters
    ----------
    table
        All rows.
    columns
        In which columns.
    reference
        A row; default: in each column the one with the best mean. Because it is chosen by the same runs, the
        differences from it are slightly larger than new runs would show.
    higher_is_better
        Which values are better.
    """
    found = []
    for column in columns:
        means = {
            row: float(np.mean(list(values.values()))) for row in table if (values := _by_seed(table, row, column))
        }
        if means:
            against = reference or (max if higher_is_better else min)(means, key=lambda row: means[row])
            found += [_compared(table, row, against, column) for row in table if row != against]
    return corrected(found)


def corrected(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return comparisons with p corrected for their number; those without a test do not count."""
    p_values = [each.test.p for each in comparisons if each.tested]
    adjusted, count = iter(holm(p_values)), len(p_values)
    return [
        replace(each, corrected=next(adjusted), made_together=count) if each.tested else each for each in comparisons
    ]


def _by_seed(table: Scores, row: str, column: str) -> dict[int, float]:
    return {seed: value for (name, seed), value in table[row].items() if name == column}


def _compared(table: Scores, row: str, other: str, column: str) -> Comparison:
    return compare(row, other, column, _by_seed(table, row, column), _by_seed(table, other, column))


def comparisons_markdown(
    comparisons: Sequence[Comparison],
    experiment: Experiment,
    outdated: Container[tuple[str, str]] = (),
    metric: Metric = ACCURACY,
) -> str:
    """Return a table of paired tests with an explanation of its columns; outdated cells are marked."""
    marked = [{(each.row, each.column), (each.other, each.column)} for each in comparisons]
    marks = [OUTDATED if any(cell in outdated for cell in cells) else "" for cells in marked]
    rows = comparison_lines(comparisons, experiment, metric)
    lines = [[*row[:3], f"{row[3]}{mark}", *row[4:]] for row, mark in zip(rows, marks, strict=True)]
    unit = "points" if metric.percent else metric.title
    unit += "" if metric.higher_is_better else ", where negative is better"
    pairs = "training seed" if experiment.replicates == "seeds" else "replicate"
    explanation = EXPLANATION.format(unit=unit, pairs=pairs) + (ABOUT_OUTDATED if any(marks) else "")
    headings = [*HEADINGS[:-1], experiment.replicates]
    return "\n".join([*markdown_lines(headings, lines, texts=len(headings)), "", explanation, ""])


def comparison_lines(
    comparisons: Sequence[Comparison], experiment: Experiment, metric: Metric = ACCURACY
) -> list[list[str]]:
    """Return the cells of that table as text, in the order of `HEADINGS`."""
    noun = experiment.replicates.removesuffix("s")
    shown: Callable[[float], str] = "{:+.2f}".format if metric.percent else signed_number
    return [
        [
            experiment.title_of(each.row),
            experiment.title_of(each.column) or MISSING,
            experiment.title_of(each.other),
            MISSING if isnan(each.mean) else shown(each.mean),
            f"{shown(each.test.low)} to {shown(each.test.high)}" if each.tested else MISSING,
            *(f"{p:.2g}" if each.tested else MISSING for p in (each.test.p, each.corrected)),
            f"{each.pairs} ({each.test.reason.replace('seed', noun)})" if each.test.reason else str(each.pairs),
        ]
        for each in comparisons
    ]
