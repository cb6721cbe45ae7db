"""fedrema grid."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from fedrema.cli.progress import RunProgress, Watch
from fedrema.data.atomic import written_whole
from fedrema.errors import BadInput
from fedrema.grid.experiment import Cell, Experiment
from fedrema.grid.reading import read_experiment
from fedrema.grid.runner import Runner, Task, missing
from fedrema.grid.store import Store
from fedrema.grid.table import Sheet
from fedrema.report.compare import plain_table
from fedrema.runs.execute import Interrupted
from fedrema.settings import Settings, parse_arguments

NARROW = {"published": "publi-\nshed", "difference": "differ-\nence", "within noise": "within\nnoise"}
"""Headings for a terminal of 80 columns."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """Run the experiment that a file describes: rows × columns × seeds; what is finished is kept and not run again."""

    file: Annotated[Path, tyro.conf.Positional]
    """TOML file of the experiment."""
    out: Path | None = None
    """Folder of the results; default: results/NAME, after the file."""
    seeds: int | None = None
    """Training seeds 0, 1, …; default: as many as the file says."""
    rounds: int | None = None
    """Communication rounds in every cell, instead of what the file says."""
    only: str | None = None
    """Run only cells whose row or column has one of these names (a comma between them)."""
    minutes: float | None = None
    """Start only what should be finished after this many minutes; the same command goes on another time."""
    device: str = "auto"
    """Where to train: auto, cpu or cuda."""
    quiet: bool = False
    """No progress bar, no table."""

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        for name, least in (("seeds", 1), ("rounds", 1), ("minutes", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise BadInput(f"--{name} must be {least} or more, got {value}.")


def grid(arguments: list[str]) -> int:
    """Play what is missing, then write and print the table."""
    asked: Grid = parse_arguments(Grid, arguments, "fedrema grid")
    changes = ["--device", asked.device, *(["--rounds", str(asked.rounds)] if asked.rounds else [])]
    experiment = read_experiment(asked.file, tuple(changes))
    cells = chosen(experiment, asked.only)
    seeds, out = asked.seeds or experiment.seeds, asked.out or Path("results") / experiment.name
    store = Store(out / "cells")
    store.check()
    failed: list[str] = []
    try:
        with RunProgress(asked.quiet) as progress:

            def watching(settings: Settings) -> Watch:
                label = f"{settings.method.called()} {settings.data.dataset} seed {settings.simulation.seed}"
                return progress.watch(label, settings.simulation.rounds)

            runner = Runner(store, out / "unfinished", watching)
            tasks = missing(cells, seeds, store)
            if not asked.quiet:
                print(forecast(tasks, runner), file=sys.stderr)
            for _, wrong in runner.play(tasks, asked.minutes):
                failed += wrong
                _write(Sheet(experiment, seeds, store), out)
    except Interrupted:
        print("fedrema: stopped; the same command goes on from here.", file=sys.stderr)
        return 130
    sheet = Sheet(experiment, seeds, store)
    _write(sheet, out)
    if not asked.quiet:
        _show(sheet, out)
    for sentence in failed:
        print(f"fedrema: {sentence}", file=sys.stderr)
    return 2 if failed else 0


def chosen(experiment: Experiment, names: str | None) -> tuple[Cell, ...]:
    """Return an experiment's cells, or those of some rows and columns only."""
    if names is None:
        return experiment.cells
    wanted = {name.strip() for name in names.split(",")}
    known = {line.name for line in (*experiment.rows, *experiment.columns) if line.name}
    if unknown := sorted(wanted - known):
        raise BadInput(f"--only {unknown[0]!r} is neither a row nor a column; valid are {', '.join(sorted(known))}.")
    rows, columns = ({line.name for line in lines} & wanted for lines in (experiment.rows, experiment.columns))
    return tuple(
        cell
        for cell in experiment.cells
        if (not rows or cell.row.name in rows) and (not columns or cell.column.name in columns)
    )


def forecast(tasks: list[Task], runner: Runner) -> str:
    """Say how much there is to do."""
    runs = sum(len(task.runs) for task in tasks)
    if not runs:
        return "Everything is there already."
    times = [runner.seconds(task) for task in tasks]
    known = [seconds for seconds in times if seconds is not None]
    if len(known) < len(times):
        return f"{runs} runs in {len(tasks)} cells to play; how long that takes is known after the first."
    return f"{runs} runs in {len(tasks)} cells to play: about {sum(known) / 60:.1f} minutes."


def _write(sheet: Sheet, out: Path) -> None:
    for suffix, text in (("md", sheet.markdown()), ("csv", sheet.comma_separated())):
        with written_whole(out / f"{sheet.experiment.name}.{suffix}") as temporary:
            temporary.write_text(text, encoding="utf-8")


def _show(sheet: Sheet, out: Path) -> None:
    console = Console()
    console.print(sheet.experiment.title, highlight=False)
    headings = [NARROW.get(heading, heading) for heading in sheet.headings]
    shown = plain_table(headings, texts=2 if sheet.columned else 1)
    for line in sheet.lines:
        shown.add_row(*(text.replace(" ± ", "±") for text in line))  # close together: 80 columns are few
    console.print(shown)
    console.print(sheet.explanation, style="dim")
    console.print(f"Written: {out / sheet.experiment.name}.md and .csv", highlight=False, soft_wrap=True)
