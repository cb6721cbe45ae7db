"""Write the tables and the figure of docs/leaderboard.md and docs/choosing.md from finished runs; trains nothing.

python tools/make_leaderboard.py            # from the committed runs
python tools/make_leaderboard.py FOLDER     # first adds the runs of `fedrema leaderboard … --out FOLDER`
"""

import shutil
import sys
import tempfile
from pathlib import Path
from statistics import mean, stdev

import msgspec
from make_figures import DOCS, FIGURES, fill

from fedrema.cli import main
from fedrema.experiments import figures
from fedrema.experiments.claims import claims_markdown, judge
from fedrema.experiments.comparisons import compare_rows, runs_of, scores
from fedrema.experiments.leaderboard.board import Board
from fedrema.experiments.leaderboard.standings import Table, column_table, overview, tuned_table
from fedrema.experiments.spec_file import read_experiment
from fedrema.experiments.store import FOLDER, Store, key_of
from fedrema.experiments.table import MISSING, Statistic, statistic
from fedrema.methods import registry
from fedrema.reporting.quantities import PERCENT
from fedrema.reporting.tables import markdown_lines
from fedrema.tasks import METRICS

BOARD, CHOOSING = DOCS / "leaderboard.md", DOCS / "choosing.md"
ROOT = DOCS.parent
ADVICE = ("samples", "skew", "clients")
"""Grids of docs/choosing.md, in research/choosing."""
SCORED_OTHERWISE = {
    "pfedme": ("global", "the global model w, which has replaced the personal θ"),
    "fedbabu": ("unadapted", "without fine-tuning"),
}
"""Methods that public code scores in another way: the name of that alternative in the records, and what it is."""
NOT_COMPUTED = "Not computed yet."


def publish(folder: Path) -> None:
    """Add the finished runs of built-in methods in a folder to those that come with fedrema."""
    found, board = Store(folder / FOLDER), Board()
    cells = [(cell, board.seeds) for cell in board.experiment.cells]
    cells += [(cell, sweep.seeds) for sweep in board.tuning.values() for cell in sweep.cells]
    known = {key_of(cell.settings(seed)) for cell, seeds in cells for seed in range(seeds)}
    # The keys of tuned runs depend on the choices, which depend on the runs above.
    for keys in (lambda: known, lambda: _tuned_keys(board)):
        for key in sorted(keys() & {*found.keys()}):
            if found.has(key) and not found.at(key).failed:
                board.store.put_text(key, msgspec.json.encode(found.at(key)).decode() + "\n")
    board.store.fold()


def _tuned_keys(board: Board) -> set[str]:
    return {key_of(cell.settings(seed)) for cell in board.tuned_cells() for seed in range(board.seeds)}


def make_board() -> None:
    """Write the tables and the figure of the leaderboard."""
    board = Board()
    board.write_tuned()
    fill(BOARD, "overview", text(overview(board)))
    for column in board.experiment.columns:
        fill(BOARD, column.name, text(column_table(board, column)))
    fill(BOARD, "tuned", text(tuned_table(board)))
    (spec,) = board.experiment.figures
    with tempfile.TemporaryDirectory() as folder:
        for file in figures.draw(spec, board.experiment, board.seeds, board.store, Path(folder)):
            if file.suffix == ".png":
                shutil.copy(file, FIGURES / "leaderboard.png")


def text(table: Table | None) -> str:
    """Return a table as Markdown."""
    if table is None:
        return NOT_COMPUTED
    return "\n".join([*markdown_lines(table.headings, table.rows, table.texts), "", " ".join(table.notes)])


def make_faults() -> None:
    """Write the table of faults: each faulty row below the correct one."""
    experiment = read_experiment(ROOT / "research" / "faults" / "faults.toml")
    runs = runs_of(experiment.cells, experiment.seeds, Store(ROOT / "results" / "faults" / FOLDER))
    table, rows = scores(runs, "honest"), []
    for claim in experiment.claims:
        (correct,), (faulty,) = claim.rows, claim.over
        (difference,) = compare_rows(table, "", [faulty], [correct])
        honest, final = (
            [statistic(runs[row, ""], quantity) or MISSING for row in (correct, faulty)]
            for quantity in ("honest", "final")
        )
        interval = f"{difference.test.low:+.1f} to {difference.test.high:+.1f}" if difference.tested else MISSING
        cells = (*map(str, honest), *map(str, final), f"{difference.mean:+.1f}", interval)
        rows.append((experiment.title_of(faulty), *cells))
    headings = (
        "method and fault",
        "honest: correct",
        "with fault",
        "final: correct",
        "with fault",
        "difference",
        "95 %",
    )
    fill(BOARD, "faults", "\n".join(markdown_lines(headings, rows)))


def make_scoring() -> None:
    """Write the table of methods that public code scores in another way; every run records both ways."""
    board, rows = Board(), []
    for method, (alternative, words) in SCORED_OTHERWISE.items():
        (runs,) = runs_of([board.experiment.cell(method, "digits")], board.seeds, board.store).values()
        final = statistic(runs, "final")
        other = [PERCENT * run.summary.alternatives[alternative]["accuracy"][1] for run in runs]
        shown = Statistic(mean(other), stdev(other), len(other), METRICS["accuracy"])
        rows.append((registry()[method].title, words, str(final), str(shown)))
    headings = ("method", "public code scores", "final: as in the paper", "as in public code")
    fill(BOARD, "scoring", "\n".join(markdown_lines(headings, rows, texts=2)))


def make_settings() -> None:
    """Write the verdicts on methods that the common settings harm."""
    experiment = read_experiment(ROOT / "research" / "faults" / "settings.toml")
    store = Store(ROOT / "results" / "faults" / FOLDER)
    runs = runs_of(experiment.cells, experiment.seeds, store)
    rows = [
        (row.title, *(str(statistic(runs[row.name, ""], quantity) or MISSING) for quantity in ("honest", "final")))
        for row in experiment.rows
    ]
    fill(BOARD, "settings", "\n".join(markdown_lines(("method", "honest", "final"), rows)))
    judged = [judge(claim, experiment, experiment.seeds, store) for claim in experiment.claims]
    fill(BOARD, "settings-claims", claims_markdown(judged).strip())


def make_choosing() -> None:
    """Write the table of accuracies and the verdicts of each grid."""
    store = Store(ROOT / "results" / "choosing" / FOLDER)
    for name in ADVICE:
        experiment = read_experiment(ROOT / "research" / "choosing" / f"{name}.toml")
        runs = runs_of(experiment.cells, experiment.seeds, store)
        rows = [
            (
                row.title,
                *(str(statistic(runs[row.name, column.name], "honest") or MISSING) for column in experiment.columns),
            )
            for row in experiment.rows
        ]
        fill(CHOOSING, name, "\n".join(markdown_lines(("method", *(each.title for each in experiment.columns)), rows)))
        judged = [judge(claim, experiment, experiment.seeds, store) for claim in experiment.claims]
        fill(CHOOSING, f"{name}-claims", claims_markdown(judged).strip())


def make_reports() -> None:
    """Rewrite results/choosing and results/faults."""
    grids = [("choosing", name) for name in ADVICE] + [("faults", "faults"), ("faults", "settings")]
    for folder, name in grids:
        file, out = ROOT / "research" / folder / f"{name}.toml", ROOT / "results" / folder
        main(["grid", str(file), "--minutes", "0", "--quiet", "--out", str(out)])


if __name__ == "__main__":
    for given in sys.argv[1:]:
        publish(Path(given))
    sys.path.append(str(ROOT))  # research.faults
    make_board()
    make_faults()
    make_scoring()
    make_settings()
    make_choosing()
    make_reports()
