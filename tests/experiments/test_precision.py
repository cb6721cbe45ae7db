"""The effective precision is part of the key of a run; committed runs are found on every machine."""

import dataclasses
from pathlib import Path

import pytest
import torch

from fedrema.cli import main
from fedrema.experiments.leaderboard.board import Board
from fedrema.experiments.spec_file import read_experiment
from fedrema.experiments.store import Store
from fedrema.experiments.tasks import Task, missing_tasks

ROOT = Path(__file__).parents[2]
RESULTS, RESEARCH = ROOT / "results", ROOT / "research"
GRID = """
[settings]
rounds = 2
clients = 4
samples = 20
epochs = 1
[rows.fedavg]
title = "FedAvg"
[rows.local]
title = "Local"
"""
COMMITTED = {
    RESULTS / "paper": (ROOT / "src/fedrema/experiments/paper").glob("*.toml"),
    **{RESULTS / "beyond" / file.stem: [file] for file in RESEARCH.glob("*.toml") if file.stem != "privacy"},
    RESULTS / "privacy": [RESEARCH / "privacy.toml"],
    RESULTS / "fedfa": (RESEARCH / "fedfa").glob("*.toml"),
    RESULTS / "choosing": (RESEARCH / "choosing").glob("*.toml"),
    RESULTS / "faults": (RESEARCH / "faults").glob("*.toml"),
    RESULTS / "few-samples": (RESEARCH / "few_samples").glob("*.toml"),
    **{RESULTS / "natural" / file.stem: [file] for file in (RESEARCH / "natural").glob("*.toml")},
}
"""The folders of committed results, with the grid files of their runs."""
FILES = {folder: sorted(files) for folder, files in COMMITTED.items()}


@pytest.fixture(params=[False, True], ids=["cpu", "gpu"])
def machine(request, monkeypatch):
    """A machine with or without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param)
    monkeypatch.chdir(ROOT)


def missing_keys(cells, seeds, store):
    return {key for task in missing_tasks(cells, seeds, store) for key in task.keys}


def planned_keys(cells, seeds):
    """Return the keys of the runs of cells, also those on one partition only."""
    every = [variant for cell in cells for variant in (cell, dataclasses.replace(cell, vary="training"))]
    return missing_keys(every, seeds, Store(Path("no-such-folder")))


def test_every_folder_of_committed_runs_is_listed():
    folders = {file.parent.parent for file in RESULTS.rglob("*.jsonl.xz")}
    assert folders <= FILES.keys()


@pytest.mark.parametrize("folder", [each for each in FILES if (each / "runs").is_dir()], ids=lambda each: each.name)
def test_committed_runs_are_those_of_their_experiments(folder, machine):
    store = Store(folder / "runs")
    experiments = [read_experiment(file) for file in FILES[folder]]
    planned = set().union(*(planned_keys(each.cells, each.seeds) for each in experiments))
    assert {run.key for run in store} <= planned
    # Runs of current revisions count as finished, the others are run again.
    missing = set().union(*(missing_keys(each.cells, each.seeds, store) for each in experiments))
    assert not missing & {run.key for run in store if not run.outdated}


@pytest.mark.parametrize("machine", [True], indirect=True, ids=["gpu"])  # other tests find them without one
def test_the_runs_of_the_leaderboard_are_those_of_its_experiments(machine):
    board = Board()
    cells = [(board.experiment.cells, board.seeds), (board.tuned_cells(), board.seeds)]
    cells += [(sweep.cells, sweep.seeds) for sweep in board.tuning.values()]
    planned = set().union(*(planned_keys(some, seeds) for some, seeds in cells))
    assert {run.key for run in board.store} <= planned


@pytest.mark.parametrize("folder", [*FILES, Board().folder], ids=lambda each: each.name)
def test_committed_runs_record_the_precision_in_which_they_were_computed(folder):
    for run in Store(folder / "runs"):
        assert run.settings["precision"] == run.ran_on.products


def grid(tmp_path, *arguments):
    (tmp_path / "grid.toml").write_text(GRID)
    return main(["grid", str(tmp_path / "grid.toml"), "--out", str(tmp_path / "out"), *arguments])


def test_runs_of_a_cpu_are_not_those_of_a_gpu(tmp_path, capsys):
    assert grid(tmp_path, "--quiet", "--precision", "float32") == 0
    finished = "All runs have finished already."
    for arguments, planned in (
        ([], finished),  # auto is float32 here
        (["--device", "cuda"], "2 runs to do"),
        (["--device", "cuda", "--precision", "float32"], finished),
        (["--precision", "float64"], "2 runs to do"),
    ):
        assert grid(tmp_path, "--plan", *arguments) == 0
        assert planned in capsys.readouterr().out


def test_a_grid_in_bf16_is_refused_on_a_cpu_before_its_first_run(tmp_path, capsys):
    assert grid(tmp_path, "--precision", "bf16") == 2
    complaint = capsys.readouterr().err
    assert "fedrema: FedAvg is computed in bf16, which needs a CUDA device: run it on a GPU, or" in complaint
    assert "--precision float32" in complaint
    assert complaint.count("bf16") == 1
    assert not list((tmp_path / "out").rglob("*.json*"))
    assert grid(tmp_path, "--precision", "bf16", "--minutes", "0", "--quiet") == 0  # nothing is run


def test_another_machine_runs_a_task_in_the_same_precision(tmp_path, monkeypatch):
    (tmp_path / "grid.toml").write_text(GRID)
    (task, _) = missing_tasks(read_experiment(tmp_path / "grid.toml").cells, 2, Store(tmp_path / "runs"))
    sent = task.encoded()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    received = Task.decoded(sent)
    assert received.keys == task.keys
    assert {settings.simulation.precision for settings in received.runs} == {"float32"}
