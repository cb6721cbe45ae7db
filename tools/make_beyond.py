"""Rewrite the tables of docs/beyond.md, and all of results/beyond: `make results`.

Nothing is trained: the tables in results/beyond/NAME/runs hold the finished runs; docs/beyond.md lists the commands.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from make_figures import DOCS, fill

from fedrema.cli import main
from fedrema.experiments.comparisons import Comparison, compare, runs_of, scores
from fedrema.experiments.spec import Experiment
from fedrema.experiments.spec_file import read_experiment
from fedrema.experiments.store import FOLDER, Store
from fedrema.experiments.table import MISSING
from fedrema.reporting.statistics import Scores
from fedrema.reporting.tables import markdown_lines

RESULTS = DOCS.parent / "results" / "beyond"
OURS = "fedprior"
ROWS = ("fedavg", "fedrema", OURS)
"""Rows that are compared in pairs."""
RIVALS = ("fedrema-aligned", "fedpac", "fedprior-plain")
"""Further rows that FedPrior is compared with: methods that align features too, and FedPrior without alignment."""
PAIRED = ("lasting", "choose-few", "choose-more", "confirm")


@dataclass(frozen=True)
class Found:
    """The finished runs of a grid file, by kind of data: columns that differ only in the partition are one kind."""

    experiment: Experiment
    kinds: dict[str, list[str]]
    """Names of columns by the title of their kind."""
    accuracy: dict[str, Scores]
    """`honest`, `final` and `best`."""
    outdated: str
    """A note on how many runs are of an older revision; empty if there are none."""

    @classmethod
    def of(cls, file: Path, store: Store) -> "Found":
        """Read a grid file and its runs."""
        experiment = read_experiment(file)
        runs = runs_of(experiment.cells, experiment.seeds, store)
        kinds: dict[str, list[str]] = {}
        for column in experiment.columns:
            kinds.setdefault(column.title.split(", partition")[0], []).append(column.name)
        every = [run for several in runs.values() for run in several]
        older = sum(run.outdated for run in every)
        about = f"Outdated: {older} of these {len(every)} runs were computed by an older revision of fedrema."
        accuracy = {name: scores(runs, f"{name}_accuracy") for name in ("honest", "final", "best")}
        return cls(experiment, kinds, accuracy, about if older else "")

    def of_row(self, quantity: str, row: str, kind: str) -> dict[int, float]:
        """Return a row's accuracies on one kind of data, numbered by partition and seed."""
        columns = self.kinds[kind]
        return {
            1000 * columns.index(column) + seed: value
            for (column, seed), value in self.accuracy[quantity][row].items()
            if column in columns
        }

    def over(self, quantity: str, other: str, kind: str) -> Comparison:
        """Compare FedPrior with another row on one kind of data; a pair has the same partition and seed."""
        return compare(OURS, other, kind, *(self.of_row(quantity, row, kind) for row in (OURS, other)))


def counts(numbers: Iterable[int]) -> str:
    """Return the range of numbers greater than 0, as text: 3, or 1–3."""
    return "–".join(str(number) for number in sorted({*numbers} - {0}))


def means(found: Found) -> str:
    """Return a line per method and a column per kind of data: mean accuracies, and the numbers of runs.

    Missing runs are left out.
    """
    rows = []
    for row in found.experiment.rows:
        honest, final = (
            {kind: found.of_row(name, row.name, kind) for kind in found.kinds} for name in ("honest", "final")
        )
        numbers = counts(len(runs) for runs in honest.values())
        cells = [
            f"{statistics.mean(honest[kind].values()):.1f} / {statistics.mean(final[kind].values()):.1f}"
            if honest[kind] else MISSING
            for kind in found.kinds
        ]  # fmt: skip
        if numbers:
            rows.append((row.title, numbers, *cells))
    return "\n".join(markdown_lines(("method", "runs", *found.kinds), rows, texts=1))


def paired(found: Found) -> str:
    """Return how FedPrior differs from FedAvg and FedReMa, and how far each falls after its best."""
    rows = []
    for kind in found.kinds:
        final, best = ({row: found.of_row(name, row, kind) for row in ROWS} for name in ("final", "best"))
        differences = [
            found.over(quantity, other, kind)
            for other in ROWS if other != OURS
            for quantity in ("honest", "final")
        ]  # fmt: skip
        if all(each.pairs for each in differences):
            falls = (statistics.mean(best[row].values()) - statistics.mean(final[row].values()) for row in ROWS)
            cells = (
                f"{each.mean:+.1f}" + (f" ({each.test.low:+.1f} to {each.test.high:+.1f})" if each.tested else "")
                for each in differences
            )
            rows.append((kind, str(differences[0].pairs), *cells, *(f"{fall:.1f}" for fall in falls)))
    titles = {row: found.experiment.title_of(row) for row in ROWS}
    over = (f"over {titles[other]}, {name}" for other in ROWS if other != OURS for name in ("honest", "final"))
    headings = ("data", "pairs", *over, *(f"fall of {title}" for title in titles.values()))
    return "\n".join(markdown_lines(headings, rows, texts=1))


def rivals(found: Found) -> str:
    """Return FedPrior's advantage over its rivals: the mean of pairs, and half the interval of three or more pairs."""
    rows = []
    for row in (each for each in found.experiment.rows if each.name in RIVALS):
        differences = [[found.over(name, row.name, kind) for name in ("honest", "final")] for kind in found.kinds]
        numbers = counts(honest.pairs for honest, _ in differences)
        if numbers:
            cells = (" / ".join(map(_difference, both)) if both[0].pairs else MISSING for both in differences)
            rows.append((row.title, numbers, *cells))
    return "\n".join(markdown_lines(("FedPrior over", "pairs", *found.kinds), rows, texts=1)) if rows else ""


def _difference(found: Comparison) -> str:
    return f"{found.mean:+.1f}" + f" ± {found.test.high - found.mean:.1f}" * (found.pairs > 2)


def make() -> None:
    """Write everything."""
    page = (DOCS / "beyond.md").read_text()
    for file in sorted((DOCS.parent / "research").glob("*.toml")):
        name, out = file.stem, RESULTS / file.stem
        if f"<!-- {name} -->" not in page:  # of another page
            continue
        if not (out / FOLDER).is_dir():
            fill(DOCS / "beyond.md", name, "Not run yet.")
            continue
        main(["grid", str(file), "--minutes", "0", "--quiet", "--out", str(out)])
        found = Found.of(file, Store(out / FOLDER))
        tables = [means(found), *([paired(found), rivals(found)] if name in PAIRED else []), found.outdated]
        fill(DOCS / "beyond.md", name, "\n\n".join(filter(None, tables)))


if __name__ == "__main__":
    make()
