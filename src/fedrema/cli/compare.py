"""fedrema compare."""

import dataclasses
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fedrema.cli.arguments import parse_arguments, positional
from fedrema.cli.run_folders import common_folder
from fedrema.errors import BadInput

if TYPE_CHECKING:
    from fedrema.base.terminal import Console
    from fedrema.runs.run import Run

Format = Literal["table", "markdown", "latex", "csv"]
FORMATS: dict[str, Format] = {".md": "markdown", ".tex": "latex", ".csv": "csv"}
FILE_WIDTH = 110


@dataclasses.dataclass(frozen=True)
class Compare:
    """Compare runs: a table of results, paired differences between methods with confidence intervals, learning curves.

    Runs that differ only in their training seed form one row.
    """

    dirs: tuple[Path, ...] = positional()
    """At least one folder of a run, or folder that contains runs."""
    quantity: str = "honest"
    """Quantity whose differences are tested: honest, best, final or worst_tenth, which are those of the task's primary
    metric; of another metric with its name, such as final_auc."""
    reference: str | None = None
    """Method, or label from the table, with which the others are compared. Default: the best."""
    plot: Path | None = None
    """File for the curves: .png, .svg or .pdf. Default: curves.png in the folder that contains all runs."""
    no_plot: bool = False
    """Draw no curves."""
    format: Format | None = None
    """Format of the comparison. Default: by the suffix of --out (.md, .tex or .csv), otherwise a table."""
    out: Path | None = None
    """Write the comparison to this file instead of printing it."""


def compare(arguments: list[str]) -> int:
    """Compare runs."""
    args = parse_arguments(Compare, arguments, "fedrema compare")
    from fedrema.base.files import write_text
    from fedrema.base.terminal import Console, print_safe, safe_lines
    from fedrema.reporting.curves import image_format
    from fedrema.runs.directory import find_runs
    from fedrema.runs.run import Run

    if args.plot is not None and args.no_plot:
        raise BadInput(f"--plot {args.plot} and --no-plot exclude each other: give one of them.")
    if args.plot is not None:
        image_format(args.plot)  # checked before a long table is printed
    runs = [Run(folder) for folder in find_runs(args.dirs)]
    form = args.format or FORMATS.get(args.out.suffix.lower() if args.out else "", "table")
    text = _written(args, runs, form) if args.out or form != "table" else None
    messages = []
    if args.out is not None and text is not None:
        write_text(args.out, text)
        messages.append(f"Comparison: {args.out}")
    elif text is not None:
        print(safe_lines(text), end="")
    else:
        _show(Console(), args, runs)
    # Where another program reads the comparison from stdout, messages go to stderr.
    stream = sys.stderr if form != "table" else sys.stdout
    if not args.no_plot:
        messages.append(_draw(args, runs))
    for message in messages:
        print_safe(message, file=stream)
    return 0


def _show(console: "Console", args: Compare, runs: list["Run"]) -> None:
    from fedrema.reporting.tables import comparison_table, differences_table, paired_differences

    found = paired_differences(runs, args.quantity, args.reference)
    console.print(comparison_table(runs))
    if found:
        console.print()
        console.print(differences_table(found, args.quantity, runs[0].metric))


def _written(args: Compare, runs: list["Run"], form: Format) -> str:
    from fedrema.base.terminal import Console
    from fedrema.reporting.tables import comparison_csv, comparison_latex, comparison_markdown

    if form == "markdown":
        return comparison_markdown(runs, args.quantity, args.reference)
    if form == "latex":
        return comparison_latex(runs, args.quantity, args.reference)
    if form == "csv":
        return comparison_csv(runs, args.quantity, args.reference)
    stream = io.StringIO()
    _show(Console(file=stream, width=FILE_WIDTH), args, runs)
    return stream.getvalue()


def _draw(args: Compare, runs: list["Run"]) -> str:
    from fedrema.reporting.curves import draw_curves

    if args.plot is None and not any(record.primary is not None for run in runs for record in run.rounds):
        return "Curves: none, because no round has been evaluated yet."
    path = args.plot or common_folder(args.dirs) / "curves.png"
    draw_curves(runs, path)
    return f"Curves: {path}"
