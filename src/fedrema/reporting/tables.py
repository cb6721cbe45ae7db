"""Tables that compare groups of runs, as text, Markdown, LaTeX or CSV."""

import csv
import io
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.jupyter import JupyterMixin
from rich.table import Table
from rich.text import Text

from fedrema.reporting.groups import Difference, Group, Statistic, group_runs, paired_differences
from fedrema.reporting.latex import escaped, tabular
from fedrema.runs.run import Run

__all__ = [
    "comparison_csv",
    "comparison_latex",
    "comparison_markdown",
    "comparison_table",
    "differences_table",
    "markdown_lines",
    "paired_differences",
    "plain_table",
]

ACCURACIES = {
    "best_accuracy": "best (peeks)",
    "honest_accuracy": "honest",
    "final_accuracy": "final (last 5)",
    "worst_tenth": "worst tenth",
}
SECONDS = {"seconds": "seconds"}
MISSING = "–"
EXPLANATION = (
    "Accuracy in percent, mean ± standard deviation over seeds. best: the round is chosen by the samples that score"
    " it; honest: by the other half of them; final: mean of the last 5 evaluated rounds; worst tenth: final, of the"
    " tenth of the clients with the lowest accuracy."
)
OTHER_DATA = "The groups ran on different data: their accuracies are not comparable."
DIFFERENCES = "Intervals are 95 % t intervals over common seeds, not corrected for the number of comparisons."
NUMBER = re.compile(r"[+-]?\d[\d.]*(?: ± [\d.]+)?")
DIFFERENCE_HEADINGS = ("method", "difference", "95 % interval", "pairs")


@dataclass(frozen=True)
class _Cell:
    text: str
    best: bool = False


@dataclass(frozen=True)
class _Comparison:
    headings: tuple[str, ...]
    rows: tuple[tuple[_Cell, ...], ...]
    notes: tuple[str, ...]


class PrintableTable(JupyterMixin):
    """A table with notes: plain text with `print`, with bold type in a rich console or a notebook."""

    def __init__(self, *parts: RenderableType) -> None:
        self.parts = parts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.parts

    def __str__(self) -> str:
        stream = io.StringIO()
        Console(file=stream, color_system=None, force_terminal=False, force_jupyter=False).print(self)
        return stream.getvalue().rstrip("\n")

    __repr__ = __str__


def comparison_table(runs: Sequence[Run]) -> PrintableTable:
    """Return a table with a row per group of runs that differ only in the training seed, and notes on the columns."""
    compared = _compare(runs)
    table = plain_table(compared.headings)
    for row in compared.rows:
        # Without spaces, so that everything fits into 80 columns.
        table.add_row(*(Text(cell.text.replace(" ± ", "±"), "bold" if cell.best else "") for cell in row))
    return PrintableTable(table, *(Text(note, "dim") for note in compared.notes))


def differences_table(found: Sequence[Difference], quantity: str = "honest_accuracy") -> PrintableTable:
    """Return the paired differences as a table."""
    table = plain_table(DIFFERENCE_HEADINGS)
    for one in found:
        table.add_row(*(Text(cell) for cell in _difference_cells(one)))
    return PrintableTable(Text(_difference_title(found, quantity)), table, Text(DIFFERENCES, "dim"))


def plain_table(headings: Sequence[str], texts: int = 1) -> Table:
    """Return an empty table for a terminal: the first `texts` columns are left-aligned, the others hold numbers."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for place, heading in enumerate(headings):
        if place < texts:
            table.add_column(heading, overflow="fold")
        else:
            table.add_column(_two_lines(heading), justify="right", no_wrap=True)
    return table


def markdown_lines(headings: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> list[str]:
    """Return the lines of a Markdown table: the first `texts` columns are left-aligned, the others hold numbers."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in (headings, *rows)]
    first, *rest = [f"| {' | '.join(row)} |" for row in escaped]
    return [first, "|" + "---|" * texts + "---:|" * (len(headings) - texts), *rest]


def comparison_markdown(runs: Sequence[Run], quantity: str = "honest_accuracy", reference: str | None = None) -> str:
    """Return the table, its notes and the paired differences as Markdown."""
    compared = _compare(runs)
    lines = markdown_lines(
        compared.headings,
        [[f"**{cell.text}**" if cell.best else cell.text for cell in row] for row in compared.rows],
    )
    for note in compared.notes:
        lines += ["", note]
    found = paired_differences(runs, quantity, reference)
    if found:
        rows = [list(_difference_cells(one)) for one in found]
        lines += ["", f"**{_difference_title(found, quantity)}**", ""]
        lines += [*markdown_lines(DIFFERENCE_HEADINGS, rows), "", DIFFERENCES]
    return "\n".join(lines) + "\n"


def comparison_latex(runs: Sequence[Run], quantity: str = "honest_accuracy", reference: str | None = None) -> str:
    """Return the table and the paired differences for a paper (booktabs); notes are comments."""
    compared = _compare(runs)
    rows = [[_latex_cell(cell, place) for place, cell in enumerate(row)] for row in compared.rows]
    lines = [f"% {note}" for note in compared.notes]
    lines += tabular([escaped(heading) for heading in compared.headings], rows, _columns(compared.headings))
    found = paired_differences(runs, quantity, reference)
    if found:
        cells = [[escaped(one.label), *map(_numbers, _difference_cells(one)[1:])] for one in found]
        lines += ["", f"% {_difference_title(found, quantity)}. {DIFFERENCES}"]
        lines += tabular([escaped(heading) for heading in DIFFERENCE_HEADINGS], cells, _columns(DIFFERENCE_HEADINGS))
    return "\n".join(lines) + "\n"


def _columns(headings: Sequence[str]) -> str:
    return "l" + "r" * (len(headings) - 1)


def _latex_cell(cell: _Cell, place: int) -> str:
    return escaped(cell.text) if place == 0 else _numbers(cell.text, r"\mathbf{%s}" if cell.best else "%s")


def _numbers(text: str, form: str = "%s") -> str:
    """Return text with its numbers in LaTeX's math mode, which sets a minus sign instead of a hyphen."""
    words = NUMBER.split(text)
    found = ["$" + form % number.replace("±", r"\pm") + "$" for number in NUMBER.findall(text)]
    return "".join(itertools.chain.from_iterable(itertools.zip_longest(map(escaped, words), found, fillvalue="")))


def comparison_csv(runs: Sequence[Run], quantity: str = "honest_accuracy", reference: str | None = None) -> str:
    """Return the table as CSV: accuracies and differences from 0 to 1 with all digits; empty where unknown."""
    differences = {one.label: one for one in paired_differences(runs, quantity, reference)}
    groups = group_runs(runs)
    quantities = (*ACCURACIES, *period_columns(groups), *SECONDS)
    heading = ["method", "seeds", "running", "data"]
    heading += [column for name in quantities for column in (name, f"{name}_std")]
    heading += ["compared", "reference", "difference", "difference_low", "difference_high", "pairs"]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(heading)
    for group in groups:
        row: list[str | int | float | None] = [group.label, len(group.counted), group.progress, group.fingerprint]
        for name in quantities:
            statistic = group.statistic(name)
            row += [statistic.mean, statistic.spread] if statistic else [None, None]
        one = differences.get(group.label)
        row += [quantity, one.reference, one.mean, one.low, one.high, one.pairs] if one else [None] * 6
        writer.writerow(row)
    return stream.getvalue()


def period_columns(groups: Sequence[Group]) -> dict[str, str]:
    """Return the headings of the lengths of the methods' periods, by their names in summaries."""
    periods = [group.reports.period for group in groups]
    return {f"{period.name}_rounds": f"{period.inside} rounds" for period in periods if period is not None}


def _compare(runs: Sequence[Run]) -> _Comparison:
    groups = group_runs(runs)
    same_data = len({group.fingerprint for group in groups}) == 1
    periods = period_columns(groups)
    headings = ACCURACIES | periods | SECONDS
    columns = {name: [group.statistic(name) for group in groups] for name in headings}
    columns = {name: column for name, column in columns.items() if name not in periods or any(column)}
    cells = {name: _column(name, statistics, same_data) for name, statistics in columns.items()}
    rows = [
        (_Cell(_named(group)), _Cell(str(len(group.counted))), *(cells[name][place] for name in columns))
        for place, group in enumerate(groups)
    ]
    notes = tuple(filter(None, (EXPLANATION, _alternatives(groups), "" if same_data else OTHER_DATA)))
    return _Comparison(("method", "seeds", *(headings[name] for name in columns)), tuple(rows), notes)


def _alternatives(groups: Sequence[Group]) -> str:
    """Return a sentence with the accuracies under other ways of scoring, which some methods declare."""
    found = []
    for group in groups:
        titles = {alternative.name: alternative.title for alternative in group.reports.alternatives}
        names = {name for run in group.counted for name in run.summary.alternatives}
        for name in sorted(names):
            best, final = (group.statistic(f"{kind}_{name}_accuracy") for kind in ("best", "final"))
            if best and final:
                words = f"{group.label}, {titles.get(name, name)}"
                found.append(f"{words}: {100 * best.mean:.1f} best, {100 * final.mean:.1f} final")
    return f"Scored in other ways: {'; '.join(found)}." if found else ""


def _named(group: Group) -> str:
    return f"{group.label} {group.progress}".rstrip()


def _column(name: str, statistics: Sequence[Statistic | None], same_data: bool) -> list[_Cell]:
    known = [statistic.mean for statistic in statistics if statistic]
    # The best value is highlighted only where there is another to compare it with.
    highest = max(known) if name in ACCURACIES and same_data and len(known) > 1 else None
    return [
        _Cell(_format(name, statistic), statistic is not None and statistic.mean == highest) for statistic in statistics
    ]


def _format(name: str, statistic: Statistic | None) -> str:
    if statistic is None:
        return MISSING
    if name not in ACCURACIES:
        return f"{statistic.mean:.1f}" if statistic.mean < 100 else f"{statistic.mean:.0f}"
    spread = "" if statistic.spread is None else f" ± {100 * statistic.spread:.1f}"
    return f"{100 * statistic.mean:.1f}{spread}"


def _two_lines(heading: str) -> str:
    splits = heading in ACCURACIES.values() or heading.endswith(" rounds")
    return "\n".join(heading.split(" ", 1)) if splits else heading


def _difference_title(found: Sequence[Difference], quantity: str) -> str:
    return f"Difference to {found[0].reference} in {quantity.replace('_', ' ')}, percentage points"


def _difference_cells(one: Difference) -> tuple[str, str, str, str]:
    mean = MISSING if one.mean is None else _signed(one.mean)
    interval = one.reason
    if one.low is not None and one.high is not None:
        interval = f"{_signed(one.low)} to {_signed(one.high)}"
    return one.label, mean, interval, str(one.pairs)


def _signed(share: float) -> str:
    return f"{100 * share:+.1f}"
