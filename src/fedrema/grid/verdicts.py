"""Whether what is said of an experiment's results holds, with the numbers that say so."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan
from statistics import mean
from typing import Literal

from fedrema.grid.experiment import Claim, ClaimKind, Experiment
from fedrema.grid.statistics import Comparison, Runs, Scores, compare, compare_rows, corrected, runs_of, scores
from fedrema.grid.store import Finished, Store

Verdict = Literal["holds", "does not hold", "not decided"]
SIGNIFICANT = 0.05
HEADINGS = ["row", "data", "compared with", "difference", "95 %", "p", "corrected p", "seeds"]
EXPLANATION = (
    "Differences in points, paired by training seed, with their 95 % t intervals and the p of a paired t test;"
    " corrected for their number by Holm's method, over all of this table."
)
MISSING = "–"
NOBODY = "there is no row to compare with"


@dataclass(frozen=True)
class Judgement:
    """A claim, whether it holds, and why."""

    claim: Claim
    verdict: Verdict
    evidence: str
    honest_verdict: Verdict | None = None
    """The same by honest accuracy, for claims about accuracies that another quantity decides."""


@dataclass(frozen=True)
class Finding:
    """What one column, or one row in it, says of a claim."""

    verdict: Verdict
    where: str
    text: str


def judge(claim: Claim, experiment: Experiment, seeds: int, store: Store) -> Judgement:
    """Judge a claim by the runs that are finished.

    It holds if it does in every column; it does not hold if it fails in one. What chance explains is not decided, nor
    what has not been run. Within a column all comparisons are corrected for their number; over columns nothing is, as
    all of them must hold.
    """
    rows, columns = {*claim.rows, *claim.over}, set(claim.columns)
    cells = [cell for cell in experiment.cells if cell.row.name in rows and cell.column.name in columns]
    runs = runs_of(cells, seeds, store)
    if claim.kind in JUDGES:
        findings = JUDGES[claim.kind](claim, experiment, runs)
        return Judgement(claim, _overall(claim, findings), _evidence(findings))
    findings = _ordered(claim, experiment, runs, experiment.quantity)
    verdict, evidence = _overall(claim, findings), _evidence(findings)
    if experiment.quantity == "honest_accuracy":
        return Judgement(claim, verdict, evidence)
    honest = _ordered(claim, experiment, runs, "honest_accuracy")
    honest_verdict = _overall(claim, honest)
    in_some = sum(finding.verdict == "holds" for finding in honest)
    some = f" (holds in {in_some} of {len(honest)} columns)" if 0 < in_some < len(honest) else ""
    return Judgement(claim, verdict, f"{evidence} By honest accuracy: {honest_verdict}{some}.", honest_verdict)


def claims_markdown(judgements: Sequence[Judgement]) -> str:
    """Return a table of claims and verdicts."""
    lines = [[each.claim.says, each.verdict, each.evidence] for each in judgements]
    return _markdown(["claim", "verdict", "evidence"], lines)


def comparisons_markdown(comparisons: Sequence[Comparison], experiment: Experiment) -> str:
    """Return a table of paired tests, with what its columns mean."""
    return f"{_markdown(HEADINGS, comparison_lines(comparisons, experiment))}\n{EXPLANATION}\n"


def comparison_lines(comparisons: Sequence[Comparison], experiment: Experiment) -> list[list[str]]:
    """Return the cells of that table as text, below `HEADINGS`."""
    return [
        [
            experiment.title_of(each.row),
            experiment.title_of(each.column) or MISSING,
            experiment.title_of(each.other),
            MISSING if isnan(each.mean) else f"{each.mean:+.2f}",
            f"{each.low:+.2f} to {each.high:+.2f}" if each.tested else MISSING,
            *(f"{p:.2g}" if each.tested else MISSING for p in (each.p, each.corrected)),
            f"{each.pairs} ({each.reason})" if each.reason else str(each.pairs),
        ]
        for each in comparisons
    ]


def _markdown(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [[text.replace("|", "\\|") for text in line] for line in (headings, *lines)]
    shown = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([shown[0], "|" + "---|" * len(headings), *shown[1:], ""])


def _overall(claim: Claim, findings: Sequence[Finding]) -> Verdict:
    verdicts = [finding.verdict for finding in findings]
    if claim.kind == "collapse" and "not decided" in verdicts:  # no test stands behind its columns: all are waited for
        return "not decided"
    return _all_of(verdicts)


def _all_of(verdicts: Sequence[Verdict]) -> Verdict:
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


def _ordered(claim: Claim, experiment: Experiment, runs: Runs, quantity: str) -> list[Finding]:
    """Judge `first` and `above`."""
    table = scores(runs, quantity)
    return [_ordered_in(column, claim, experiment, runs, table) for column in claim.columns]


def _ordered_in(column: str, claim: Claim, experiment: Experiment, runs: Runs, table: Scores) -> Finding:
    where = experiment.title_of(column)
    rows = claim.rows[:1] if claim.kind == "first" else claim.rows
    over = [row for row in claim.over if row not in rows]
    counts = {row: sum(name == column for name, _ in table[row]) for row in (*rows, *over)}
    if lack := _lacking(counts, column, experiment, runs, needed=2) or ("" if over else NOBODY):
        return Finding("not decided", where, lack)
    comparisons = compare_rows(table, column, rows, over)
    for each in comparisons:
        if not each.tested:
            text = f"{experiment.title_of(each.row)} and {experiment.title_of(each.other)} have {each.reason}"
            return Finding("not decided", where, text)
    nearest_first = sorted(comparisons, key=lambda each: each.mean)
    verdicts = [_sign(each) for each in nearest_first]
    verdict = _all_of(verdicts)
    if claim.kind == "first" and verdict != "does not hold":
        verdict = verdicts[0]  # who is surely above the runner-up is the first, however much those below scatter
    deciding = nearest_first[verdicts.index(verdict)]
    return Finding(verdict, where, _comparison_text(deciding, experiment))


def _sign(comparison: Comparison, claimed: Literal[1, -1] = 1) -> Verdict:
    """Tell whether the row is surely above the other, or below where that is claimed."""
    if comparison.mean == 0 or not comparison.corrected < SIGNIFICANT:
        return "not decided"
    return "holds" if claimed * comparison.mean > 0 else "does not hold"


def _comparison_text(comparison: Comparison, experiment: Experiment) -> str:
    row, other = experiment.title_of(comparison.row), experiment.title_of(comparison.other)
    points = f"{abs(comparison.mean):.1f} points"
    how = f"{points} above" if comparison.mean > 0 else f"{points} below" if comparison.mean < 0 else "level with"
    return f"{row} {how} {other} ({_certainty(comparison, 1)})"


def _certainty(comparison: Comparison, digits: int) -> str:
    p = "< 0.001" if comparison.corrected < 0.001 else f"= {comparison.corrected:.3f}"
    low, high = _number(comparison.low, digits), _number(comparison.high, digits)
    return f"95 % {low} to {high}, corrected p {p}, {_seeds(comparison.pairs)}"


def _number(value: float, digits: int) -> str:
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")  # + 0.0: -0.0 is 0


def _seeds(number: int) -> str:
    return "1 seed" if number == 1 else f"{number} seeds"


def _lacking(counts: Mapping[str, int], column: str, experiment: Experiment, runs: Runs, needed: int) -> str:
    """Say which rows have fewer runs to judge by than are needed; empty where none has."""
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


def _collapse(claim: Claim, experiment: Experiment, runs: Runs) -> list[Finding]:
    best, final = (scores(runs, f"{name}_accuracy") for name in ("best", "final"))
    findings = []
    for column, row in itertools.product(claim.columns, claim.rows):
        where = experiment.title_of(column)
        keys = [key for key in best[row] if key[0] == column and key in final[row]]
        if lack := _lacking({row: len(keys)}, column, experiment, runs, needed=1):
            findings.append(Finding("not decided", where, lack))
            continue
        high, low = (mean(table[row][key] for key in keys) for table in (best, final))
        verdict: Verdict = "holds" if low <= (1 - claim.share) * high else "does not hold"
        text = f"{experiment.title_of(row)} best {high:.1f}, final {low:.1f} ({_seeds(len(keys))})"
        findings.append(Finding(verdict, where, text))
    return findings


def _faster(claim: Claim, experiment: Experiment, runs: Runs) -> list[Finding]:
    return [_faster_in(column, claim, experiment, runs) for column in claim.columns]


def _faster_in(column: str, claim: Claim, experiment: Experiment, runs: Runs) -> Finding:
    where = experiment.title_of(column)
    names = (*claim.rows[:1], *claim.over[:1])
    timed = {name: [run for run in runs[name, column] if _seconds(run)] for name in names}
    counts = {name: len(several) for name, several in timed.items()}
    if lack := _lacking(counts, column, experiment, runs, needed=1) or ("" if len(timed) == 2 else NOBODY):
        return Finding("not decided", where, lack)
    mine, theirs = timed.values()
    devices = {run.ran_on["device"] for run in mine} & {run.ran_on["device"] for run in theirs}
    if not devices:
        found = sorted({run.ran_on["device"] for run in (*mine, *theirs)})
        return Finding("not decided", where, f"they ran on different devices, {' and '.join(found)}")
    device = max(sorted(devices), key=lambda name: min(len(_on(name, mine)), len(_on(name, theirs))))
    mine, theirs = _on(device, mine), _on(device, theirs)
    alone = [[run for run in several if not run.ran_on.get("beside")] for several in (mine, theirs)]
    crowded = sum(map(len, alone)) < len(mine) + len(theirs)
    mine, theirs = alone if all(alone) else (mine, theirs)
    seconds, of_other = mean(map(_seconds, mine)), mean(map(_seconds, theirs))
    row, other = map(experiment.title_of, names)
    ratio = f"a ratio of {seconds / of_other:.2f} where at most {claim.share:g} is claimed"
    among = "; runs that shared it left out" if all(alone) else "; other runs shared it, so that seconds say less"
    ran = f"{device}, {len(mine)} and {len(theirs)} runs{among if crowded else ''}"
    verdict: Verdict = "holds" if seconds <= claim.share * of_other else "does not hold"
    return Finding(verdict, where, f"{row} {seconds:.1f} s, {other} {of_other:.1f} s, {ratio} ({ran})")


def _seconds(run: Finished) -> float:
    return float(sum(run.summary.get("seconds", {}).values()))


def _on(device: str, runs: Sequence[Finished]) -> list[Finished]:
    return [run for run in runs if run.ran_on["device"] == device]


def _falls(claim: Claim, experiment: Experiment, runs: Runs) -> list[Finding]:
    """Compare the last half of the recorded rounds with the first tenth of them."""
    findings = []
    places = list(itertools.product(claim.columns, claim.rows))
    parts = {place: _early_and_late(runs[place[1], place[0]], claim.curve) for place in places}
    tests = [compare(row, row, column, parts[column, row].late, parts[column, row].early) for column, row in places]
    for test in corrected(tests):
        where, title = experiment.title_of(test.column), experiment.title_of(test.row)
        if not test.tested:
            text = f"{title}: {claim.curve} was recorded with {_seeds(test.pairs)}, and 2 are needed"
            findings.append(Finding("not decided", where, text))
            continue
        part = parts[test.column, test.row]
        text = (
            f"{title}: {claim.curve} {mean(part.early.values()):.2f} in rounds {part.early_rounds},"
            f" {mean(part.late.values()):.2f} in rounds {part.late_rounds}"
            f" (difference {_number(test.mean, 2)}, {_certainty(test, 2)})"
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


def _early_and_late(runs: Sequence[Finished], curve: str) -> _Parts:
    parts = _Parts({}, {})
    for run in runs:
        rounds, values = (run.relations.get("matching", {}).get(name, []) for name in ("round", curve))
        if len(rounds) < 2:
            continue
        tenth, half = max(1, len(rounds) // 10), len(rounds) - len(rounds) // 2
        early, late = ([value for value in some if value is not None] for some in (values[:tenth], values[half:]))
        if early and late:  # None: someone was absent
            parts.early[run.seed], parts.late[run.seed] = mean(early), mean(late)
            parts.early_rounds, parts.late_rounds = _span(rounds[:tenth]), _span(rounds[half:])
    return parts


def _span(rounds: Sequence[int]) -> str:
    return f"{rounds[0]}–{rounds[-1]}" if len(rounds) > 1 else str(rounds[0])


JUDGES: dict[ClaimKind, Callable[[Claim, Experiment, Runs], list[Finding]]] = {
    "collapse": _collapse,
    "faster": _faster,
    "falls": _falls,
}
