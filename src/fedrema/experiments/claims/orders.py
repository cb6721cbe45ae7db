"""Claims about the order of rows: one is first, that is above every other, or some are above others."""

from fedrema.experiments.claims.findings import NOBODY, Finding, all_of, certainty, lacking, sign
from fedrema.experiments.spec import Claim, Experiment
from fedrema.experiments.statistics import Comparison, Runs, Scores, compare_rows, scores


def ordered(claim: Claim, experiment: Experiment, runs: Runs, quantity: str) -> list[Finding]:
    """Judge `first` and `above`."""
    table = scores(runs, quantity)
    return [_ordered_in(column, claim, experiment, runs, table) for column in claim.columns]


def _ordered_in(column: str, claim: Claim, experiment: Experiment, runs: Runs, table: Scores) -> Finding:
    where = experiment.title_of(column)
    rows = claim.rows[:1] if claim.kind == "first" else claim.rows
    over = [row for row in claim.over if row not in rows]
    counts = {row: sum(name == column for name, _ in table[row]) for row in (*rows, *over)}
    lack = lacking(counts, column, experiment, runs, needed=2) or ("" if over else NOBODY)
    comparisons = compare_rows(table, column, rows, over)
    nearest_first = sorted((each for each in comparisons if each.pairs), key=lambda each: each.mean)
    verdicts = [sign(each) for each in nearest_first]
    verdict = all_of(verdicts)
    if verdict == "does not hold":  # whatever those that are missing may say
        lack = ""
    elif lack or len(nearest_first) < len(comparisons) or not all(each.tested for each in nearest_first):
        lack, verdict = lack or "seeds in common are missing", "not decided"
    told = [lack] if lack else []
    if nearest_first:
        deciding = nearest_first[0 if lack else verdicts.index(verdict)]
        told.append(("so far " if lack else "") + _comparison_text(deciding, experiment))
    return Finding(verdict, where, ", ".join(told))


def _comparison_text(comparison: Comparison, experiment: Experiment) -> str:
    row, other = experiment.title_of(comparison.row), experiment.title_of(comparison.other)
    points = f"{abs(comparison.mean):.1f} points"
    how = f"{points} above" if comparison.mean > 0 else f"{points} below" if comparison.mean < 0 else "level with"
    return f"{row} {how} {other} ({certainty(comparison, 1) if comparison.tested else '1 seed, no test'})"
