"""Statistics over seeds and clients: intervals, paired tests, Holm's correction, average ranks. Numbers in and out."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

# scipy.stats is imported where it is used: importing it is slow, and the table after every run does not need it.

CONFIDENCE = 0.95
NO_DIFFERENCE = 1e-9
"""Numbers that are closer count as equal: 0.7 - 0.6 and 0.6 - 0.5 differ by rounding only."""
POWER = 0.8
"""Probability with which a planned test shows a difference that exists."""
MOST_PAIRS = 1000
"""Larger numbers of pairs are not computed."""
COLUMNS_FOR_RANKS = 3
"""With fewer columns, the blocks of a ranking are single runs instead of datasets."""

Scores = Mapping[str, Mapping[tuple[str, int], float]]
"""By row, then by column and training seed."""


@dataclass(frozen=True)
class PairedTest:
    """The mean of paired differences, its 95 % t interval, and the p-value of the paired t test."""

    pairs: int
    mean: float = math.nan
    """NaN, like the fields below, if unknown."""
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    reason: str = ""
    """Why there is no t test, if there is none."""
    deviation: float = math.nan
    """Standard deviation of the differences."""

    @property
    def tested(self) -> bool:
        """Whether there were enough pairs."""
        return not math.isnan(self.p)


@dataclass(frozen=True)
class Ranking:
    """Average ranks of rows, best first, with Friedman's test and Nemenyi's critical difference."""

    names: tuple[str, ...]
    ranks: tuple[float, ...]
    critical_difference: float
    p: float
    """Friedman's test of the hypothesis that all rows are equal."""
    blocks: int
    blocks_are: str
    cliques: tuple[tuple[str, ...], ...]
    """The largest groups of rows that do not differ significantly, each best first."""
    left_out: tuple[str, ...]
    """Rows without a run in a column where others have one."""


def paired_test(mine: Mapping[int, float], theirs: Mapping[int, float]) -> PairedTest:
    """Compare values by seed, over the seeds that both have.

    If the difference is the same for every seed, its variance is 0 and a t test is not defined; p is then that of the
    sign test, or 1 if there is no difference at all.
    """
    common = sorted(mine.keys() & theirs.keys())
    pairs = len(common)
    if not common:
        return PairedTest(0, reason="no seed in common")
    differences = np.array([mine[seed] - theirs[seed] for seed in common])
    mean = float(differences.mean())
    if pairs == 1:
        return PairedTest(1, mean, reason="one seed in common: no test")
    from scipy import stats

    if np.ptp(differences) < NO_DIFFERENCE:
        p, reason = float(stats.binomtest(pairs, pairs).pvalue), "the same difference for every seed: sign test"
        if abs(mean) < NO_DIFFERENCE:
            mean, p, reason = 0.0, 1.0, "no difference for any seed"
        return PairedTest(pairs, mean, mean, mean, p, reason, deviation=0.0)
    test = stats.ttest_rel([mine[seed] for seed in common], [theirs[seed] for seed in common])
    deviation = float(differences.std(ddof=1))
    return PairedTest(pairs, mean, *t_interval(differences.tolist()), float(test.pvalue), deviation=deviation)


def pairs_needed(test: PairedTest, level: float) -> int | None:
    """Return the number of pairs with which a two-sided paired t test at this level has a power of 80 %.

    The true mean and standard deviation of the differences are assumed to be the observed ones; T then follows a
    noncentral t distribution. If all differences are the same, the number is that of the sign test. None without a
    deviation, or if more than `MOST_PAIRS` were needed.
    """
    if math.isnan(test.deviation) or abs(test.mean) < NO_DIFFERENCE:
        return None
    if test.deviation == 0:
        return math.floor(1 - math.log2(level)) + 1  # the smallest n with 2 · 0.5ⁿ < level
    from scipy import stats

    effect = abs(test.mean) / test.deviation

    def power(pairs: int) -> float:
        critical = stats.t.ppf(1 - level / 2, pairs - 1)
        return float(stats.nct.sf(critical, pairs - 1, effect * math.sqrt(pairs)))

    low, high = 1, 2  # the power grows with the number of pairs: double, then halve the interval
    while power(high) < POWER:
        low, high = high, 2 * high
        if low > MOST_PAIRS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power(middle) >= POWER else (middle, high)
    return high if high <= MOST_PAIRS else None


def t_interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % t interval of the mean of at least two numbers."""
    from scipy import stats

    mean, error = float(np.mean(differences)), float(stats.sem(differences))
    if error == 0:  # scipy would return NaN
        return mean, mean
    low, high = stats.t.interval(CONFIDENCE, df=len(differences) - 1, loc=mean, scale=error)
    return float(low), float(high)


def welch_interval(difference: float, first: tuple[float, int], second: tuple[float, int]) -> tuple[float, float]:
    """Return the 95 % interval of a difference of two means by Welch's t test.

    Each of the two is given by its standard deviation and its number of values, at least two; they need be neither
    paired nor of equal variance. The degrees of freedom are Welch and Satterthwaite's.
    """
    from scipy import stats

    squares = [deviation**2 / count for deviation, count in (first, second)]
    error = math.sqrt(sum(squares))
    if error == 0:
        return difference, difference
    freedom = error**4 / sum(
        square**2 / (count - 1) for square, (_, count) in zip(squares, (first, second), strict=True)
    )
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * error
    return difference - half, difference + half


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values by Holm's step-down method (1979); scipy has only Benjamini and Hochberg's, which is weaker.

    The smallest of m is multiplied by m, the next by m - 1 and so on; none becomes smaller than one before it.
    """
    order = np.argsort(p_values)
    factors = np.arange(len(p_values), 0, -1)
    adjusted = np.empty(len(p_values))
    adjusted[order] = np.minimum(np.maximum.accumulate(factors * np.asarray(p_values)[order]), 1)
    return [float(value) for value in adjusted]


def rank(table: Scores, higher_is_better: bool = True) -> Ranking | None:
    """Rank rows within blocks, where 1 is the best score, and test whether their average ranks differ.

    With three columns or more a block is a column, with the mean over its seeds, because these tests assume independent
    datasets (Demšar, JMLR 2006); with fewer it is a column and a seed. A row must have a run in every column; of its
    runs those count whose seed all such rows have there.

    Returns
    -------
    Ranking | None
        None with fewer than three such rows, fewer than two blocks, or a column without a common seed.
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
        blocks_are = f"{len(blocks)} runs, the seeds of {where}: not independent datasets, so p is too small"
    if len(blocks) < 2 or not all(seeds):
        return None
    values = np.array([[np.mean([table[row][key] for key in block]) for row in names] for block in blocks]).round(9)
    each = stats.rankdata(-values if higher_is_better else values, axis=1)
    differs = bool((np.ptp(each, axis=1) > 0).any())  # else scipy would divide by zero
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
    """Return the smallest significant difference of average ranks by Nemenyi's test at 5 %."""
    from scipy import stats

    q = float(stats.studentized_range.ppf(CONFIDENCE, rows, math.inf)) / math.sqrt(2)
    return q * math.sqrt(rows * (rows + 1) / (6 * blocks))


def cliques(names: Sequence[str], ranks: Sequence[float], difference: float) -> tuple[tuple[str, ...], ...]:
    """Return the largest groups of two or more whose ranks, sorted, are less than the critical difference apart."""
    found: list[tuple[str, ...]] = []
    reached = 0
    for start, lowest in enumerate(ranks):
        end = sum(value - lowest < difference for value in ranks)
        if end > max(reached, start + 1):  # else it is part of the one before it
            found.append(tuple(names[start:end]))
            reached = end
    return tuple(found)


@dataclass(frozen=True)
class VarianceComponents:
    """Standard deviations of the parts of y_ij = mean + partition_i + seed_j + rest_ij."""

    mean: float
    partition: float
    seed: float
    rest: float
    """Interaction of partition and seed, and everything that varies between runs with the same two."""
    partitions: int
    seeds: int

    @property
    def shares(self) -> tuple[float, float, float]:
        """The shares of partition, seed and rest in the variance of a run with a new partition and seed."""
        variances = np.square([self.partition, self.seed, self.rest])
        total = float(variances.sum())
        first, second, third = (float(value) / total if total else 0.0 for value in variances)
        return first, second, third


def variance_components(values: np.ndarray) -> VarianceComponents | None:
    """Estimate variance components from one run for each partition (row) and training seed (column).

    Two-way random effects without replication, by the method of moments: with mean squares A of a rows, B of b columns
    and E of the rest, the variances are (A − E) / b, (B − E) / a and E; negative estimates become 0. None with fewer
    than two rows or columns.
    """
    a, b = values.shape
    if min(a, b) < 2:
        return None
    mean, rows, columns = values.mean(), values.mean(axis=1), values.mean(axis=0)
    of_rows = b * np.square(rows - mean).sum() / (a - 1)
    of_columns = a * np.square(columns - mean).sum() / (b - 1)
    rest = np.square(values - rows[:, None] - columns + mean).sum() / ((a - 1) * (b - 1))
    variances = max((of_rows - rest) / b, 0.0), max((of_columns - rest) / a, 0.0), rest
    partition, seed, remaining = (math.sqrt(value) for value in variances)
    return VarianceComponents(float(mean), partition, seed, remaining, a, b)
