"""Claims about how runs go: they collapse, they are faster than others, a curve falls."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from fedrema.experiments.claims.findings import NOBODY, Finding, Verdict, certainty, lacking, number, seeds_text, sign
from fedrema.experiments.spec import Claim, Experiment
from fedrema.experiments.statistics import Runs, compare, corrected, scores
from fedrema.experiments.store import Finished


def collapse(claim: Claim, experiment: Experiment, runs: Runs) -> list[Finding]:
    best, final = (scores(runs, f"{name}_accuracy") for name in ("best", "final"))
    findings = []
    for column, row in itertools.product(claim.columns, claim.rows):
        where = experiment.title_of(column)
        keys = [key for key in best[row] if key[0] == column and key in final[row]]
        if lack := lacking({row: len(keys)}, column, experiment, runs, needed=1):
            findings.append(Finding("not decided", where, lack))
            continue
        high, low = (mean(table[row][key] for key in keys) for table in (best, final))
        verdict: Verdict = "holds" if low <= (1 - claim.share) * high else "does not hold"
        text = f"{experiment.title_of(row)} best {high:.1f}, final {low:.1f} ({seeds_text(len(keys))})"
        findings.append(Finding(verdict, where, text))
    return findings


def faster(claim: Claim, experiment: Experiment, runs: Runs) -> list[Finding]:
    return [_faster_in(column, claim, experiment, runs) for column in claim.columns]


def _faster_in(column: str, claim: Claim, experiment: Experiment, runs: Runs) -> Finding:
    where = experiment.title_of(column)
    names = (*claim.rows[:1], *claim.over[:1])
    timed = {name: [run for run in runs[name, column] if run.seconds] for name in names}
    counts = {name: len(several) for name, several in timed.items()}
    if lack := lacking(counts, column, experiment, runs, needed=1) or ("" if len(timed) == 2 else NOBODY):
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
    seconds, of_other = (mean(run.seconds for run in several) for several in (mine, theirs))
    row, other = map(experiment.title_of, names)
    ratio = f"a ratio of {seconds / of_other:.2f} where at most {claim.share:g} is claimed"
    among = "; runs that shared it left out" if all(alone) else "; other runs shared it, so that seconds say less"
    ran = f"{device}, {len(mine)} and {len(theirs)} runs{among if crowded else ''}"
    verdict: Verdict = "holds" if seconds <= claim.share * of_other else "does not hold"
    return Finding(verdict, where, f"{row} {seconds:.1f} s, {other} {of_other:.1f} s, {ratio} ({ran})")


def _on(device: str, runs: Sequence[Finished]) -> list[Finished]:
    return [run for run in runs if run.ran_on["device"] == device]


def falls(claim: Claim, experiment: Experiment, runs: Runs) -> list[Finding]:
    """Compare the last half of the recorded rounds with the first tenth of them."""
    findings = []
    places = list(itertools.product(claim.columns, claim.rows))
    parts = {place: _early_and_late(runs[place[1], place[0]], claim.curve) for place in places}
    tests = [compare(row, row, column, parts[column, row].late, parts[column, row].early) for column, row in places]
    for test in corrected(tests):
        where, title = experiment.title_of(test.column), experiment.title_of(test.row)
        part = parts[test.column, test.row]
        if not test.pairs:
            text = f"{title}: {claim.curve} was not recorded in two rounds or more"
            findings.append(Finding("not decided", where, text))
            continue
        sure = certainty(test, 2) if test.tested else "1 seed, no test"
        text = (
            f"{title}: {claim.curve} {mean(part.early.values()):.2f} in rounds {part.early_rounds},"
            f" {mean(part.late.values()):.2f} in rounds {part.late_rounds}"
            f" (difference {number(test.mean, 2)}, {sure})"
        )
        findings.append(Finding(sign(test, claimed=-1), where, text))
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
