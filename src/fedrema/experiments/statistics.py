"""How sure differences between rows are: paired comparisons over seeds, corrected for their number."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedrema.experiments.spec import Cell
from fedrema.experiments.store import Finished, Store
from fedrema.experiments.work import finished
from fedrema.reporting.differences import interval

NO_DIFFERENCE = 1e-9
"""Closer numbers are equal: 0.7 - 0.6 and 0.6 - 0.5 differ by rounding only."""

Runs = Mapping[tuple[str, str], list[Finished]]
"""By names of row and column."""
Scores = Mapping[str, Mapping[tuple[str, int], float]]
"""By row, then by column and training seed."""


@dataclass(frozen=True)
class Comparison:
    """A row minus another in one column, over the training seeds that both have."""

    row: str
    other: str
    column: str
    pairs: int
    """How many seeds they have in common."""
    mean: float = math.nan
    """NaN, as all that follows, where it is not known."""
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    corrected: float = math.nan
    """p by Holm's method, over the family that it was compared in."""
    reason: str = ""
    """Why there is no t test, where there is none."""

    @property
    def tested(self) -> bool:
        """Whether there were seeds enough."""
        return not math.isnan(self.p)


def runs_of(cells: Iterable[Cell], seeds: int, store: Store) -> Runs:
    """Return what is finished of some cells, failed runs included."""
    return {(cell.row.name, cell.column.name): finished(cell, seeds, store) for cell in cells}


def scores(runs: Runs, quantity: str) -> Scores:
    """Return a quantity of all runs that have it, in percent."""
    found: dict[str, dict[tuple[str, int], float]] = {row: {} for row, _ in runs}
    for (row, column), several in runs.items():
        for run in several:
            if run.summary.get(quantity) is not None:
                found[row][column, run.seed] = 100 * run.summary[quantity]
    return found


def compare(row: str, other: str, column: str, mine: Mapping[int, float], theirs: Mapping[int, float]) -> Comparison:
    """Compare values by seed: mean paired difference, its 95 % t interval, and p of the paired t test.

    Where the difference is the same for every seed there is nothing to divide by, and a t test would be infinitely
    sure of it; p is then that of the sign test, or 1 where there is no difference at all.
    """
    common = sorted(mine.keys() & theirs.keys())
    pairs = len(common)
    if not common:
        return Comparison(row, other, column, 0, reason="no seed in common")
    differences = np.array([mine[seed] - theirs[seed] for seed in common])
    mean = float(differences.mean())
    if pairs == 1:
        return Comparison(row, other, column, 1, mean, reason="one seed in common: no test")
    # Imported here: it takes a moment that nobody need wait for who only runs something.
    from scipy import stats

    if np.ptp(differences) < NO_DIFFERENCE:
        p, reason = float(stats.binomtest(pairs, pairs).pvalue), "the same difference for every seed: sign test"
        if abs(mean) < NO_DIFFERENCE:
            mean, p, reason = 0.0, 1.0, "no difference for any seed"
        return Comparison(row, other, column, pairs, mean, mean, mean, p, reason=reason)
    test = stats.ttest_rel([mine[seed] for seed in common], [theirs[seed] for seed in common])
    return Comparison(row, other, column, pairs, mean, *interval(differences.tolist()), float(test.pvalue))


def compare_rows(table: Scores, column: str, rows: Iterable[str], over: Sequence[str]) -> list[Comparison]:
    """Compare each of some rows with each of others in a column, corrected over all of these."""
    pairs = [(row, other) for row in rows for other in over if row != other]
    return corrected([_compared(table, row, other, column) for row, other in pairs])


def compare_with_reference(table: Scores, columns: Iterable[str], reference: str | None = None) -> list[Comparison]:
    """Compare all rows with one, in every column: corrected over all of these.

    Parameters
    ----------
    table
        All rows.
    columns
        In which columns.
    reference
        A row; default: that with the highest mean, in each column another. As it is chosen by the same runs, the
        differences from it are a little larger than new runs would show.
    """
    found = []
    for column in columns:
        means = {
            row: float(np.mean(list(values.values()))) for row in table if (values := _by_seed(table, row, column))
        }
        if means:
            against = reference or max(means, key=lambda row: means[row])
            found += [_compared(table, row, against, column) for row in table if row != against]
    return corrected(found)


def corrected(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Return comparisons with p corrected for their number; those without a test do not count."""
    adjusted = iter(holm([each.p for each in comparisons if each.tested]))
    return [replace(each, corrected=next(adjusted)) if each.tested else each for each in comparisons]


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values by Holm's step-down method (1979); scipy has only Benjamini and Hochberg's, which promises less.

    The smallest of m is multiplied by m, the next by m - 1 and so on; none gets smaller than one before it.
    """
    order = np.argsort(p_values)
    factors = np.arange(len(p_values), 0, -1)
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.minimum(np.maximum.accumulate(factors * np.asarray(p_values)[order]), 1)
    return [float(value) for value in adjusted]


def _by_seed(table: Scores, row: str, column: str) -> dict[int, float]:
    return {seed: value for (name, seed), value in table[row].items() if name == column}


def _compared(table: Scores, row: str, other: str, column: str) -> Comparison:
    return compare(row, other, column, _by_seed(table, row, column), _by_seed(table, other, column))
