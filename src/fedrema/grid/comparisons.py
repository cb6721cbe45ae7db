"""Tables of paired tests."""

from collections.abc import Sequence
from math import isnan

from fedrema.grid.experiment import Experiment
from fedrema.grid.statistics import Comparison
from fedrema.report.compare import markdown_lines

HEADINGS = ["row", "data", "compared with", "difference", "95 %", "p", "corrected p", "seeds"]
EXPLANATION = (
    "Differences in points, paired by training seed, with their 95 % t intervals and the p of a paired t test;"
    " corrected for their number by Holm's method, over all of this table."
)
MISSING = "–"


def comparisons_markdown(comparisons: Sequence[Comparison], experiment: Experiment) -> str:
    """Return a table of paired tests, with what its columns mean."""
    lines = markdown_lines(HEADINGS, comparison_lines(comparisons, experiment), texts=len(HEADINGS))
    return "\n".join([*lines, "", EXPLANATION, ""])


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
