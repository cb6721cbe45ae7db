"""Average ranks over columns, with Friedman's test and Nemenyi's critical difference (Demšar, JMLR 2006)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedrema.experiments.statistics import Scores
from fedrema.reporting.differences import CONFIDENCE

COLUMNS_FOR_RANKS = 3
"""With fewer, seeds have to stand in for datasets."""


@dataclass(frozen=True)
class Ranking:
    """Average ranks of rows, best first, with Friedman's test and Nemenyi's critical difference."""

    names: tuple[str, ...]
    ranks: tuple[float, ...]
    critical_difference: float
    p: float
    """Friedman's: that all rows are alike."""
    blocks: int
    blocks_are: str
    cliques: tuple[tuple[str, ...], ...]
    """The largest groups of rows that do not differ significantly, each best first."""
    left_out: tuple[str, ...]
    """Rows that have no run in a column where others have."""


def rank(table: Scores) -> Ranking | None:
    """Rank rows within blocks, where 1 is the highest score, and test whether their average ranks differ.

    A block is a column, with the mean over its seeds, where there are three columns or more, as these tests want
    independent datasets (Demšar, JMLR 2006); else a column and a seed. A row must have a run in every column; of its
    runs those count whose seed all such rows have there.

    Returns
    -------
    Ranking | None
        None where there are fewer than three such rows, fewer than two blocks, or a column without a common seed.
    """
    from scipy import stats

    keys = {key for values in table.values() for key in values}
    columns = sorted({column for column, _ in keys})
    names = [row for row, values in table.items() if {column for column, _ in values} == set(columns)]
    if len(names) < 3:
        return None
    shared = sorted(key for key in keys if all(key in table[row] for row in names))
    seeds = [sum(key[0] == column for key in shared) for column in columns]
    if len(columns) >= COLUMNS_FOR_RANKS:
        blocks = [[key for key in shared if key[0] == column] for column in columns]
        which = "its seeds" if len(shared) == len(keys) else f"the seeds that all have ({_span(seeds)})"
        blocks_are = f"{len(blocks)} columns, each the mean over {which}"
    else:
        blocks = [[key] for key in shared]
        where = "1 column" if len(columns) == 1 else f"{len(columns)} columns"
        blocks_are = f"{len(blocks)} runs, the seeds of {where}: not independent datasets, so the test is too sure"
    if len(blocks) < 2 or not all(seeds):
        return None
    values = np.array([[np.mean([table[row][key] for key in block]) for row in names] for block in blocks]).round(9)
    each = stats.rankdata(-values, axis=1)
    differs = bool((np.ptp(each, axis=1) > 0).any())  # else scipy would divide by nothing
    p = float(stats.friedmanchisquare(*values.T).pvalue) if differs else 1.0
    ranks = each.mean(axis=0)
    order = np.argsort(ranks, kind="stable")
    best_first = tuple(names[place] for place in order)
    sorted_ranks = tuple(float(ranks[place]) for place in order)
    difference = critical_difference(len(names), len(blocks))
    groups = cliques(best_first, sorted_ranks, difference)
    left_out = tuple(row for row in table if row not in names)
    return Ranking(best_first, sorted_ranks, difference, p, len(blocks), blocks_are, groups, left_out)


def _span(counts: Sequence[int]) -> str:
    return " to ".join(str(count) for count in sorted({min(counts), max(counts)}))


def critical_difference(rows: int, blocks: int) -> float:
    """Return by how much average ranks must differ to do so significantly, by Nemenyi's test at 5 %."""
    from scipy import stats

    q = float(stats.studentized_range.ppf(CONFIDENCE, rows, math.inf)) / math.sqrt(2)
    return q * math.sqrt(rows * (rows + 1) / (6 * blocks))


def cliques(names: Sequence[str], ranks: Sequence[float], difference: float) -> tuple[tuple[str, ...], ...]:
    """Return the largest groups of two or more whose ranks, sorted, are less than the critical difference apart."""
    found: list[tuple[str, ...]] = []
    reached = 0
    for start, lowest in enumerate(ranks):
        end = sum(value - lowest < difference for value in ranks)
        if end > max(reached, start + 1):  # else it lies within the one before it
            found.append(tuple(names[start:end]))
            reached = end
    return tuple(found)
