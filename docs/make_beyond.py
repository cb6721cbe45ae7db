"""Write the tables of docs/beyond.md, and all of results/beyond, anew: `make results`.

Nothing is trained: results/beyond/NAME/cells holds what was, by the commands that stand in docs/beyond.md.
"""

import csv
import statistics
from pathlib import Path

from make_figures import DOCS, fill

from fedrema.cli import main
from fedrema.grid.reading import read_experiment
from fedrema.grid.statistics import Scores, compare, runs_of, scores
from fedrema.grid.store import Store
from fedrema.grid.table import MISSING
from fedrema.report.compare import markdown_lines

RESULTS = DOCS.parent / "results" / "beyond"
OURS = "fedprior"
ROWS = ("fedavg", "fedrema", OURS)
"""What is compared in pairs."""
PAIRED = ("lasting", "choose-few", "choose-more", "confirm")


def by_columns(file: Path, quantities: tuple[str, ...] = ("honest", "final")) -> str:
    """Return a table file with a line per method and a column per kind of data: means over seeds, and how many.

    What has not been run is left out.
    """
    with file.open(newline="") as opened:
        found = [row for row in csv.DictReader(opened) if row["seeds"] != "0"]
    columns = list(dict.fromkeys(row["data"] for row in found))
    rows = []
    for method in dict.fromkeys(row["method"] for row in found):
        own = {row["data"]: row for row in found if row["method"] == method}
        seeds = sorted({row["seeds"] for row in own.values()})
        cells = [
            " / ".join(own[column][each].split(" ±")[0] for each in quantities) if column in own else MISSING
            for column in columns
        ]
        rows.append((method, "–".join(seeds), *cells))
    return "\n".join(markdown_lines(("method", "seeds", *columns), rows, texts=1))


def paired(file: Path, store: Store) -> str:
    """Return how FedPrior differs from FedAvg and FedReMa, and how far each falls after its best.

    Columns whose titles differ only in a partition are taken together: a pair has the same partition and seed.
    """
    experiment = read_experiment(file)
    runs = runs_of(experiment.cells, experiment.seeds, store)
    found = {name: scores(runs, f"{name}_accuracy") for name in ("honest", "final", "best")}
    groups: dict[str, list[str]] = {}
    for column in experiment.columns:
        groups.setdefault(column.title.split(", partition")[0], []).append(column.name)
    rows = []
    for title, columns in groups.items():
        honest, final, best = ({row: within(found[name], row, columns) for row in ROWS} for name in found)
        differences = [
            compare(OURS, other, title, quantity[OURS], quantity[other])
            for other in ROWS if other != OURS
            for quantity in (honest, final)
        ]  # fmt: skip
        if all(each.pairs for each in differences):
            falls = (statistics.mean(best[row].values()) - statistics.mean(final[row].values()) for row in ROWS)
            cells = (
                f"{each.mean:+.1f}" + f" ({each.low:+.1f} to {each.high:+.1f})" * each.tested for each in differences
            )
            rows.append((title, str(differences[0].pairs), *cells, *(f"{fall:.1f}" for fall in falls)))
    titles = {row: experiment.title_of(row) for row in ROWS}
    over = (f"over {titles[other]}, {name}" for other in ROWS if other != OURS for name in ("honest", "final"))
    headings = ("data", "pairs", *over, *(f"fall of {title}" for title in titles.values()))
    return "\n".join(markdown_lines(headings, rows, texts=1))


def within(table: Scores, row: str, columns: list[str]) -> dict[int, float]:
    """Return a row's values in some columns, numbered by column and seed."""
    return {
        1000 * columns.index(column) + seed: value for (column, seed), value in table[row].items() if column in columns
    }


def make() -> None:
    """Write everything."""
    for file in sorted((DOCS / "beyond").glob("*.toml")):
        name, out = file.stem, RESULTS / file.stem
        if not (out / "cells").is_dir():
            fill(DOCS / "beyond.md", name, "Not run yet.")
            continue
        main(["grid", str(file), "--minutes", "0", "--quiet", "--out", str(out)])
        tables = [by_columns(out / f"{name}.csv"), *([paired(file, Store(out / "cells"))] if name in PAIRED else [])]
        fill(DOCS / "beyond.md", name, "\n\n".join(tables))


if __name__ == "__main__":
    make()
