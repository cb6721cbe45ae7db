"""fedrema grid."""

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import tyro

from fedrema.base.terminal import Console, print_safe, safe
from fedrema.cli.playing import Part, Playing, check_folder, chosen, play, prepare, read
from fedrema.config.settings import parse_arguments
from fedrema.experiments.report import write_report
from fedrema.experiments.store import FOLDER, Store
from fedrema.experiments.table import Sheet
from fedrema.reporting.tables import plain_table
from fedrema.runs.execute import Interrupted

NARROW = {"published": "publi-\nshed", "difference": "differ-\nence", "within noise": "within\nnoise"}
"""Headings for a terminal of 80 columns."""
STOPPED = "fedrema: stopped; the same command goes on from here."


@dataclasses.dataclass(frozen=True)
class Grid:
    """Run the experiment that a file describes: rows × columns × seeds; what is finished is kept and not run again."""

    file: Annotated[Path, tyro.conf.Positional]
    """TOML file of the experiment."""
    playing: Playing


def grid(arguments: list[str]) -> int:
    """Play what is missing, then write and print the table."""
    asked: Grid = parse_arguments(Grid, arguments, "fedrema grid")
    playing = asked.playing
    if playing.out is not None:
        check_folder(playing.out)
    experiment = read(asked.file, playing)
    parts = chosen([experiment], playing.only, playing.seeds)
    if playing.prepare is not None:
        prepare(parts, playing.prepare)
        return 0
    out = playing.out or check_folder(Path("results") / experiment.name)
    store = Store(out / FOLDER)
    store.check()
    try:
        failed = play(parts, parts, playing, store, out / "unfinished")
    except Interrupted:
        write_report(experiment, parts[0].seeds, store, out)
        print(STOPPED, file=sys.stderr)
        return 130
    write_report(experiment, parts[0].seeds, store, out)
    if not playing.quiet:
        show(parts[0], store, out)
    return complain(failed)


def show(part: Part, store: Store, out: Path) -> None:
    """Print an experiment's table."""
    sheet = Sheet(part.experiment, part.seeds, store)
    console = Console()
    console.print(safe(sheet.experiment.title), highlight=False)
    kept = [place for place, heading in enumerate(sheet.headings) if heading not in sheet.details]
    headings = [NARROW.get(sheet.headings[place], sheet.headings[place]) for place in kept]
    shown = plain_table(headings, texts=2 if sheet.columned else 1)
    for line in sheet.lines:
        shown.add_row(*(safe(line[place].replace(" ± ", "±")) for place in kept))  # close together: 80 columns are few
    console.print(shown)
    console.print(sheet.explanation, style="dim")
    console.print(f"Written: {out / sheet.experiment.name}.md, .csv and .tex", highlight=False, soft_wrap=True)


def complain(failed: list[str]) -> int:
    """Print what went wrong, a line each, and return the exit code."""
    for sentence in failed:
        print_safe(f"fedrema: {sentence}", file=sys.stderr)
    return 2 if failed else 0
