"""Tables of paired tests."""

from collections.abc import Container, Sequence
from math import isnan

from fedrema.experiments.spec import Experiment
from fedrema.experiments.statistics import Comparison
from fedrema.experiments.table import ABOUT_OUTDATED, MISSING, OUTDATED
from fedrema.reporting.tables import markdown_lines

HEADINGS = ["row", "data", "compared with", "difference", "95 %", "p", "corrected p", "seeds"]
EXPLANATION = (
    "Differences in points, paired by training seed, with their 95 % t intervals and the p of a paired t test;"
    " corrected for their number by Holm's method, over all of this table."
)


def comparisons_markdown(
    comparisons: Sequence[Comparison], experiment: Experiment, outdated: Container[tuple[str, str]] = ()
) -> str:
    """Return a table of paired tests, with what its columns mean; cells that are outdated are marked."""
    marked = [{(each.row, each.column), (each.other, each.column)} for each in comparisons]
    marks = [OUTDATED if any(cell in outdated for cell in cells) else "" for cells in marked]
    rows = comparison_lines(comparisons, experiment)
    lines = [[*row[:3], f"{row[3]}{mark}", *row[4:]] for row, mark in zip(rows, marks, strict=True)]
    explanation = EXPLANATION + (ABOUT_OUTDATED if any(marks) else "")
    return "\n".join([*markdown_lines(HEADINGS, lines, texts=len(HEADINGS)), "", explanation, ""])


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
