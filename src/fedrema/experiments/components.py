"""How much of the variance between runs is due to the partition, and how much to training, in a crossed grid.

The columns of such a grid are partitions, and every one is run with the same training seeds.
"""

from collections.abc import Mapping

import numpy as np

from fedrema.experiments.comparisons import Runs, scores
from fedrema.experiments.spec import Experiment
from fedrema.reporting.statistics import VarianceComponents, variance_components
from fedrema.reporting.tables import markdown_lines

HEADINGS = ["method", "partitions × seeds", "mean", "partition", "training seed", "rest", "share of the partition"]
EXPLANATION = (
    "Standard deviations of a two-way random-effects model without replication, estimated by the method of moments:"
    " a run's value is the mean plus an effect of its partition, an effect of its training seed, and the rest (their"
    " interaction and everything else). Negative estimates of a variance are shown as 0. Share of the partition: in"
    " the variance of a run with another partition and another seed."
)


def components_of(experiment: Experiment, runs: Runs) -> dict[str, VarianceComponents]:
    """Return the variance components of each row, over the columns and seeds that it has all runs of.

    Outdated runs are left out. A row needs two columns and two seeds.
    """
    current = {cell: [run for run in several if not run.outdated] for cell, several in runs.items()}
    found = {}
    for row, values in scores(current, experiment.quantity).items():
        if (estimate := _estimate(values, [line.name for line in experiment.columns])) is not None:
            found[row] = estimate
    return found


def _estimate(values: Mapping[tuple[str, int], float], columns: list[str]) -> VarianceComponents | None:
    started = [column for column in columns if any(name == column for name, _ in values)]
    seeds = sorted(seed for seed in {seed for _, seed in values} if all((column, seed) in values for column in started))
    if not started or not seeds:
        return None
    return variance_components(np.array([[values[column, seed] for seed in seeds] for column in started]))


def components_markdown(experiment: Experiment, found: Mapping[str, VarianceComponents]) -> str:
    """Return a table of variance components with an explanation."""
    lines = [
        [
            experiment.title_of(row),
            f"{each.partitions} × {each.seeds}",
            *(f"{value:.1f}" for value in (each.mean, each.partition, each.seed, each.rest)),
            f"{100 * each.shares[0]:.0f} %",
        ]
        for row, each in found.items()
    ]
    return "\n".join([*markdown_lines(HEADINGS, lines, texts=1), "", EXPLANATION, ""])
