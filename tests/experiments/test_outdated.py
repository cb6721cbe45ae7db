"""Outdated cells: a cell is run again after its files have changed, or if it is of an older revision."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from fedrema import engine
from fedrema.cli import main
from fedrema.errors import BadInput
from fedrema.experiments.claims import claims_markdown, judge
from fedrema.experiments.report import write_report
from fedrema.experiments.spec_file import read_experiment
from fedrema.experiments.store import Store, key_of
from fedrema.experiments.table import Sheet
from fedrema.experiments.tasks import Runner, finished_runs, missing_tasks, outdated_keys
from fedrema.methods.fedavg import FedAvg
from fedrema.runs.provenance import inputs_of
from tests.experiments.made_runs import keep
from tests.fixtures import unwatched

OWN = """
title = "Own files"
seeds = 1
[settings]
federation = "data.npz"
net = "my_networks:make"
head = "3"
rounds = 2
epochs = 1
batch = 5
device = "cpu"
[rows.mine]
method = "my_method:Mine"
"""
METHOD = """
from dataclasses import dataclass
from fedrema import Method
from my_losses import penalty

@dataclass(frozen=True)
class Mine(Method):
    name, title, paper = "mine", "Mine", "none"

    def loss(self, net, client, batch):
        return super().loss(net, client, batch) + penalty(client)
"""
LOSSES = "def penalty(client):\n    return 0.0 * sum(value.square().sum() for value in client.params.values())\n"
NETWORKS = """
from torch import nn

def make(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, classes))
"""


def write_data(file, shift=0):
    generator = np.random.default_rng(0)
    y = (np.arange(60) + shift) % 3
    np.savez(file, x=generator.normal(size=(60, 6)).astype(np.float32), y=y, client=np.repeat(np.arange(3), 20))


@pytest.fixture
def own(tmp_path, monkeypatch):
    for name, content in (
        *(("own.toml", OWN), ("my_method.py", METHOD), ("my_losses.py", LOSSES), ("my_networks.py", NETWORKS)),
    ):
        (tmp_path / name).write_text(content)
    write_data(tmp_path / "data.npz")
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("my_method", "my_losses", "my_networks"):
        sys.modules.pop(name, None)


CHANGES = {
    "the method's file": lambda folder: (folder / "my_method.py").write_text(METHOD.replace("penalty(client)", "1.0")),
    "what it imports": lambda folder: (folder / "my_losses.py").write_text(LOSSES.replace("0.0", "0.5")),
    "the network's module": lambda folder: (folder / "my_networks.py").write_text(NETWORKS.replace("5", "7")),
    "the labels": lambda folder: write_data(folder / "data.npz", shift=1),
}


def run_fedrema(programs, *command):
    """Run fedrema in another process; return its exit code and its error output."""
    done = subprocess.run([programs / "fedrema", *command], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_a_cell_is_run_again_after_any_file_it_depends_on_has_changed(own, programs):
    grid = ("grid", "own.toml", "--out", "out")
    assert run_fedrema(programs, *grid)[1].startswith("1 run to do")
    assert run_fedrema(programs, *grid) == (0, "All runs have finished already.\n")
    for number, (what, change) in enumerate(CHANGES.items(), 2):
        change(own)
        assert run_fedrema(programs, *grid)[1].startswith("1 run to do"), what
        assert len(Store(own / "out" / "runs").keys()) == number, what
    (own / "elsewhere.py").write_text("")  # a file that the cell does not depend on
    assert run_fedrema(programs, *grid) == (0, "All runs have finished already.\n")
    assert len({tuple(run.curves["accuracy"]) for run in Store(own / "out" / "runs")}) > 1
    write_data(own / "data.npz")  # the original content
    for name, content in (("my_method.py", METHOD), ("my_losses.py", LOSSES), ("my_networks.py", NETWORKS)):
        (own / name).write_text(content)
    assert run_fedrema(programs, *grid)[1] == "All runs have finished already.\n"


def test_a_run_cannot_be_resumed_after_a_file_has_changed_and_the_file_is_named(own, programs):
    options = (
        "--federation",
        "data.npz",
        "--net",
        "my_networks:make",
        "--head",
        "3",
        "--epochs",
        "1",
        "--batch",
        "5",
        "--quiet",
    )
    assert run_fedrema(programs, "run", "my_method:Mine", *options, "--rounds", "2", "--out", "r")[0] == 0
    before = {file: file.read_bytes() for file in (own / "r").rglob("*") if file.is_file()}
    files = ("my_method.py", "my_losses.py", "my_networks.py", "data.npz")
    for file, change in zip(files, CHANGES.values(), strict=True):
        content = (own / file).read_bytes()
        change(own)
        code, said = run_fedrema(programs, "resume", "r", "--rounds", "4", "--quiet")
        (own / file).write_bytes(content)
        assert (code, said.count("\n")) == (2, 1), said
        assert f"r cannot be continued: {file} has changed since it was started" in said
        assert {each: each.read_bytes() for each in before} == before
    assert run_fedrema(programs, "resume", "r", "--rounds", "4", "--quiet") == (0, "")


def test_a_run_can_be_resumed_after_its_data_was_saved_again_unchanged(own, programs):
    options = ("--federation", "data.npz", "--epochs", "1", "--quiet", "--out", "r")
    assert run_fedrema(programs, "run", "fedavg", *options, "--rounds", "2")[0] == 0
    with np.load("data.npz") as file:
        np.savez_compressed("data.npz", **{name: file[name] for name in file.files})
    assert run_fedrema(programs, "resume", "r", "--rounds", "3", "--quiet") == (0, "")


def test_a_partition_file_is_part_of_a_cell(tmp_path):
    file = tmp_path / "parts.toml"
    file.write_text('partition-file = "x"\n')
    for name, share in (("one", 5), ("two", 7)):
        parts = {"a": list(range(share)), "b": list(range(20, 40))}
        (tmp_path / f"{name}.json").write_text(json.dumps(parts))
    columns = "".join(f'[columns.{name}]\npartition-file = "{tmp_path}/{name}.json"\n' for name in ("one", "two"))
    file.write_text(f"seeds = 1\n[settings]\nrounds = 1\n{columns}[rows.fedavg]\n")
    one, two = (cell.settings(0) for cell in read_experiment(file).cells)
    assert key_of(one) != key_of(two)


def test_a_file_that_changes_before_its_task_starts_is_refused(own):
    cell = read_experiment(own / "own.toml").cells[0]
    store = Store(own / "runs")
    (task,) = missing_tasks([cell], 1, store)
    CHANGES["the labels"](own)
    with pytest.raises(BadInput, match=r"^data.npz has changed since the command started"):
        Runner(store, own / "work", unwatched).run(task)
    assert store.keys() == []


PLAIN = """
title = "Revisions"
seeds = 2
[settings]
rounds = 2
clients = 4
samples = 40
hidden = 4
epochs = 1
device = "cpu"
[rows.fedavg]
title = "FedAvg"
[rows.local]
title = "Local"
[[claims]]
says = "FedAvg is better."
kind = "above"
rows = ["fedavg"]
over = ["local"]
[[figures]]
kind = "curves"
"""


@pytest.fixture
def plain(tmp_path):
    file = tmp_path / "plain.toml"
    file.write_text(PLAIN)
    assert main(["grid", str(file), "--out", str(tmp_path / "out"), "--quiet"]) == 0
    return file


def test_keys_of_built_in_methods_and_data_depend_on_settings_only(plain, monkeypatch):
    cell = read_experiment(plain).cells[0]
    before = key_of(cell.settings(0))
    assert inputs_of(cell.settings(0)) == {}
    monkeypatch.setattr(FedAvg, "revision", 2, raising=False)
    monkeypatch.setitem(engine.REVISIONS, "cpu", 2)
    assert key_of(cell.settings(0)) == before


def test_cells_of_an_older_revision_are_shown_as_outdated_and_run_again(plain, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    monkeypatch.setattr(FedAvg, "revision", 2, raising=False)
    experiment, store = read_experiment(plain), Store(out / "runs")
    sheet = Sheet(experiment, 2, store)
    fedavg, local = sheet.lines
    assert fedavg[1] == "0, 2 outdated"
    assert fedavg[2].endswith("†")
    assert local[1] == "2"
    assert "†" not in "".join(local)
    assert "Marked †: computed by an older revision" in sheet.markdown()
    assert r"^{\dagger}" in sheet.latex()
    assert "†" in claims_markdown([judge(experiment.claims[0], experiment, 2, store)])
    assert len(outdated_keys(experiment.cells, 2, store)) == 2
    assert main(["grid", str(plain), "--out", str(out), "--minutes", "0"]) == 0
    said = capsys.readouterr()
    assert "2 finished runs are outdated: computed by an older revision of fedrema, run again." in said.err
    assert "All runs have finished already" not in said.err
    assert "†" in said.out
    assert "†" in (out / "plain.md").read_text()

    assert main(["grid", str(plain), "--out", str(out)]) == 0
    assert capsys.readouterr().err.startswith("2 runs to do")
    assert len(store.keys()) == 4
    assert not outdated_keys(experiment.cells, 2, store)
    assert all(store.has(key_of(cell.settings(seed))) for cell in experiment.cells for seed in range(2))
    assert "†" not in (out / "plain.md").read_text()
    assert main(["grid", str(plain), "--out", str(out)]) == 0
    assert capsys.readouterr().err == "All runs have finished already.\n"


def test_a_cell_with_some_current_runs_shows_only_these(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(FedAvg, "revision", 2, raising=False)
    experiment, store = read_experiment(plain), Store(tmp_path / "out" / "runs")
    cell = experiment.cell("fedavg", "")
    (task,) = missing_tasks([cell], 1, store)
    assert Runner(store, tmp_path / "work", unwatched).run(task) == []
    assert [run.seed for run in finished_runs(cell, 2, store)] == [0]
    assert Sheet(experiment, 2, store).lines[0][1] == "1"


def test_the_engine_has_a_revision_for_each_kind_of_device(plain, tmp_path, monkeypatch):
    experiment, store = read_experiment(plain), Store(tmp_path / "out" / "runs")
    runs = list(store)
    for file in store.folder.iterdir():
        file.unlink()
    for run in runs:
        keep(store, dataclasses.replace(run, revisions={"method": 1, "cpu": 1}))
    monkeypatch.setitem(engine.REVISIONS, "cuda", 9)
    assert not missing_tasks(experiment.cells, 2, store)
    monkeypatch.setitem(engine.REVISIONS, "cpu", 2)
    assert len(missing_tasks(experiment.cells, 2, store)) == 2
    write_report(experiment, 2, store, tmp_path / "out")
    assert "0, 2 outdated" in (tmp_path / "out" / "plain.csv").read_text()


def test_an_unfinished_run_of_an_older_revision_starts_again(plain, tmp_path, monkeypatch):
    cell = read_experiment(plain, {"rounds": 3}).cells[0]
    store, work = Store(tmp_path / "new"), tmp_path / "work"
    (task,) = missing_tasks([cell], 1, store)

    def interrupted(settings):
        def stop(result):
            raise KeyboardInterrupt

        return stop

    with pytest.raises(KeyboardInterrupt):
        Runner(store, work, interrupted).run(task)
    monkeypatch.setattr(FedAvg, "revision", 2, raising=False)
    seen = []
    Runner(store, work, lambda _: lambda result: seen.append(result.record["round"])).run(task)
    assert seen == [1, 2, 3]


def test_a_run_of_an_older_revision_cannot_be_resumed_but_can_be_used(tmp_path, monkeypatch, capsys):
    run = str(tmp_path / "run")
    assert main(["run", "fedavg", "--rounds", "2", "--hidden", "4", "--out", run, "--quiet"]) == 0
    monkeypatch.setattr(FedAvg, "revision", 2, raising=False)
    assert main(["resume", run, "--rounds", "3"]) == 2
    said = capsys.readouterr().err
    assert "was started with revision 1 of FedAvg; this version of fedrema has revision 2: start it again." in said
    assert main(["export", run]) == 0
    monkeypatch.setattr(FedAvg, "revision", 1)
    monkeypatch.setitem(engine.REVISIONS, "cpu", 2)
    assert main(["resume", run, "--rounds", "3", "--device", "cpu"]) == 2
    assert "revision 1 of the engine on CPU devices" in capsys.readouterr().err


def test_an_absence_revision_outdates_only_runs_with_absent_clients(plain, tmp_path, monkeypatch, capsys):
    rows = "\n".join(
        f'[rows.{name}]\nmethod = "fedavg"\n{name} = {value}'
        for name, value in {"participation": 0.5, "dropout": 0.3, "late": 0.5}.items()
    )
    plain.write_text(f"{PLAIN.partition('[[claims]]')[0]}\n{rows}\n")
    out = tmp_path / "out"
    assert main(["grid", str(plain), "--out", str(out), "--quiet"]) == 0
    runs = {name: tmp_path / name for name in ("full", "partial")}
    for run, share in zip(runs.values(), ("1", "0.5"), strict=True):
        options = ["--participation", share, "--rounds", "2", "--hidden", "4", "--out", str(run), "--quiet"]
        assert main(["run", "fedavg", *options]) == 0
    monkeypatch.setattr(FedAvg, "absence_revision", 2, raising=False)
    experiment, store = read_experiment(plain), Store(out / "runs")
    assert {task.cell.row.name for task in missing_tasks(experiment.cells, 1, store)} == {
        "participation",
        "dropout",
        "late",
    }
    assert main(["resume", str(runs["full"]), "--rounds", "3"]) == 0
    assert main(["resume", str(runs["partial"]), "--rounds", "3"]) == 2
    assert "was started with revision 1 of FedAvg; this version of fedrema has revision 2" in capsys.readouterr().err
