"""Whether what is said of an experiment's results holds, with the numbers that say so."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fedrema.experiments.claims.courses import collapse, falls, faster
from fedrema.experiments.claims.findings import Finding, Verdict, all_of
from fedrema.experiments.claims.orders import ordered
from fedrema.experiments.spec import Claim, ClaimKind, Experiment
from fedrema.experiments.statistics import Runs, runs_of
from fedrema.experiments.store import Store
from fedrema.experiments.table import ABOUT_OUTDATED, OUTDATED
from fedrema.reporting.tables import markdown_lines

JUDGES: dict[ClaimKind, Callable[[Claim, Experiment, Runs], list[Finding]]] = {
    "collapse": collapse,
    "faster": faster,
    "falls": falls,
}
"""What judges claims that are not about the order of rows."""


@dataclass(frozen=True)
class Judgement:
    """A claim, whether it holds, and why."""

    claim: Claim
    verdict: Verdict
    evidence: str
    honest_verdict: Verdict | None = None
    """The same by honest accuracy, for claims about accuracies that another quantity decides."""
    outdated: bool = False
    """Whether some of the runs behind it were computed by an older revision."""


def judge(claim: Claim, experiment: Experiment, seeds: int, store: Store) -> Judgement:
    """Judge a claim by the runs that are finished, and by outdated ones in cells that have no others.

    It holds if it does in every column; it does not hold if it fails in one. What chance explains is not decided, nor
    what has not been run. Within a column all comparisons are corrected for their number; over columns nothing is, as
    all of them must hold.
    """
    rows, columns = {*claim.rows, *claim.over}, set(claim.columns)
    cells = [cell for cell in experiment.cells if cell.row.name in rows and cell.column.name in columns]
    runs = runs_of(cells, seeds, store)
    judgement = _judged(claim, experiment, runs)
    return replace(judgement, outdated=any(run.outdated for several in runs.values() for run in several))


def _judged(claim: Claim, experiment: Experiment, runs: Runs) -> Judgement:
    if claim.kind in JUDGES:
        findings = JUDGES[claim.kind](claim, experiment, runs)
        return Judgement(claim, _overall(claim, findings), _evidence(findings))
    findings = ordered(claim, experiment, runs, experiment.quantity)
    verdict, evidence = _overall(claim, findings), _evidence(findings)
    if experiment.quantity == "honest_accuracy":
        return Judgement(claim, verdict, evidence)
    honest = ordered(claim, experiment, runs, "honest_accuracy")
    honest_verdict = _overall(claim, honest)
    in_some = sum(finding.verdict == "holds" for finding in honest)
    some = f" (holds in {in_some} of {len(honest)} columns)" if 0 < in_some < len(honest) else ""
    return Judgement(claim, verdict, f"{evidence} By honest accuracy: {honest_verdict}{some}.", honest_verdict)


def claims_markdown(judgements: Sequence[Judgement]) -> str:
    """Return a table of claims and verdicts."""
    lines = [
        [each.claim.says, f"{each.verdict}{OUTDATED if each.outdated else ''}", each.evidence] for each in judgements
    ]
    notes = ["", ABOUT_OUTDATED.strip()] if any(each.outdated for each in judgements) else []
    return "\n".join([*markdown_lines(["claim", "verdict", "evidence"], lines, texts=3), *notes, ""])


def _overall(claim: Claim, findings: Sequence[Finding]) -> Verdict:
    verdicts = [finding.verdict for finding in findings]
    if claim.kind == "collapse" and "not decided" in verdicts:  # no test stands behind its columns: all are waited for
        return "not decided"
    return all_of(verdicts)


def _evidence(findings: Sequence[Finding]) -> str:
    agree = len({finding.verdict for finding in findings}) == 1
    parts = []
    for finding in findings:
        before = [finding.where] if finding.where else []
        before += [] if agree else [finding.verdict]
        parts.append((f"{', '.join(before)}: " if before else "") + finding.text)
    return "; ".join(parts) + "."
