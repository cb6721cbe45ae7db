"""Write the tables of docs/natural.md.

`python tools/make_natural.py` reads the finished runs of the grids in research/natural, and trains one run per method
and dataset for the verdicts, which need the predictions of the final models. The page says how to run the grids.
"""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from make_figures import DOCS, fill

import fedrema
from fedrema.experiments.comparisons import runs_of
from fedrema.experiments.finished_run import FinishedRun
from fedrema.experiments.spec import Cell
from fedrema.experiments.spec_file import read_experiment
from fedrema.experiments.store import FOLDER, Store
from fedrema.runs.execute import execute
from fedrema.tasks import Metric, find_metric

PAGE = DOCS / "natural.md"
GRIDS = DOCS.parent / "research" / "natural"
RESULTS = DOCS.parent / "results" / "natural"
NAMES = ("nlschools", "insteval", "lung", "adult", "digits")


def make() -> None:
    """Fill in the table of each dataset."""
    for name in NAMES:
        experiment = read_experiment(GRIDS / f"{name}.toml")
        runs = runs_of(experiment.cells, experiment.seeds, Store(RESULTS / name / FOLDER))
        with tempfile.TemporaryDirectory() as folder:
            sentences = verdicts(experiment.cells, Path(folder))
        by_title = {cell.row.title: runs[cell.row.name, cell.column.name] for cell in experiment.cells}
        fill(PAGE, name, "\n".join([*table(by_title), "", *sentences]))


def table(runs: dict[str, list[FinishedRun]]) -> Iterator[str]:
    """Return a table of methods: honest and final value and worst tenth of the primary metric, and other metrics."""
    first = next(iter(runs.values()))[0].summary
    primary, *others = (find_metric(name) for name in first.metrics)
    unit = " (%)" if primary.percent else ""
    titles = [f"{each.title}{' (%)' if each.percent else ''}" for each in others]
    heads = [f"honest {primary.title}{unit}", "final", "worst tenth", *titles]
    yield f"| method | {' | '.join(heads)} |"
    yield f"|---|{'---:|' * len(heads)}"
    for title, several in runs.items():
        found = [run.summary.metrics for run in several]
        cells = [
            shown(primary, [each[primary.name].honest for each in found]),
            shown(primary, [each[primary.name].final for each in found]),
            shown(primary, [each[primary.name].worst_tenth for each in found]),
            *(shown(other, [each[other.name].final for each in found if other.name in each]) for other in others),
        ]
        yield f"| {title} | {' | '.join(cells)} |"


def shown(metric: Metric, values: list[float | None]) -> str:
    """Return mean ± standard deviation."""
    known = [value for value in values if value is not None]
    factor, digits = (100, 1) if metric.percent else (1, 3)
    deviation = np.std(known, ddof=1) if len(known) > 1 else 0.0
    return f"{factor * np.mean(known):.{digits}f} ± {factor * deviation:.{digits}f}"


def verdicts(cells: Sequence[Cell], folder: Path) -> list[str]:
    """Train each method with the first seed, and return the verdict on each as a line of a list."""
    runs = [execute(cell.settings(0).placed(folder / cell.row.name)) for cell in cells]
    return [f"- {each.label} compared with {each.baseline}: {each.sentence()}" for each in fedrema.verdicts(runs)]


if __name__ == "__main__":
    make()
