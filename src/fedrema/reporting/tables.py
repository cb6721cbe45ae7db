"""Tables that compare groups of runs, as text, Markdown, LaTeX or CSV."""

import csv
import io
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.jupyter import JupyterMixin
from rich.text import Text

from fedrema.base.html import Bold, html_table, paragraph, title_line
from fedrema.reporting.fitting_table import FittingTable
from fedrema.reporting.groups import Difference, Group, Statistic, group_runs, metrics_of, paired_differences
from fedrema.reporting.latex import escaped, tabular
from fedrema.reporting.quantities import Kind, Quantity, explanation, find_quantity, metric_text
from fedrema.reporting.simple_models import sentences, simple_models_of
from fedrema.runs.run import Run
from fedrema.simulation.mean_gains import FEWEST_CLIENTS, interval_over_clients
from fedrema.tasks import METRICS

__all__ = [
    "comparison_csv",
    "comparison_html",
    "comparison_latex",
    "comparison_markdown",
    "comparison_rows",
    "comparison_table",
    "differences_table",
    "markdown_lines",
    "paired_differences",
    "plain_table",
]

HEADINGS: dict[Kind, str] = {
    "best": "best (peeks)",
    "honest": "honest",
    "final": "final (last 5)",
    "worst_tenth": "worst tenth",
}
"""Of the primary metric."""
SECONDS = {"seconds": "seconds"}
EPSILON = {"epsilon": "ε"}
TWO_LINES = frozenset(metric.title for metric in METRICS.values())
"""Headings that are split at their first space, in addition to `HEADINGS`."""
MISSING = "–"
NARROW = "The terminal is too narrow for all standard deviations; fedrema compare --format csv has all numbers."
OTHER_DATA = "The groups ran on different data: their {} are not comparable."
DIFFERENCES = "Intervals are 95 % t intervals over common seeds, not corrected for the number of comparisons."
NUMBER = re.compile(r"[+-]?\d[\d.]*(?:e[+-]\d+)?(?: ± [\d.]+(?:e[+-]\d+)?)?")
DIFFERENCE_COLUMNS = ("compared", "reference", "difference", "difference_low", "difference_high", "pairs")
DIFFERENCE_HEADINGS = ("method", "difference", "95 % interval", "pairs")


@dataclass(frozen=True)
class _Cell:
    text: str
    best: bool = False


@dataclass(frozen=True)
class _Compared:
    headings: tuple[str, ...]
    rows: tuple[tuple[_Cell, ...], ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Fitting:
    """A table, or a narrower one where it does not fit into the terminal."""

    full: FittingTable
    narrow: FittingTable

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.full.fits(console, options):
            yield self.full
        else:
            yield self.narrow
            yield Text(NARROW, "dim")


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
    table = _Fitting(_terminal_table(compared), _terminal_table(_without_deviations(compared)))
    return PrintableTable(table, *(Text(note, "dim") for note in compared.notes))


def _terminal_table(compared: "_Compared") -> FittingTable:
    honest = HEADINGS["honest"]
    periods = [heading for heading in compared.headings if heading.endswith(" rounds")]
    # Then the other metrics, which were asked for by name.
    drop = [SECONDS["seconds"], *periods, HEADINGS["best"], HEADINGS["worst_tenth"]]
    table = plain_table(compared.headings, drop=drop, kept=[honest])
    for row in compared.rows:
        # Without spaces, so that everything fits into 80 columns.
        table.add_row(*(Text(cell.text.replace(" ± ", "±"), "bold" if cell.best else "") for cell in row))
    return table


def _without_deviations(compared: "_Compared") -> "_Compared":
    """Return the table with standard deviations of the honest value only."""
    kept = compared.headings.index(HEADINGS["honest"])
    rows = [
        tuple(
            cell if place in (0, kept) else replace(cell, text=cell.text.partition(" ± ")[0])
            for place, cell in enumerate(row)
        )
        for row in compared.rows
    ]
    return replace(compared, rows=tuple(rows))


def differences_table(
    found: Sequence[Difference], quantity: str = "honest", primary: str = "accuracy"
) -> PrintableTable:
    """Return the paired differences as a table; `primary` is the primary metric of the runs."""
    table, compared = plain_table(DIFFERENCE_HEADINGS), find_quantity(quantity, primary)
    for one in found:
        table.add_row(*(Text(cell) for cell in _difference_cells(one, compared)))
    return PrintableTable(Text(_difference_title(found, compared)), table, Text(DIFFERENCES, "dim"))


def plain_table(
    headings: Sequence[str], texts: int = 1, drop: Sequence[str] = (), kept: Sequence[str] = ()
) -> FittingTable:
    """Return an empty table for a terminal: the first `texts` columns are left-aligned, the others hold numbers.

    `drop` and `kept` are headings of columns that are left out first, or never, where the terminal is too narrow.
    """
    numbers = [_two_lines(heading) for heading in headings[texts:]]
    first, never = ([_two_lines(heading) for heading in some] for some in (drop, kept))
    return FittingTable([*headings[:texts], *numbers], texts, first, never)


def markdown_lines(headings: Sequence[str], rows: Sequence[Sequence[str]], texts: int = 1) -> list[str]:
    """Return the lines of a Markdown table: the first `texts` columns are left-aligned, the others hold numbers."""
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in (headings, *rows)]
    first, *rest = [f"| {' | '.join(row)} |" for row in escaped]
    return [first, "|" + "---|" * texts + "---:|" * (len(headings) - texts), *rest]


def comparison_markdown(runs: Sequence[Run], quantity: str = "honest", reference: str | None = None) -> str:
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
        tested = find_quantity(quantity, runs[0].metric)
        rows = [list(_difference_cells(one, tested)) for one in found]
        lines += ["", f"**{_difference_title(found, tested)}**", ""]
        lines += [*markdown_lines(DIFFERENCE_HEADINGS, rows), "", DIFFERENCES]
    return "\n".join(lines) + "\n"


def comparison_latex(runs: Sequence[Run], quantity: str = "honest", reference: str | None = None) -> str:
    """Return the table and the paired differences for a paper (booktabs); notes are comments."""
    compared = _compare(runs)
    rows = [[_latex_cell(cell, place) for place, cell in enumerate(row)] for row in compared.rows]
    lines = [f"% {note}" for note in compared.notes]
    lines += tabular([escaped(heading) for heading in compared.headings], rows, _columns(compared.headings))
    found = paired_differences(runs, quantity, reference)
    if found:
        tested = find_quantity(quantity, runs[0].metric)
        cells = [[escaped(one.label), *map(_numbers, _difference_cells(one, tested)[1:])] for one in found]
        lines += ["", f"% {_difference_title(found, tested)}. {DIFFERENCES}"]
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


def comparison_rows(
    runs: Sequence[Run], quantity: str = "honest", reference: str | None = None
) -> list[dict[str, str | int | float | None]]:
    """Return a row per group: values and differences with all digits, shares from 0 to 1; None where unknown."""
    differences = {one.label: one for one in paired_differences(runs, quantity, reference)}
    groups = group_runs(runs)
    tested = find_quantity(quantity, groups[0].metric.name)
    private = [name for name in EPSILON if any(group.statistic(name) for group in groups)]
    quantities = (*(one.name for one in shown_quantities(groups)), *period_columns(groups), *private, *SECONDS)
    rows = []
    for group in groups:
        row: dict[str, str | int | float | None] = {
            "method": group.label, "seeds": len(group.counted), "running": group.progress, "data": group.fingerprint
        }  # fmt: skip
        for name in quantities:
            statistic = group.statistic(name)
            row |= (
                {name: statistic.mean, f"{name}_std": statistic.spread}
                if statistic
                else {name: None, f"{name}_std": None}
            )
        one = differences.get(group.label)
        values = (tested.name, one.reference, one.mean, one.low, one.high, one.pairs) if one else (None,) * 6
        rows.append(row | dict(zip(DIFFERENCE_COLUMNS, values, strict=True)))
    for simple in simple_models_of(groups):
        row = dict.fromkeys(rows[0]) | {"method": simple.title, "running": "", "data": groups[0].fingerprint}
        for each in shown_quantities(groups):
            found = simple.statistic(each)
            row[each.name] = found.mean if found else None
        rows.append(row)
    return rows


def comparison_csv(runs: Sequence[Run], quantity: str = "honest", reference: str | None = None) -> str:
    """Return the rows as CSV; empty where unknown."""
    rows = comparison_rows(runs, quantity, reference)
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(rows[0])
    writer.writerows(row.values() for row in rows)
    return stream.getvalue()


def comparison_html(runs: Sequence[Run]) -> str:
    """Return the table, its notes and the paired differences for a notebook."""
    compared = _compare(runs)
    parts = [
        html_table(
            compared.headings, [[Bold(cell.text) if cell.best else cell.text for cell in row] for row in compared.rows]
        )
    ]
    parts += [paragraph(note, small=True) for note in compared.notes]
    if found := paired_differences(runs):
        tested = find_quantity("honest", runs[0].metric)
        parts += [title_line(_difference_title(found, tested))]
        parts += [html_table(DIFFERENCE_HEADINGS, [_difference_cells(one, tested) for one in found])]
        parts += [paragraph(DIFFERENCES, small=True)]
    return "".join(parts)


def period_columns(groups: Sequence[Group]) -> dict[str, str]:
    """Return the headings of the lengths of the methods' periods, by their names in summaries."""
    periods = [group.reports.period for group in groups]
    return {f"{period.name}_rounds": f"{period.inside} rounds" for period in periods if period is not None}


def shown_quantities(groups: Sequence[Group]) -> dict[Quantity, str]:
    """Return the quantities of the table with their headings: all of the primary metric, final ones of the others."""
    primary, *others = metrics_of(groups)
    found = {Quantity(kind, primary): heading for kind, heading in HEADINGS.items()}
    return found | {Quantity("final", metric, is_primary=False): metric.title for metric in others}


def _compare(runs: Sequence[Run]) -> _Compared:
    groups = group_runs(runs)
    same_data = len({group.fingerprint for group in groups}) == 1
    quantities, periods, simple = shown_quantities(groups), period_columns(groups), simple_models_of(groups)
    headings = {**periods, **EPSILON, **SECONDS}
    others = {name: [group.statistic(name) for group in groups] for name in headings}
    others = {name: column for name, column in others.items() if name in SECONDS or any(column)}
    columns = {
        **{
            heading: _column(
                quantity,
                [*(group.statistic(quantity.name) for group in groups), *(one.statistic(quantity) for one in simple)],
                same_data,
            )
            for quantity, heading in quantities.items()
        },
        **{
            headings[name]: [*(_Cell(_cost(each)) for each in column), *[_Cell(MISSING)] * len(simple)]
            for name, column in others.items()
        },
    }
    named = [(_named(group), str(len(group.counted))) for group in groups] + [(one.title, MISSING) for one in simple]
    rows = [(*map(_Cell, name), *(cells[place] for cells in columns.values())) for place, name in enumerate(named)]
    notes = (
        explanation(metrics_of(groups)),
        _over_clients(groups),
        _privacy(groups),
        _attackers(groups),
        _stopped(groups),
        _undefined(groups),
        _alternatives(groups),
        "" if same_data else other_data(groups),
        *sentences([(group, group.counted[0]) for group in groups], groups[0].metric),
    )
    return _Compared(("method", "seeds", *columns), tuple(rows), tuple(filter(None, notes)))


def other_data(groups: Sequence[Group]) -> str:
    """Return a sentence that warns of comparing results on different data."""
    return OTHER_DATA.format("accuracies" if groups[0].metric.name == "accuracy" else "results")


def _over_clients(groups: Sequence[Group]) -> str:
    """Return a sentence with the mean over at least five clients of each single run; "" for multiclass runs."""
    found = []
    for group in groups:
        run = group.counted[0]
        if len(group.counted) > 1 or run.manifest.federation.task.name == "multiclass":
            continue
        values = [value for value in final_of_clients(run) if value is not None]
        if len(values) >= FEWEST_CLIENTS:
            numbers = (fmean(values), *interval_over_clients(values))
            mean, *bounds = (metric_text(group.metric, each) for each in numbers)
            found.append(f"{group.label} {mean} ({' to '.join(bounds)})")
    if not found:
        return ""
    return f"Mean over clients of the final {groups[0].metric.title}, 95 % t interval over clients: {'; '.join(found)}."


def final_of_clients(run: Run) -> list[float | None]:
    """Return each client's mean primary metric over the last five evaluated rounds; None where it was never scored."""
    last = [record.primary.clients for record in run.rounds if record.primary is not None][-5:]
    columns = [[value for value in column if value is not None] for column in zip(*last, strict=False)]
    return [fmean(column) if column else None for column in columns]


def _privacy(groups: Sequence[Group]) -> str:
    """Return a sentence on the privacy that ε stands for; "" without differential privacy."""
    found: dict[str, list[str]] = {}
    for group in groups:
        summary, settings = group.counted[0].summary, group.counted[0].settings
        if summary.delta is not None:
            unbounded = "" if summary.epsilon is not None else ", unbounded because there is no noise"
            found.setdefault(f"--dp {settings['dp']}, δ = {summary.delta:.2g}{unbounded}", []).append(group.label)
    if list(found.values()) == [[group.label for group in groups]]:  # the same for all
        return f"ε spent by the client that has spent most: {next(iter(found))}."
    parts = [f"{', '.join(labels)}: {how}" for how, labels in found.items()]
    return f"ε spent by the client that has spent most. {'; '.join(parts)}." if parts else ""


def _attackers(groups: Sequence[Group]) -> str:
    """Return a sentence on clients that are not scored because they are attackers; "" without attackers."""
    found = [
        f"{group.label}, {len(attackers)} of {len(group.runs[0].names)} clients ({group.runs[0].settings['attack']})"
        for group in groups
        if (attackers := group.counted[0].summary.attackers)
    ]
    return f"Not scored, because they are simulated attackers: {'; '.join(found)}." if found else ""


def _stopped(groups: Sequence[Group]) -> str:
    """Return a sentence on runs that a callback stopped before their last round; "" without such runs."""
    found = []
    for group in groups:
        rounds = [run.summary.rounds for run in group.counted if run.stopped_early]
        if rounds:
            after = f"{min(rounds)}" if min(rounds) == max(rounds) else f"{min(rounds)} to {max(rounds)}"
            found.append(f"{group.label}, after {after} of {group.runs[0].settings['rounds']} rounds")
    return f"Stopped early: {'; '.join(found)}." if found else ""


def _undefined(groups: Sequence[Group]) -> str:
    """Return a sentence on clients for which a metric is undefined, such as the AUC of a single class."""
    if [metric.name for metric in metrics_of(groups)] == ["accuracy"]:  # defined for every client with test samples
        return ""
    most: dict[str, tuple[int, int]] = {}
    for group in groups:
        for metric, found in undefined_clients(group.counted[0]).items():
            most[metric] = max(most.get(metric, (0, 0)), found)
    parts = [f"{METRICS[metric].title}, {count} of {of} clients" for metric, (count, of) in most.items()]
    return f"Excluded, because the metric is undefined on their test samples: {'; '.join(parts)}." if parts else ""


def undefined_clients(run: Run) -> dict[str, tuple[int, int]]:
    """Return for metrics in the last evaluated round: clients without a value, and clients that were scored."""
    last = next((record for record in reversed(run.rounds) if record.metrics), None)
    if last is None:
        return {}
    clients = list(zip(*(metric.clients for metric in last.metrics.values()), strict=True))
    scored = [values for values in clients if any(value is not None for value in values)]
    missing = {name: sum(values[at] is None for values in scored) for at, name in enumerate(last.metrics)}
    return {name: (count, len(scored)) for name, count in missing.items() if count}


def _alternatives(groups: Sequence[Group]) -> str:
    """Return a sentence with the primary metric under other ways of scoring, which some methods declare."""
    found, metric = [], groups[0].metric
    for group in groups:
        titles = {alternative.name: alternative.title for alternative in group.reports.alternatives}
        names = {name for run in group.counted for name in run.summary.alternatives}
        for name in sorted(names):
            best, final = (group.statistic(f"{kind}_{name}_{metric.name}") for kind in ("best", "final"))
            if best and final:
                words = f"{group.label}, {titles.get(name, name)}"
                found.append(f"{words}: {metric_text(metric, best.mean)} best, {metric_text(metric, final.mean)} final")
    return f"Scored in other ways: {'; '.join(found)}." if found else ""


def _named(group: Group) -> str:
    return f"{group.label} {group.progress}".rstrip()


def _column(quantity: Quantity, statistics: Sequence[Statistic | None], same_data: bool) -> list[_Cell]:
    known = [statistic.mean for statistic in statistics if statistic]
    # The best value is highlighted only where there is another to compare it with.
    best = quantity.best(known) if same_data and len(known) > 1 else None
    return [
        _Cell(quantity.text(found.mean, found.spread), found.mean == best) if found else _Cell(MISSING)
        for found in statistics
    ]


def _cost(statistic: Statistic | None) -> str:
    if statistic is None:
        return MISSING
    return f"{statistic.mean:.1f}" if statistic.mean < 100 else f"{statistic.mean:.0f}"


def _two_lines(heading: str) -> str:
    splits = heading in (*HEADINGS.values(), *TWO_LINES) or heading.endswith(" rounds")
    return "\n".join(heading.split(" ", 1)) if splits else heading


def _difference_title(found: Sequence[Difference], quantity: Quantity) -> str:
    return f"Difference to {found[0].reference} in {quantity.words}, {quantity.difference_unit}"


def _difference_cells(one: Difference, quantity: Quantity) -> tuple[str, str, str, str]:
    mean = MISSING if one.mean is None else quantity.signed(one.mean)
    interval = one.reason
    if one.low is not None and one.high is not None:
        interval = f"{quantity.signed(one.low)} to {quantity.signed(one.high)}"
    return one.label, mean, interval, str(one.pairs)
