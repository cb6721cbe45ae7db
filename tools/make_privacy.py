"""Draw docs/figures/privacy.png and fill the table of docs/privacy.md from the finished runs of results/privacy.

Nothing is trained here; `fedrema grid research/privacy.toml` runs what is missing.
"""

import statistics

import matplotlib.pyplot as plt
from make_figures import DOCS, FIGURES, fill

from fedrema.experiments.comparisons import runs_of
from fedrema.experiments.finished_run import FinishedRun
from fedrema.experiments.spec_file import read_experiment
from fedrema.experiments.store import FOLDER, Store
from fedrema.reporting.tables import markdown_lines

ROOT = DOCS.parent
COLOURS = {"central": "#0072B2", "local": "#D55E00", "sample": "#009E73"}
STROKES = {"fedavg": "--", "fedrema": "-"}


def accuracies(runs: list[FinishedRun]) -> list[float]:
    """Return the honest accuracies of runs in percent."""
    return [100 * run.summary["honest_accuracy"] for run in runs]


def epsilon(runs: list[FinishedRun]) -> float | None:
    """Return the ε that runs have spent; None without noise."""
    found: float | None = runs[0].summary.epsilon
    return found


def cell(runs: list[FinishedRun]) -> str:
    """Return the accuracy and ε of a cell as text."""
    values, spent = accuracies(runs), epsilon(runs)
    accuracy = f"{statistics.mean(values):.1f} ± {statistics.stdev(values):.1f}"
    return accuracy if spent is None else f"{accuracy} (ε = {spent:.3g})"


def make() -> None:
    """Write the figure and the table."""
    experiment = read_experiment(ROOT / "research" / "privacy.toml")
    found = runs_of(experiment.cells, experiment.seeds, Store(ROOT / "results" / "privacy" / FOLDER))
    rows = [
        [row.title, *(cell(found[row.name, column.name]) for column in experiment.columns)] for row in experiment.rows
    ]
    headings = ["method, --dp", *(column.title for column in experiment.columns)]
    fill(DOCS / "privacy.md", "privacy", "\n".join(markdown_lines(headings, rows)))
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for row in experiment.rows:
        method, mode = row.name.split("-")
        runs = [found[row.name, column.name] for column in experiment.columns]
        points = [(spent, statistics.mean(accuracies(each))) for each in runs if (spent := epsilon(each)) is not None]
        axes.plot(*zip(*points, strict=True), STROKES[method], color=COLOURS[mode], marker="o", label=row.title)
    axes.set_xscale("log")
    axes.set_xlabel("ε after 30 rounds (smaller: more privacy)")
    axes.set_ylabel("honest accuracy (%)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(FIGURES / "privacy.png", dpi=120)


if __name__ == "__main__":
    make()
