"""fedrema verdict."""

import dataclasses
import json
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from fedrema.cli.arguments import parse_arguments, positional
from fedrema.errors import BadInput

if TYPE_CHECKING:
    from fedrema.base.terminal import Console
    from fedrema.reporting.fitting_table import FittingTable
    from fedrema.reporting.verdict import Verdict
    from fedrema.runs.run import Run

IMAGES = (".png", ".svg", ".pdf")
HEADING_WIDTH = 16
"""Characters after which the name of a method continues on the next line of a heading."""


@dataclasses.dataclass(frozen=True)
class VerdictArguments:
    """Is joining worthwhile? Compare each client's final model with that of a baseline, on its own test samples.

    Give finished runs of at least two methods on the same data. Of several seeds of a method, the first run is used.
    """

    dirs: tuple[Path, ...] = positional()
    """At least one folder of a run, or folder that contains runs."""
    metric: str | None = None
    """Metric to compare. Default: the task's first one, such as accuracy."""
    baseline: str | None = None
    """Method, or label from the table, with which the others are compared; constant or linear: the simple model of each
    client alone, on own data. Default: Local, otherwise FedAvg."""
    all: bool = False
    """Show all clients. Default: of more than 40 clients, the 15 with the largest and the 15 with the smallest gain."""
    csv: Path | None = None
    """Also write the gains of all clients to this file."""
    json: bool = False
    """Print JSON instead of tables."""
    matrix: Path | None = None
    """Instead, evaluate each client's model of one run on each client's test samples, and write the result to this
    file: .csv, or a heat map as .png, .svg or .pdf."""


def verdict(arguments: list[str]) -> int:
    """Print the gain of each client, or write a matrix of models and clients."""
    args = parse_arguments(VerdictArguments, arguments, "fedrema verdict")
    from fedrema.base.files import write_text
    from fedrema.base.terminal import Console, print_safe
    from fedrema.runs.directory import find_runs
    from fedrema.runs.run import Run

    if args.matrix is not None and args.matrix.suffix.lower() not in (".csv", *IMAGES):
        raise BadInput(f"--matrix {args.matrix} cannot be written: names ending in .csv, .png, .svg or .pdf are valid.")
    runs = [Run(folder) for folder in find_runs(args.dirs)]
    if args.matrix is not None:
        _write_matrix(args, args.matrix, runs)
        return 0
    from fedrema.reporting.verdict import EXPLANATION, verdict_csv, verdicts

    found = verdicts(runs, args.metric, args.baseline)
    if args.csv is not None:
        write_text(args.csv, verdict_csv(found))
    if args.json:
        print(json.dumps(_as_json(runs, found), indent=2))
        return 0
    console = Console()
    for one in found:
        _show(console, args, one)
    console.print(EXPLANATION)
    _show_simple_models(console, runs, found[0])
    _print_seeds(console, runs)
    if args.csv is not None:
        print_safe(f"Gains: {args.csv}")
    return 0


def _show(console: "Console", args: VerdictArguments, one: "Verdict") -> None:
    from rich.text import Text

    console.print(_table(args, one))
    console.print(Text(f"{one.label} compared with {one.baseline}: {one.sentence()}", "bold"))
    for note in one.notes():
        console.print(Text(note))
    console.print()


def _table(args: VerdictArguments, one: "Verdict") -> "FittingTable":
    from rich.text import Text

    from fedrema.reporting.fitting_table import FittingTable
    from fedrema.reporting.verdict import best_and_worst, conclusion_text, shown

    metric = one.metric
    unit = "%" if metric.percent else ""
    methods = [textwrap.fill(name, HEADING_WIDTH, break_long_words=False) for name in (one.baseline, one.label)]
    table = FittingTable(
        ["client", "samples", *methods, "gain", "95 % interval", "conclusion"],
        drop=["samples", *methods],
        kept=["gain", "95 % interval"],
        last_is_text=True,
        title=f"{metric.title}{f' ({unit})' if unit else ''} on each client's own test samples",
        ruled=False,
    )
    clients, best = best_and_worst(one.clients, args.all)
    for place, client in enumerate(clients):
        if best and place == best:
            table.add_row(Text(f"… {len(one.clients) - len(clients)} more"))
        gain = client.gain
        between = "–" if gain.low is None else f"{shown(metric, gain.low)} to {shown(metric, gain.high)}"
        values = ["–" if value is None else metric.shown(value) for value in (gain.baseline, gain.value)]
        cells = (client.name, str(gain.samples), *values, shown(metric, gain.gain), between, conclusion_text(gain))
        table.add_row(*map(Text, cells))
    return table


def _as_json(runs: list["Run"], found: list["Verdict"]) -> list[dict[str, object]]:
    from fedrema.reporting.simple_models import comparisons
    from fedrema.reporting.verdict import first_runs

    alone = comparisons(first_runs(runs), found[0].metric)
    return [one.as_json() | {"simple_models": alone[one.label]} for one in found]


def _show_simple_models(console: "Console", runs: list["Run"], one: "Verdict") -> None:
    """Print the metric of each method next to that of simple models, and where methods are worse than these."""
    from rich.text import Text

    from fedrema.reporting.simple_models import sentences, simple_table, warning
    from fedrema.reporting.tables import plain_table
    from fedrema.reporting.verdict import first_runs

    chosen = first_runs(runs)
    if not (lines := sentences(chosen, one.metric)):
        return
    table = plain_table(("method", f"{one.metric.title}{' (%)' if one.metric.percent else ''}", "mean over clients"))
    for row in simple_table(chosen, one.metric):
        table.add_row(*map(Text, row))
    console.print()
    console.print(table)
    for line in (*lines, warning(chosen, one.baseline, one.metric)):
        if line:
            console.print(Text(line))


def _print_seeds(console: "Console", runs: list["Run"]) -> None:
    """Name the runs that were used, where there are several seeds."""
    from rich.text import Text

    from fedrema.reporting.verdict import first_runs

    chosen = first_runs(runs)
    if any(len(group.runs) > 1 for group, _ in chosen):
        used = ", ".join(f"{group.label} seed {run.settings['seed']}" for group, run in chosen)
        console.print(Text(f"One run per method is used, the first one named: {used}."))


def _write_matrix(args: VerdictArguments, file: Path, runs: list["Run"]) -> None:
    from fedrema.base.files import write_text
    from fedrema.base.terminal import print_safe
    from fedrema.reporting.matrices import draw_model_matrix, model_matrix_csv
    from fedrema.runs.model_matrix import model_matrix

    if len(runs) > 1:
        raise BadInput(f"--matrix {file} is for the models of one run, but there are {len(runs)}: name one of them.")
    (run,) = runs
    for option in ("csv", "baseline"):
        if getattr(args, option) is not None:
            raise BadInput(f"--{option} is for a comparison of runs and excludes --matrix: leave out one of them.")
    found = model_matrix(run, args.metric)
    if file.suffix.lower() == ".csv":
        write_text(file, model_matrix_csv(found))
    else:
        draw_model_matrix(found, file, f"{run.title}: each model on each client's test samples")
    print_safe(f"Matrix: {file}")
