"""fedrema grid."""

import dataclasses
import sys
from pathlib import Path

from fedrema.base.terminal import Console, print_safe, safe
from fedrema.cli.arguments import parse_arguments, positional
from fedrema.cli.experiment import ExperimentOptions, Part, check_folder, execute, prepare, print_plan, read, select
from fedrema.experiments.report import write_report
from fedrema.experiments.store import FOLDER, Store
from fedrema.experiments.table import Sheet
from fedrema.reporting.tables import plain_table
from fedrema.runs.execute import Interrupted

NARROW = {"published": "publi-\nshed", "difference": "differ-\nence", "within noise": "within\nnoise"}
"""Headings for a terminal of 80 columns."""
STOPPED = "fedrema: stopped; the same command continues from here."


@dataclasses.dataclass(frozen=True)
class Grid:
    """Run the experiment that a file describes: rows × columns × seeds. Finished runs are kept and not repeated."""

    experiment: ExperimentOptions
    file: Path = positional()
    """The TOML file that describes the experiment."""


def grid(arguments: list[str]) -> int:
    """Run what is missing, then write and print the table."""
    args = parse_arguments(Grid, arguments, "fedrema grid")
    options = args.experiment
    if options.out is not None:
        check_folder(options.out)
    experiment = read(args.file, options)
    parts = select([experiment], options.only, options.seeds)
    if options.prepare is not None:
        prepare(parts, options.prepare)
        return 0
    out = options.out or check_folder(Path("results") / experiment.name)
    store = Store(out / FOLDER)
    store.check()
    if options.plan:
        print_plan(parts, options, store)
        return 0
    try:
        failed = execute(parts, parts, options, store, out / "unfinished")
    except Interrupted:
        write_report(experiment, parts[0].seeds, store, out)
        print(STOPPED, file=sys.stderr)
        return 130
    write_report(experiment, parts[0].seeds, store, out)
    if not options.quiet:
        show(parts[0], store, out)
    return print_errors(failed)


def show(part: Part, store: Store, out: Path) -> None:
    """Print an experiment's table."""
    sheet = Sheet(part.experiment, part.seeds, store)
    console = Console()
    console.print(safe(sheet.experiment.title), highlight=False)
    count = len(sheet.headings) - len(sheet.details)  # 80 columns have no room for these
    shown = plain_table(
        [NARROW.get(heading, heading) for heading in sheet.headings[:count]], texts=2 if sheet.columned else 1
    )
    for line in sheet.lines:
        shown.add_row(*(safe(text.replace(" ± ", "±")) for text in line[:count]))
    console.print(shown)
    console.print(sheet.explanation, style="dim")
    console.print(f"Written: {out / sheet.experiment.name}.md, .csv and .tex", highlight=False, soft_wrap=True)


def print_errors(failed: list[str]) -> int:
    """Print errors, one per line, and return the exit code."""
    for sentence in failed:
        print_safe(f"fedrema: {sentence}", file=sys.stderr)
    return 2 if failed else 0
