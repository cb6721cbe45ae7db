"""Tables of paired tests."""

from collections.abc import Sequence
from math import isnan

from fedrema.grid.experiment import Experiment
from fedrema.grid.statistics import Comparison

HEADINGS = ["row", "data", "compared with", "difference", "95 %", "p", "corrected p", "seeds"]
EXPLANATION = (
    "Differences in points, paired by training seed, with their 95 % t intervals and the p of a paired t test;"
    " corrected for their number by Holm's method, over all of this table."
)
MISSING = "–"


def comparisons_markdown(comparisons: Sequence[Comparison], experiment: Experiment) -> str:
    """Return a table of paired tests, with what its columns mean."""
    return f"{markdown_table(HEADINGS, comparison_lines(comparisons, experiment))}\n{EXPLANATION}\n"


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


def markdown_table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [[text.replace("|", "\\|") for text in line] for line in (headings, *lines)]
    shown = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([shown[0], "|" + "---|" * len(headings), *shown[1:], ""])
