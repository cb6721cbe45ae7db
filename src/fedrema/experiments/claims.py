"""Judges the claims of an experiment by its results, with the numbers that decide."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Literal

from fedrema.experiments.comparisons import Comparison, Runs, compare, compare_rows, corrected, runs_of, scores
from fedrema.experiments.finished_run import FinishedRun
from fedrema.experiments.spec import Claim, ClaimKind, Experiment, MatchingCurve
from fedrema.experiments.store import Store
from fedrema.experiments.table import ABOUT_OUTDATED, OUTDATED, measured
from fedrema.experiments.tasks import on_one_partition
from fedrema.reporting.quantities import Quantity, number
from fedrema.reporting.statistics import MOST_PAIRS, Scores
from fedrema.reporting.tables import markdown_lines
from fedrema.tasks import Metric

Verdict = Literal["holds", "does not hold", "not decided"]
SIGNIFICANT = 0.05
NO_OTHER_ROW = "there is no row to compare with"


@dataclass(frozen=True)
class Judgement:
    """A claim, whether it holds, and why."""

    claim: Claim
    verdict: Verdict
    evidence: str
    honest_verdict: Verdict | None = None
    """The verdict by the honest value, for claims about a metric that another quantity decides."""
    outdated: bool = False
    """Whether some of its runs were computed by an older revision."""


@dataclass(frozen=True)
class Finding:
    """The evidence about a claim from one column, or one row in it."""

    verdict: Verdict
    where: str
    text: str


def judge(claim: Claim, experiment: Experiment, seeds: int, store: Store) -> Judgement:
    """Judge a claim by the finished runs, and by outdated ones in cells that have no others.

    It holds if it does in every column; it does not hold if it fails in one. A difference that is
    not significant and a cell without runs leave it undecided. Within a column all comparisons are corrected for their
    number; over columns nothing is corrected, because all of them must hold.
    """
    # These kinds are about their own rows only: runs of others must not mark the verdict as outdated.
    rows = {*claim.rows, *(() if claim.kind in ("collapse", "falls") else claim.over)}
    columns = set(claim.columns)
    cells = [cell for cell in experiment.cells if cell.row.name in rows and cell.column.name in columns]
    runs = runs_of(cells, seeds, store)
    if any(on_one_partition(cell, runs[cell.row.name, cell.column.name]) for cell in cells):
        # Outdated runs: training seeds, and called so.
        experiment = replace(experiment, cells=tuple(replace(cell, vary="training") for cell in experiment.cells))
    judgement = _judged(claim, experiment, runs)
    return replace(judgement, outdated=any(run.outdated for several in runs.values() for run in several))


def _judged(claim: Claim, experiment: Experiment, runs: Runs) -> Judgement:
    if claim.kind in JUDGES:
        findings = JUDGES[claim.kind](claim, experiment, runs)
        return Judgement(claim, _overall(claim, findings), _evidence(findings))
    quantity = measured(experiment.quantity, (run for several in runs.values() for run in several))
    findings = _ordered(claim, experiment, runs, quantity)
    verdict, evidence = _overall(claim, findings), _evidence(findings)
    if quantity.kind == "honest":
        return Judgement(claim, verdict, evidence)
    by_honest = replace(quantity, kind="honest")
    honest = _ordered(claim, experiment, runs, by_honest)
    honest_verdict = _overall(claim, honest)
    in_some = sum(finding.verdict == "holds" for finding in honest)
    some = f" (holds in {in_some} of {len(honest)} columns)" if 0 < in_some < len(honest) else ""
    return Judgement(claim, verdict, f"{evidence} By {by_honest.words}: {honest_verdict}{some}.", honest_verdict)


def claims_markdown(judgements: Sequence[Judgement]) -> str:
    """Return a table of claims and verdicts."""
    lines = [
        [each.claim.says, f"{each.verdict}{OUTDATED if each.outdated else ''}", each.evidence] for each in judgements
    ]
    notes = ["", ABOUT_OUTDATED.strip()] if any(each.outdated for each in judgements) else []
    return "\n".join([*markdown_lines(["claim", "verdict", "evidence"], lines, texts=3), *notes, ""])


def _overall(claim: Claim, findings: Sequence[Finding]) -> Verdict:
    verdicts = [finding.verdict for finding in findings]
    if claim.kind == "collapse" and "not decided" in verdicts:  # not based on a test: needs all its columns
        return "not decided"
    return _all_of(verdicts)


def _all_of(verdicts: Sequence[Verdict]) -> Verdict:
    """Return the verdict on a claim that must hold everywhere."""
    if "does not hold" in verdicts:
        return "does not hold"
    return "holds" if set(verdicts) == {"holds"} else "not decided"


def _evidence(findings: Sequence[Finding]) -> str:
    agree = len({finding.verdict for finding in findings}) == 1
    parts = []
    for finding in findings:
        before = [finding.where] if finding.where else []
        before += [] if agree else [finding.verdict]
        parts.append((f"{', '.join(before)}: " if before else "") + finding.text)
    return "; ".join(parts) + "."


def _ordered(claim: Claim, experiment: Experiment, runs: Runs, quantity: Quantity) -> list[Finding]:
    """Judge `first` (a row is better than every other), `above` (rows are better than others) and `no-worse`."""
    table = scores(runs, quantity.name)
    return [_ordered_in(column, claim, experiment, runs, table, quantity) for column in claim.columns]


def _ordered_in(
    column: str, claim: Claim, experiment: Experiment, runs: Runs, table: Scores, quantity: Quantity
) -> Finding:
    where = experiment.title_of(column)
    rows = claim.rows[:1] if claim.kind == "first" else claim.rows
    over = [row for row in claim.over if row not in rows]
    counts = {row: sum(name == column for name, _ in table[row]) for row in (*rows, *over)}
    lack = _lacking(counts, column, experiment, runs, needed=2) or ("" if over else NO_OTHER_ROW)
    comparisons = compare_rows(table, column, rows, over)
    sign = quantity.sign
    nearest_first = sorted((each for each in comparisons if each.pairs), key=lambda each: sign * each.mean)
    if claim.kind == "no-worse":
        verdicts = [_no_worse(each, sign, quantity.factor * claim.share) for each in nearest_first]
    else:
        verdicts = [_sign(each, sign) for each in nearest_first]
    verdict = _all_of(verdicts)
    if verdict == "does not hold":  # regardless of the missing runs
        lack = ""
    elif lack or len(nearest_first) < len(comparisons) or not all(each.tested for each in nearest_first):
        lack, verdict = lack or f"{experiment.replicates} in common are missing", "not decided"
    parts = [lack] if lack else []
    if nearest_first:
        deciding = nearest_first[0 if lack else verdicts.index(verdict)]
        ordered = claim.kind != "no-worse"  # then more runs would decide which is better, which is not claimed
        text = _comparison_text(deciding, experiment, quantity.metric, ordered)
        parts.append(("so far " if lack else "") + text)
    return Finding(verdict, where, ", ".join(parts))


def _collapse(claim: Claim, experiment: Experiment, runs: Runs) -> list[Finding]:
    best, final = (scores(runs, name) for name in ("best", "final"))
    metric = measured("best", (run for several in runs.values() for run in several)).metric
    findings = []
    for column, row in itertools.product(claim.columns, claim.rows):
        where = experiment.title_of(column)
        keys = [key for key in best[row] if key[0] == column and key in final[row]]
        if lack := _lacking({row: len(keys)}, column, experiment, runs, needed=1):
            findings.append(Finding("not decided", where, lack))
            continue
        high, low = (mean(table[row][key] for key in keys) for table in (best, final))
        lost = low <= (1 - claim.share) * high if metric.higher_is_better else low >= (1 + claim.share) * high
        verdict: Verdict = "holds" if lost else "does not hold"
        shown = [f"{value:.1f}" if metric.percent else number(value) for value in (high, low)]
        runs_text = _runs_text(len(keys), experiment.replicates)
        text = f"{experiment.title_of(row)} best {shown[0]}, final {shown[1]} ({runs_text})"
        findings.append(Finding(verdict, where, text))
    return findings


def _faster(claim: Claim, experiment: Experiment, runs: Runs) -> list[Finding]:
    return [_faster_in(column, claim, experiment, runs) for column in claim.columns]


def _faster_in(column: str, claim: Claim, experiment: Experiment, runs: Runs) -> Finding:
    where = experiment.title_of(column)
    names = (*claim.rows[:1], *claim.over[:1])
    timed = {name: [run for run in runs[name, column] if run.seconds] for name in names}
    counts = {name: len(several) for name, several in timed.items()}
    if lack := _lacking(counts, column, experiment, runs, needed=1) or ("" if len(timed) == 2 else NO_OTHER_ROW):
        return Finding("not decided", where, lack)
    mine, theirs = timed.values()
    devices = {run.device for run in mine} & {run.device for run in theirs}
    if not devices:
        found = sorted({run.device for run in (*mine, *theirs)})
        return Finding("not decided", where, f"they ran on different devices, {' and '.join(found)}")
    device = max(sorted(devices), key=lambda name: min(len(_on(name, mine)), len(_on(name, theirs))))
    mine, theirs = _on(device, mine), _on(device, theirs)
    alone = [[run for run in several if not run.shared_device] for several in (mine, theirs)]
    shared = sum(map(len, alone)) < len(mine) + len(theirs)
    mine, theirs = alone if all(alone) else (mine, theirs)
    seconds, of_other = (mean(run.seconds for run in several) for several in (mine, theirs))
    row, other = map(experiment.title_of, names)
    ratio = f"a ratio of {seconds / of_other:.2f} where at most {claim.share:g} is claimed"
    among = "; runs that shared it left out" if all(alone) else "; other runs shared it, so times are less reliable"
    ran = f"{device}, {len(mine)} and {len(theirs)} runs{among if shared else ''}"
    verdict: Verdict = "holds" if seconds <= claim.share * of_other else "does not hold"
    return Finding(verdict, where, f"{row} {seconds:.1f} s, {other} {of_other:.1f} s, {ratio} ({ran})")


def _lighter(claim: Claim, experiment: Experiment, runs: Runs) -> list[Finding]:
    """Compare the bytes that a client sends in a round; they do not depend on the seed."""
    findings = []
    for column in claim.columns:
        where, names = experiment.title_of(column), (*claim.rows[:1], *claim.over[:1])
        sent = {name: [run.bytes_sent for run in runs[name, column] if not run.failed] for name in names}
        counts = {name: len(several) for name, several in sent.items()}
        if lack := _lacking(counts, column, experiment, runs, needed=1) or ("" if len(sent) == 2 else NO_OTHER_ROW):
            findings.append(Finding("not decided", where, lack))
            continue
        mine, theirs = (mean(several) for several in sent.values())
        row, other = map(experiment.title_of, names)
        verdict: Verdict = "holds" if mine <= claim.share * theirs else "does not hold"
        text = f"{row} {mine:,.0f} bytes per client and round, {other} {theirs:,.0f}"
        findings.append(Finding(verdict, where, text))
    return findings


def _on(device: str, runs: Sequence[FinishedRun]) -> list[FinishedRun]:
    return [run for run in runs if run.device == device]


def _falls(claim: Claim, experiment: Experiment, runs: Runs) -> list[Finding]:
    """Compare the last half of the recorded rounds with the first tenth of them."""
    findings = []
    cells = list(itertools.product(claim.columns, claim.rows))
    parts = {cell: _early_and_late(runs[cell[1], cell[0]], claim.curve) for cell in cells}
    tests = [compare(row, row, column, parts[column, row].late, parts[column, row].early) for column, row in cells]
    for test in corrected(tests):
        where, title = experiment.title_of(test.column), experiment.title_of(test.row)
        part = parts[test.column, test.row]
        if not test.pairs:
            text = f"{title}: {claim.curve} was not recorded in two rounds or more"
            findings.append(Finding("not decided", where, text))
            continue
        noun = experiment.replicates
        certainty = _certainty(test, _two_digits, noun) if test.tested else f"{_runs_text(1, noun)}, no test"
        text = (
            f"{title}: {claim.curve} {mean(part.early.values()):.2f} in rounds {part.early_rounds},"
            f" {mean(part.late.values()):.2f} in rounds {part.late_rounds}"
            f" (difference {_two_digits(test.mean)}, {certainty})"
        )
        findings.append(Finding(_sign(test, claimed=-1), where, text))
    return findings


@dataclass
class _Parts:
    """Means of a curve by seed, and over which rounds."""

    early: dict[int, float]
    late: dict[int, float]
    early_rounds: str = ""
    late_rounds: str = ""


def _early_and_late(runs: Sequence[FinishedRun], curve: MatchingCurve) -> _Parts:
    parts = _Parts({}, {})
    for run in runs:
        if run.matching is None or len(rounds := run.matching.round) < 2:
            continue
        values = run.matching.precision if curve == "precision" else run.matching.recall
        tenth, half = max(1, len(rounds) // 10), len(rounds) - len(rounds) // 2
        early, late = ([value for value in some if value is not None] for some in (values[:tenth], values[half:]))
        if early and late:  # None: a client was absent
            parts.early[run.seed], parts.late[run.seed] = mean(early), mean(late)
            parts.early_rounds, parts.late_rounds = _span(rounds[:tenth]), _span(rounds[half:])
    return parts


def _span(rounds: Sequence[int]) -> str:
    return f"{rounds[0]}–{rounds[-1]}" if len(rounds) > 1 else str(rounds[0])


def _sign(comparison: Comparison, claimed: Literal[1, -1] = 1) -> Verdict:
    """Return whether the row is significantly above the other, or below if that is claimed."""
    if comparison.mean == 0 or not comparison.corrected < SIGNIFICANT:
        return "not decided"
    return "holds" if claimed * comparison.mean > 0 else "does not hold"


def _no_worse(comparison: Comparison, sign: Literal[1, -1], margin: float) -> Verdict:
    """Return whether the 95 % interval of the difference excludes that the row is worse by more than a margin."""
    bounds = sign * comparison.test.low, sign * comparison.test.high
    if min(bounds) > -margin:
        return "holds"
    return "does not hold" if max(bounds) < -margin else "not decided"


def _comparison_text(comparison: Comparison, experiment: Experiment, metric: Metric, ordered: bool) -> str:
    row, other = experiment.title_of(comparison.row), experiment.title_of(comparison.other)
    points = f"{abs(comparison.mean):.1f} points" if metric.percent else number(abs(comparison.mean))
    how = f"{points} above" if comparison.mean > 0 else f"{points} below" if comparison.mean < 0 else "level with"
    noun = experiment.replicates
    if not comparison.tested:
        return f"{row} {how} {other} ({_runs_text(1, noun)}, no test)"
    certainty = _certainty(comparison, _one_digit if metric.percent else _significant, noun, ordered)
    return f"{row} {how} {other} ({certainty})"


def _certainty(comparison: Comparison, shown: Callable[[float], str], noun: str, ordered: bool = True) -> str:
    """Return interval, corrected p and the number of runs, and how many would be needed if they do not decide.

    `shown` returns a bound of the interval as text; `noun` is what runs are called; `ordered` says whether the claim is
    about which row is better.
    """
    p = "< 0.001" if comparison.corrected < 0.001 else f"= {comparison.corrected:.3f}"
    low, high = shown(comparison.test.low), shown(comparison.test.high)
    text = f"95 % {low} to {high}, corrected p {p}, {_runs_text(comparison.pairs, noun)}"
    if comparison.corrected < SIGNIFICANT or not ordered:
        return text
    needed = comparison.pairs_needed(SIGNIFICANT)
    return f"{text}; {f'about {needed}' if needed else f'more than {MOST_PAIRS}'} needed to decide"


def _one_digit(value: float) -> str:
    return _number(value, 1)


def _two_digits(value: float) -> str:
    return _number(value, 2)


def _significant(value: float) -> str:
    return number(value).replace("-", "−")


def _number(value: float, digits: int) -> str:
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")  # + 0.0: -0.0 becomes 0


def _runs_text(count: int, noun: str) -> str:
    return f"1 {noun.removesuffix('s')}" if count == 1 else f"{count} {noun}"


def _lacking(counts: Mapping[str, int], column: str, experiment: Experiment, runs: Runs, needed: int) -> str:
    """Return a clause that names the rows with too few runs; empty if there are none."""
    if needed == 2 and set(counts.values()) == {1}:
        return f"one {experiment.replicates.removesuffix('s')} each"
    kinds: dict[str, list[str]] = {}
    for row in [row for row, count in counts.items() if count < needed]:
        known = runs[row, column]
        failed = known and all(run.failed for run in known)
        what = "diverged" if failed else f"fewer than {needed} scored runs" if known else "not been run"
        kinds.setdefault(what, []).append(row)
    texts = []
    for what, rows in kinds.items():
        who = experiment.title_of(rows[0]) if len(rows) == 1 else f"{len(rows)} of {len(counts)} rows"
        texts.append(f"{who} {'has' if len(rows) == 1 else 'have'} {what}")
    return ", ".join(texts)


JUDGES: dict[ClaimKind, Callable[[Claim, Experiment, Runs], list[Finding]]] = {
    "collapse": _collapse,
    "faster": _faster,
    "lighter": _lighter,
    "falls": _falls,
}
"""Judges of claims that are not about the order of rows."""
