"""What a column says of a claim, and the words that tell it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fedrema.experiments.spec import Experiment
from fedrema.experiments.statistics import Comparison, Runs

Verdict = Literal["holds", "does not hold", "not decided"]
SIGNIFICANT = 0.05
NOBODY = "there is no row to compare with"


@dataclass(frozen=True)
class Finding:
    """What one column, or one row in it, says of a claim."""

    verdict: Verdict
    where: str
    text: str


def all_of(verdicts: Sequence[Verdict]) -> Verdict:
    """Return what follows where all must hold."""
    if "does not hold" in verdicts:
        return "does not hold"
    return "holds" if set(verdicts) == {"holds"} else "not decided"


def sign(comparison: Comparison, claimed: Literal[1, -1] = 1) -> Verdict:
    """Tell whether the row is surely above the other, or below where that is claimed."""
    if comparison.mean == 0 or not comparison.corrected < SIGNIFICANT:
        return "not decided"
    return "holds" if claimed * comparison.mean > 0 else "does not hold"


def certainty(comparison: Comparison, digits: int) -> str:
    """Say how sure a difference is."""
    p = "< 0.001" if comparison.corrected < 0.001 else f"= {comparison.corrected:.3f}"
    low, high = number(comparison.low, digits), number(comparison.high, digits)
    return f"95 % {low} to {high}, corrected p {p}, {seeds_text(comparison.pairs)}"


def number(value: float, digits: int) -> str:
    """Return a number with so many digits after the point."""
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")  # + 0.0: -0.0 is 0


def seeds_text(count: int) -> str:
    """Say how many seeds there were."""
    return "1 seed" if count == 1 else f"{count} seeds"


def lacking(counts: Mapping[str, int], column: str, experiment: Experiment, runs: Runs, needed: int) -> str:
    """Say which rows have fewer runs to judge by than are needed; empty where none has."""
    if needed == 2 and set(counts.values()) == {1}:
        return "one seed each"
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
