"""What the leaderboard shows: the order of the methods, and a table for each column."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from fedrema.experiments.comparisons import compare_with_reference, runs_of, scores
from fedrema.experiments.finished_run import FinishedRun
from fedrema.experiments.leaderboard.board import Board
from fedrema.experiments.spec import Line
from fedrema.experiments.table import ABOUT_OUTDATED, MISSING, OUTDATED, statistic

QUANTITIES = {"honest": "honest", "final": "final", "worst_tenth": "worst tenth"}
"""Headings of the accuracies in percent."""
COSTS = ("ms per round", "kB sent", "kB received")
FASTEST = 10
"""One in this many rounds counts for the time of a round: the fastest, because other programs used the machine."""
KILOBYTE = 1000
ABOUT_ACCURACY = (
    "Accuracy in percent, mean ± standard deviation over replicates; each has its own partition and training seed."
)
ABOUT_COSTS = (
    "ms per round: training, aggregation and evaluation of all clients, median of the fastest tenth of the rounds, on"
    " {device}. kB: per client and round, 1 kB = 1000 bytes."
)


@dataclass(frozen=True)
class Table:
    """A table as text, with notes below it."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    texts: int = 2
    """How many of the first columns are text."""


def overview(board: Board, complete: bool = True) -> Table:
    """Return the methods by average rank, with their honest accuracy in every column.

    If not `complete`, columns without any run are left out, and the others have their names as headings.
    """
    ranking, ordered = board.ranked()
    ranks = dict(zip(ranking.names, ranking.ranks, strict=True)) if ranking else {}
    runs = runs_of(board.experiment.cells, board.seeds, board.store)
    started = {column for (_, column), several in runs.items() if several}
    missing = [column for column in board.experiment.columns if column.name not in started]
    columns = [column for column in board.experiment.columns if complete or column not in missing]
    rows = []
    for place, row in enumerate(ordered, 1):
        honest = (_accuracy(runs[row, column.name], "honest") for column in columns)
        average = f"{ranks[row]:.1f}" if row in ranks else MISSING
        rows.append((str(place), board.experiment.title_of(row), average, *honest))
    notes = [ABOUT_ACCURACY.replace("Accuracy", "Honest accuracy")]
    notes += [f"Average rank: over {ranking.blocks_are}."] if ranking else []
    if not complete:
        notes += [f"{column.name}: {column.title}." for column in columns if column.name != column.title]
    notes += [f"Not computed yet: {'; '.join(column.title for column in missing)}."] if missing else []
    absent = [row.title for row in board.experiment.rows if row.name not in ordered]
    notes += [f"Methods without any run yet: {', '.join(absent)}."] if absent else []
    headings = (column.title if complete else column.name for column in columns)
    return Table(
        board.experiment.title,
        ("place", "method", "average rank", *headings),
        tuple(rows),
        (*notes, *_outdated(rows)),
    )


def column_table(board: Board, column: Line, reference: str | None = None) -> Table | None:
    """Return the methods of a column by honest accuracy, with what they cost; None without any run.

    With a `reference`, one of the rows, the table has the difference of each method from it instead of the costs; None
    if the reference has not been run.
    """
    cells = [cell for cell in board.experiment.cells if cell.column == column]
    runs = runs_of(cells, board.seeds, board.store)
    found = {row: several for (row, _), several in runs.items() if any(not run.failed for run in several)}
    if not found or (reference is not None and reference not in found):
        return None
    table = scores(runs, "honest")
    places = sorted(found, key=lambda row: -mean(table[row].values()) if table[row] else 0.0)
    titles = {row: board.experiment.title_of(row) for row in places}
    if reference is not None:
        compared = {each.row: each for each in compare_with_reference(table, [column.name], reference) if each.pairs}
        extra: dict[str, tuple[str, ...]] = {
            row: (f"{each.mean:+.1f}", f"{each.test.low:+.1f} to {each.test.high:+.1f}" if each.tested else MISSING)
            for row, each in compared.items()
        }
        headings: tuple[str, ...] = (f"minus {titles[reference]}", "95 % interval")
        mine = dict(zip(COSTS, costs(found[reference]), strict=True))
        about = (
            f"Differences from {titles[reference]} in points of honest accuracy, paired by replicate; the intervals"
            f" are not corrected for their number. A round of {titles[reference]} takes {mine['ms per round']} ms on"
            f" {_device([found[reference]])}; a client sends {mine['kB sent']} kB and receives"
            f" {mine['kB received']} kB."
        )
    else:
        extra = {row: costs(runs) for row, runs in found.items()}
        headings, about = COSTS, ABOUT_COSTS.format(device=_device(found.values()))
    rows = tuple(
        (
            str(place),
            titles[row],
            *(_accuracy(found[row], quantity) for quantity in QUANTITIES),
            *extra.get(row, (MISSING, MISSING)),
        )
        for place, row in enumerate(places, 1)
    )
    notes = (ABOUT_ACCURACY, about, *_outdated(rows))
    return Table(column.title, ("place", "method", *QUANTITIES.values(), *headings), rows, notes)


def tuned_table(board: Board) -> Table | None:
    """Return the tuned methods next to their untuned results; None if none has been run."""
    rows = []
    for cell in board.tuned_cells():
        plain = board.experiment.cell(cell.row.base, cell.column.name)
        both = runs_of([plain, cell], board.seeds, board.store)
        before, after = both.values()
        if not after:
            continue
        table = scores(both, "honest")
        (difference,) = compare_with_reference(table, [cell.column.name], plain.row.name)
        interval = f" ({difference.test.low:+.1f} to {difference.test.high:+.1f})" if difference.tested else ""
        rows.append(
            (
                plain.row.title,
                cell.column.title,
                ", ".join(f"`--{name} {value}`" for name, value in cell.row.swept.items()),
                *(f"{_accuracy(before, quantity)} → {_accuracy(after, quantity)}" for quantity in QUANTITIES),
                f"{difference.mean:+.1f}{interval}",
            )
        )
    if not rows:
        return None
    headings = ("method", "data", "chosen", *QUANTITIES.values(), "difference in honest (95 %)")
    notes = (ABOUT_ACCURACY, "Left of the arrow with the method's defaults, right of it tuned.", *_outdated(rows))
    return Table("Tuned", headings, tuple(rows), notes, texts=3)


def costs(runs: Sequence[FinishedRun]) -> tuple[str, ...]:
    """Return the milliseconds of a round, and the kilobytes that a client sends and receives in it."""
    finished = [run for run in runs if not run.failed]
    milliseconds = 1000 * mean(round_seconds(run) for run in finished)
    sent, received = (
        mean(values) / KILOBYTE
        for values in ([run.bytes_sent for run in finished], [run.bytes_received for run in finished])
    )
    return f"{milliseconds:.0f}", f"{sent:.1f}", f"{received:.1f}"


def round_seconds(run: FinishedRun) -> float:
    """Return the time of a round: the median of the fastest tenth of the rounds."""
    seconds = sorted(run.curve("seconds").values())
    return median(seconds[: max(1, len(seconds) // FASTEST)])


def _accuracy(runs: list[FinishedRun], quantity: str) -> str:
    found = statistic(runs, quantity)
    return MISSING if found is None else f"{found}{OUTDATED if any(run.outdated for run in runs) else ''}"


def _device(several: Iterable[list[FinishedRun]]) -> str:
    devices = sorted({run.device for runs in several for run in runs if not run.failed})
    return " and ".join("one CPU core" if device == "cpu" else device for device in devices)


def _outdated(rows: Sequence[Sequence[str]]) -> list[str]:
    return [ABOUT_OUTDATED.strip()] if any(OUTDATED in text for row in rows for text in row) else []
