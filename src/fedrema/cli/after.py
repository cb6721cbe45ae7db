"""fedrema compare, fedrema export: what comes after runs."""

import dataclasses
import io
import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from fedrema.base.files import write_text
from fedrema.base.terminal import Console, print_safe, safe_lines
from fedrema.config.settings import parse_arguments
from fedrema.errors import BadInput
from fedrema.reporting.curves import draw_curves, picture_kind
from fedrema.reporting.tables import (
    comparison_csv,
    comparison_latex,
    comparison_markdown,
    comparison_table,
    differences_table,
    paired_differences,
)
from fedrema.runs.directory import EXPORT_INDEX, find_runs, read_object
from fedrema.runs.export import export_models
from fedrema.runs.run import Run

Format = Literal["table", "markdown", "latex", "csv"]
FORMATS: dict[str, Format] = {".md": "markdown", ".tex": "latex", ".csv": "csv"}
FILE_WIDTH = 110


@dataclasses.dataclass(frozen=True)
class Compare:
    """Compare runs: a table, the differences between methods with their confidence, a picture of the curves.

    Runs that differ only in their training seed are taken together.
    """

    dirs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs, or folders that hold such."""
    quantity: Literal["honest_accuracy", "best_accuracy", "final_accuracy", "worst_tenth"] = "honest_accuracy"
    """What the differences are of."""
    reference: str | None = None
    """What the others are compared with: a method's name, or a label from the table; default: the best."""
    plot: Path | None = None
    """Picture of the curves, .png, .svg or .pdf; default: curves.png in the folder that holds all the runs."""
    no_plot: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Draw no picture."""
    format: Format | None = None
    """How the comparison is written; default: by the ending of --out (.md, .tex or .csv), else as a table."""
    out: Path | None = None
    """Write the comparison to this file instead of showing it."""


def compare(arguments: list[str]) -> int:
    """Compare runs."""
    asked: Compare = parse_arguments(Compare, arguments, "fedrema compare")
    if asked.plot is not None and asked.no_plot:
        raise BadInput(f"--plot {asked.plot} and --no-plot exclude each other: give one of them.")
    if asked.plot is not None:
        picture_kind(asked.plot)  # refused now, not below a long table
    runs = _runs(asked.dirs, "compare")
    form = asked.format or FORMATS.get(asked.out.suffix.lower() if asked.out else "", "table")
    text = _written(asked, runs, form) if asked.out or form != "table" else None
    messages = []
    if asked.out is not None and text is not None:
        write_text(asked.out, text)
        messages.append(f"Comparison: {asked.out}")
    elif text is not None:
        print(safe_lines(text), end="")
    else:
        _show(Console(), asked, runs)
    # What a program reads from the output is the comparison alone.
    stream = sys.stderr if form != "table" else sys.stdout
    if not asked.no_plot:
        messages.append(_draw(asked, runs))
    for message in messages:
        print_safe(message, file=stream)
    return 0


def _runs(folders: tuple[Path, ...], command: str) -> list[Run]:
    if not folders:
        raise BadInput(f"fedrema {command} needs at least one folder that is a run or holds runs.")
    return [Run(folder) for folder in find_runs(folders)]


def _show(console: Console, asked: Compare, runs: list[Run]) -> None:
    found = paired_differences(runs, asked.quantity, asked.reference)
    console.print(comparison_table(runs))
    if found:
        console.print()
        console.print(differences_table(found, asked.quantity))


def _written(asked: Compare, runs: list[Run], form: Format) -> str:
    if form == "markdown":
        return comparison_markdown(runs, asked.quantity, asked.reference)
    if form == "latex":
        return comparison_latex(runs, asked.quantity, asked.reference)
    if form == "csv":
        return comparison_csv(runs, asked.quantity, asked.reference)
    stream = io.StringIO()
    _show(Console(file=stream, width=FILE_WIDTH), asked, runs)
    return stream.getvalue()


def _draw(asked: Compare, runs: list[Run]) -> str:
    if asked.plot is None and not any(record.accuracy is not None for run in runs for record in run.rounds):
        return "Curves: none yet, no round has been scored."
    path = asked.plot or common_folder(asked.dirs) / "curves.png"
    draw_curves(runs, path)
    return f"Curves: {path}"


def common_folder(folders: tuple[Path, ...]) -> Path:
    """Return the folder that holds all the given ones; the current one if only the root of the disk does."""
    if len(folders) == 1:
        return folders[0]
    try:
        common = Path(os.path.commonpath([folder.resolve() for folder in folders]))
    except ValueError:  # several disks
        return Path()
    if common == Path(common.anchor):
        return Path()
    here = Path.cwd()
    return common.relative_to(here) if common.is_relative_to(here) else common


@dataclasses.dataclass(frozen=True)
class Export:
    """Write each client's model as safetensors, with three lines of plain PyTorch that load it."""

    dirs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders of runs, or folders that hold such."""
    out: Path | None = None
    """Folder for the models, for a single run; default: models in the run's folder."""
    clients: tuple[str, ...] = ()
    """Names of the clients whose models are wanted; default: all."""
    overwrite: bool = False
    """Replace models that were exported before."""
    adapt: bool = True
    """Where the method trains clients a little more before they are used (FedBABU, Per-FedAvg), do so first."""


def export(arguments: list[str]) -> int:
    """Export models."""
    asked: Export = parse_arguments(Export, arguments, "fedrema export")
    runs = _runs(asked.dirs, "export")
    if asked.out is not None and len(runs) > 1:
        raise BadInput(f"--out {asked.out} is for the models of one run, but there are {len(runs)}: name one of them.")
    for run in runs:
        written = export_models(run, asked.out, asked.clients or None, asked.overwrite, adapt=asked.adapt)
        folder = asked.out or run.path / "models"
        models = "model" if len(written) == 1 else "models"
        print_safe(f"{len(written)} {models}: {folder} (README.md there tells how to load one)")
        index = read_object(folder / EXPORT_INDEX, "cannot be read")
        if elsewhere := [entry["client"] for entry in index.get("only_on_nodes", [])]:
            print_safe(
                f"Their own models exist only on their nodes, where fedrema deploy model NODE_FOLDER writes them: "
                f"{', '.join(elsewhere)}."
            )
        if never := index.get("never_counted"):
            print_safe(f"They have not counted in any round: {', '.join(never)}.")
    return 0
