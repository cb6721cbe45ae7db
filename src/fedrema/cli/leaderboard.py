"""fedrema leaderboard: how the methods compare, and the places of your own methods among them."""

import dataclasses
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fedrema.base.terminal import Console, print_safe, safe
from fedrema.cli.arguments import parse_arguments, positional
from fedrema.cli.experiment import ExperimentOptions, Part, check_folder, execute, plan_of, prepare
from fedrema.cli.grid import STOPPED, print_errors
from fedrema.errors import BadInput
from fedrema.experiments.leaderboard.board import ON_CPU, PACKAGED, Board
from fedrema.experiments.leaderboard.standings import Table, column_table, overview, tuned_table
from fedrema.experiments.report import write_report
from fedrema.experiments.spec import Cell
from fedrema.methods import find_method
from fedrema.reporting.tables import plain_table
from fedrema.runs.execute import Interrupted
from fedrema.runs.worker_pool import gpu_names

ALL, TUNED = "all", "tuned"
PLAN_HEADINGS = ("column", "cells", "runs", "estimated")
TWO_LINES = ("average ", "minus ", "95 % ")
"""Starts of headings that take two lines, so that the table fits into 80 columns."""


@dataclasses.dataclass(frozen=True)
class Leaderboard:
    """Compare the methods under the same conditions.

    Without METHODS, show the leaderboard that comes with fedrema. With METHODS, run them in the columns that this
    machine can compute, and show their places among the other methods.
    """

    methods: tuple[str, ...] = positional(())
    """Your own methods as module:Class, or built-in ones; all for every built-in method; tuned to tune the best six."""
    experiment: ExperimentOptions = dataclasses.field(default_factory=ExperimentOptions)


@dataclasses.dataclass(frozen=True)
class Stage:
    """Runs that depend on the results of the stages before."""

    name: str
    """In the plan, before the names of its columns."""
    cells: Callable[[], list[Cell]]
    """Returns the cells to run; called when the stages before have finished, because their results decide."""
    seeds: int


def leaderboard(arguments: list[str]) -> int:
    """Show the leaderboard, or run methods and show their places."""
    args = parse_arguments(Leaderboard, arguments, "fedrema leaderboard")
    options, names = args.experiment, args.methods
    for name in names:
        if name not in (ALL, TUNED):
            find_method(name)  # an unknown method is reported before anything is run
    own = [name for name in names if ":" in name]
    out = check_folder(options.out or Path("results") / "leaderboard") if names else options.out or PACKAGED
    board = Board(out, own, options.changes(), options.seeds)
    columns = _columns(board, options)
    if options.prepare is not None:
        prepare(_parts(board, columns), options.prepare)
        return 0
    if options.plan:
        _print_plan(board, names or (ALL, TUNED), own, columns, options)
        return 0
    if not names:
        board.store.check()
        if not board.store.keys():
            raise BadInput(
                f"--out {out} has no finished runs of the leaderboard; name methods to run, or leave it out."
            )
        show(overview(board, complete=False))
        return 0
    board.adopt(PACKAGED)
    board.store.check()
    failed: list[str] = []
    code, started = 0, time.monotonic()
    try:
        for stage in _stages(board, names):
            chosen = tuple(cell for cell in stage.cells() if cell.column.name in columns)
            failed += _run(board, Part(board.experiment, chosen, stage.seeds), options, started)
    except Interrupted:
        code = 130
        print(STOPPED, file=sys.stderr)
    board.write_tuned()
    write_report(board.experiment, board.seeds, board.store, out)
    if not options.quiet and not code:
        _show_results(board, names, out)
    return print_errors(failed) or code


def _stages(board: Board, names: Sequence[str]) -> Iterator[Stage]:
    """Yield what is run for METHODS, in this order."""
    yield Stage("", lambda: [cell for cell in board.experiment.cells if cell.row.name in names], board.seeds)
    if ALL in names:
        yield Stage("", board.complete_cells, board.seeds)
        yield Stage("", board.further_cells, board.seeds)
    if TUNED in names:
        yield Stage("tuning: ", board.tuning_cells, 1)
        yield Stage("tuned: ", board.tuned_cells, board.seeds)


def _print_plan(
    board: Board, names: Sequence[str], own: Sequence[str], columns: Sequence[str], options: ExperimentOptions
) -> None:
    """Print the columns with missing runs and their cost, as far as the results so far decide which runs follow."""
    with tempfile.TemporaryDirectory() as folder:
        planned = Board(Path(folder), own, options.changes(), options.seeds)
        for finished in (PACKAGED, board.folder):
            planned.adopt(finished)
        parts = []
        for stage in _stages(planned, names):
            cells = stage.cells()
            for column in dict.fromkeys(cell.column.name for cell in cells if cell.column.name in columns):
                experiment = dataclasses.replace(planned.experiment, name=f"{stage.name}{column}")
                chosen = tuple(cell for cell in cells if cell.column.name == column)
                parts.append(Part(experiment, chosen, stage.seeds))
        plan = plan_of(parts, options.device, planned.store)
        untuned = [row for column, row in planned.untuned() if column in columns] if TUNED in names else []
    shown = plain_table(PLAN_HEADINGS, texts=1)
    for row in plan.experiments:
        shown.add_row(*map(safe, row))
    if plan.cells:
        Console().print(shown)
    print_safe(plan.total)
    if untuned:
        print_safe(f"Not counted: {len(untuned) * planned.seeds} runs with the settings that tuning will choose.")
    if plan.cells and {ALL, TUNED} & {*names}:
        print_safe(
            "The best methods, of which the later lines consist, follow from the runs that have finished so far."
        )


def _run(board: Board, part: Part, options: ExperimentOptions, started: float) -> list[str]:
    """Run the cells of one stage; --minutes is for all stages together."""
    if not part.cells:
        return []
    if options.minutes is not None:
        left = options.minutes - (time.monotonic() - started) / 60
        options = dataclasses.replace(options, minutes=max(left, 0.0))
    return execute([part], [part], options, board.store, board.folder / "unfinished")


def _columns(board: Board, options: ExperimentOptions) -> list[str]:
    """Return the names of the columns to run: those that --only names, or those that this machine can compute.

    What is only prepared or planned may run on another machine.
    """
    names = [column.name for column in board.experiment.columns]
    if options.only is not None:
        wanted = [name.strip() for name in options.only.split(",")]
        for name in wanted:
            if name not in names:
                raise BadInput(f"--only {name!r} is not a column of the leaderboard; valid are {', '.join(names)}.")
        return wanted
    elsewhere = options.prepare is not None or options.plan
    return names if elsewhere or gpu_names(options.device) else [*ON_CPU]


def _parts(board: Board, columns: Sequence[str]) -> list[Part]:
    """Return everything that can be run in some columns."""
    parts = [Part(board.experiment, board.experiment.cells, board.seeds)]
    parts += [Part(sweep, sweep.cells, sweep.seeds) for sweep in board.tuning.values()]
    return [
        dataclasses.replace(part, cells=tuple(cell for cell in part.cells if cell.column.name in columns))
        for part in parts
    ]


def _show_results(board: Board, names: Sequence[str], out: Path) -> None:
    """Print the places of the first method among the others; for all and tuned, the whole leaderboard."""
    if names[0] in (ALL, TUNED):
        show(overview(board, complete=False))
        if (tuned := tuned_table(board)) is not None:
            show(tuned)
    else:
        title = board.experiment.title_of(names[0])
        tables = {column.title: column_table(board, column, names[0]) for column in board.experiment.columns}
        for table in tables.values():
            if table is not None:
                show(table, title)
        if left := [column for column, table in tables.items() if table is None]:
            print_safe(f"{title} was not run on {'; '.join(left)}.")
            print_safe("Without a GPU, only digits is run, or the columns that --only names.")
    print_safe(f"Written: {out / board.experiment.name}.md, .csv and .tex")


def show(table: Table, emphasised: str = "") -> None:
    """Print a table with its notes; the row of one method in bold."""
    console = Console()
    console.print(safe(table.title), highlight=False)
    headings = [_broken(heading) for heading in table.headings]
    shown = plain_table(headings, texts=table.texts)
    for row in table.rows:
        texts = (safe(text.replace(" ± ", "±")) for text in row)
        shown.add_row(*texts, style="bold" if emphasised in row else "")
    console.print(shown)
    for note in table.notes:
        console.print(safe(note), style="dim", highlight=False)


def _broken(heading: str) -> str:
    start = next((start for start in TWO_LINES if heading.startswith(start)), "")
    return f"{start.rstrip()}\n{heading.removeprefix(start)}" if start else heading
