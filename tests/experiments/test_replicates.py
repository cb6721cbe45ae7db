"""Replicates with their own partition and training seed: their words, old runs on one partition, and the plan."""

import dataclasses

import pytest

from fedrema.experiments.claims import judge
from fedrema.experiments.comparisons import compare_with_reference, comparisons_markdown, runs_of, scores
from fedrema.experiments.components import components_markdown, components_of
from fedrema.experiments.forecast import Forecaster
from fedrema.experiments.plan import make_plan
from fedrema.experiments.spec_file import read_experiment
from fedrema.experiments.store import Store, key_of
from fedrema.experiments.table import Sheet
from fedrema.experiments.tasks import finished_runs
from tests.experiments.made_runs import keep, made_run, made_summary

FILE = """
vary = "both"
seeds = 3
[settings]
rounds = 3
[rows.fedavg]
title = "FedAvg"
[rows.fedper]
title = "FedPer"
[[claims]]
says = "It is so."
kind = "above"
rows = ["fedper"]
over = ["fedavg"]
"""
CROSSED = """
seeds = 2
[settings]
rounds = 3
[columns.p0]
data-seed = 0
[columns.p1]
data-seed = 1
[rows.fedavg]
title = "FedAvg"
[[figures]]
kind = "components"
"""


class Made:
    """An experiment, and a store for made-up runs."""

    def __init__(self, folder, text=FILE):
        (folder / "made.toml").write_text(text)
        self.experiment = read_experiment(folder / "made.toml")
        self.store = Store(folder / "runs")

    def keep(self, row, seed, best, column="", vary=None, outdated=False, seconds=0.0, **parts):
        cell = self.experiment.cell(row, column)
        settings = (cell if vary is None else dataclasses.replace(cell, vary=vary)).settings(seed)
        summary = made_summary(rounds=3, seconds={"train": seconds}, best_accuracy=best, honest_accuracy=best)
        run = made_run(key_of(settings), row, seed, settings=settings.flat(), summary=summary, **parts)
        keep(self.store, dataclasses.replace(run, revisions={"method": 0}) if outdated else run)

    def seeds(self, row):
        runs = finished_runs(self.experiment.cell(row, ""), 3, self.store)
        return [(run.seed, run.settings["data-seed"]) for run in runs]


@pytest.fixture
def made(tmp_path):
    return Made(tmp_path)


def test_comparisons_pair_replicates_and_say_so(made):
    for seed, (one, other) in enumerate([(0.5, 0.51), (0.6, 0.62), (0.7, 0.71)]):
        made.keep("fedavg", seed, one)
        made.keep("fedper", seed, other)
    found = judge(made.experiment.claims[0], made.experiment, 3, made.store)
    # Differences 1, 2, 1: mean 4/3, deviation 0.577, t = 4, p = 0.057.
    assert found.verdict == "not decided"
    assert "corrected p = 0.057, 3 replicates; about 4 needed to decide)" in found.evidence
    table = scores(runs_of(made.experiment.cells, 3, made.store), "best")
    text = comparisons_markdown(compare_with_reference(table, [""]), made.experiment)
    assert "| corrected p | replicates |" in text
    assert "paired by replicate" in text


def test_one_replicate_is_no_test(made):
    made.keep("fedavg", 0, 0.5)
    made.keep("fedper", 0, 0.6)
    found = judge(made.experiment.claims[0], made.experiment, 3, made.store)
    assert found.evidence.startswith(
        "one replicate each, so far FedPer 10.0 points above FedAvg (1 replicate, no test)"
    )


def test_outdated_runs_on_one_partition_are_shown_until_there_is_a_replicate(made):
    for seed in range(3):
        made.keep("fedavg", seed, 0.5 + seed / 100, vary="training", outdated=True)
    assert made.seeds("fedavg") == [(0, 0), (1, 0), (2, 0)]
    sheet = Sheet(made.experiment, 3, made.store)
    assert sheet.lines[0][:3] == ["FedAvg", "0, 3 outdated", "51.0 ± 1.0†"]
    assert "training seeds on one partition, not replicates" in sheet.explanation
    made.keep("fedavg", 1, 0.9)
    assert made.seeds("fedavg") == [(1, 1)]
    sheet = Sheet(made.experiment, 3, made.store)
    assert sheet.lines[0][:3] == ["FedAvg", "1", "90.0"]
    assert "one partition" not in sheet.explanation


def test_outdated_runs_on_one_partition_are_called_seeds_in_the_evidence(made):
    for seed in range(3):
        made.keep("fedavg", seed, 0.5 + seed / 100, vary="training", outdated=True)
        made.keep("fedper", seed, 0.6 - seed / 100, vary="training", outdated=True)
    found = judge(made.experiment.claims[0], made.experiment, 3, made.store)
    assert (found.outdated, "3 seeds" in found.evidence, "replicates" in found.evidence) == (True, True, False)


def test_runs_of_the_present_revision_on_one_partition_are_never_mixed_in(made):
    for seed in range(3):
        made.keep("fedavg", seed, 0.5, vary="training")
    assert made.seeds("fedavg") == [(0, 0)]  # the first is a replicate too


def test_outdated_replicates_are_preferred_to_as_many_runs_on_one_partition(made):
    for seed in range(2):
        made.keep("fedavg", seed, 0.5, outdated=True)
        made.keep("fedavg", seed, 0.4, vary="training", outdated=True)
    assert made.seeds("fedavg") == [(0, 0), (1, 1)]


def test_variance_components_come_from_a_crossed_grid(tmp_path):
    made = Made(tmp_path, CROSSED)
    for column, values in {"p0": (0.10, 0.12), "p1": (0.20, 0.22)}.items():
        for seed, best in enumerate(values):
            assert not components_of(made.experiment, runs_of(made.experiment.cells, 2, made.store))
            made.keep("fedavg", seed, best, column)
    found = components_of(made.experiment, runs_of(made.experiment.cells, 2, made.store))
    # Points 10, 12 and 20, 22: mean squares of rows 100, of columns 4, of the rest 0.
    assert found["fedavg"].partition == pytest.approx(50**0.5)
    assert found["fedavg"].seed == pytest.approx(2**0.5)
    assert "| FedAvg | 2 × 2 | 16.0 | 7.1 | 1.4 | 0.0 | 96 % |" in components_markdown(made.experiment, found)


def plan(made, device):
    parts = [(made.experiment, made.experiment.cells, 3)]
    return make_plan(parts, made.store, Forecaster.of_finished_runs(made.store, device))


def test_without_a_gpu_the_plan_is_for_that_of_the_finished_runs(made):
    gpu = {"ran_on": {"device": "NVIDIA H200", "beside": 1}, "seconds": 12.0}
    made.keep("fedavg", 0, 0.5, **gpu)
    made.keep("fedper", 2, 0.5, outdated=True, **gpu)
    found = plan(made, "auto")
    # 4 seconds a round, shared with another task: 2; 3 rounds in each of 2 and of 3 runs.
    assert [(each.experiment, each.cell, each.runs, each.seconds) for each in found.cells] == [
        ("made", "FedAvg", 2, pytest.approx(12)),
        ("made", "FedPer", 3, pytest.approx(18)),
    ]
    assert found.total == "5 runs to do: about 30 seconds on one NVIDIA H200."
    assert "| made | FedPer | 3 | 18 seconds |" in found.markdown()
    assert "| made | 2 | 5 | 30 seconds |" in found.markdown()
    assert plan(made, "cpu").total.endswith("on this CPU.")


def test_on_a_gpu_that_is_absent_the_time_is_in_proportion_to_the_samples(tmp_path):
    known = Made(tmp_path, FILE.replace("rounds = 3", "rounds = 3\nsamples = 40"))
    known.keep("fedavg", 0, 0.5, ran_on={"device": "NVIDIA H200"}, seconds=12.0)
    made = Made(tmp_path, FILE.replace("rounds = 3", "rounds = 3\nsamples = 20"))
    found = plan(made, "cuda")
    assert [each.seconds for each in found.cells] == [pytest.approx(3 * 3 * 2.0), None]
    assert found.total == "6 runs to do: about 18 seconds on one NVIDIA H200, and 3 runs of unknown time."
