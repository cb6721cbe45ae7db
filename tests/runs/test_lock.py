"""At most one process writes to a run; a second one exits with code 2 and names the first."""

import json
import os
import subprocess
import time

import numpy as np
import pytest

import fedrema
from fedrema.cli import main
from fedrema.deploy.run_state import locked_run
from fedrema.errors import BadInput
from fedrema.experiments.spec import Cell, Line
from fedrema.experiments.store import Store, key_of
from fedrema.experiments.tasks import Runner, Task
from fedrema.runs.lock import WRITER_FILE, RunLock, Writer
from tests.fixtures import unwatched

SMALL = ("--clients", "4", "--samples", "20", "--epochs", "1", "--quiet")


@pytest.fixture
def run(tmp_path):
    """A stopped run: five of eight rounds."""
    fedrema.run("fedrema", rounds=5, clients=4, samples=20, epochs=1, out=tmp_path / "run")
    return tmp_path / "run"


def content(folder):
    files = (file for file in folder.rglob("*") if file.is_file() and file.name not in ("run.lock", WRITER_FILE))
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


@pytest.mark.parametrize(
    "command",
    [
        ("resume", "RUN", "--rounds", "8"),
        ("run", "fedavg", *SMALL, "--overwrite", "--out", "RUN"),
        ("export", "RUN"),
        ("personalize", "RUN", "--data", "DATA"),
    ],
    ids=lambda command: command[0],
)
def test_a_second_writer_is_refused_and_changes_nothing(run, command, capsys):
    digits = fedrema.make_federation(clients=1, samples=40, partition="iid", data_seed=7)
    np.savez(run.parent / "new.npz", x=digits.x, y=digits.y)
    before = content(run)
    names = {"RUN": str(run), "DATA": str(run.parent / "new.npz")}
    with RunLock(run):
        assert main([names.get(word, word) for word in command]) == 2
        told = capsys.readouterr().err
        assert f"{run} is in use by process {os.getpid()} on " in told
        assert len(told.strip().splitlines()) == 1
    assert content(run) == before
    assert main([names.get(word, word) for word in command]) == 0


def test_a_cell_that_another_grid_trains_is_refused_by_name(tmp_path):
    values = {"clients": 4, "samples": 20, "epochs": 1, "rounds": 1, "quiet": True}
    runner = Runner(Store(tmp_path / "runs"), tmp_path / "work", unwatched)

    nothing = Line("", "", {})
    cell = Cell(nothing, nothing, "fedavg", values)
    task = Task(cell, (0,))
    folder = tmp_path / "work" / key_of(cell.settings(0))
    with RunLock(folder), pytest.raises(BadInput, match=f"is in use by process {os.getpid()}"):
        runner.run(task)
    assert runner.run(task) == []
    assert not folder.exists()


def test_a_second_server_of_a_deployment_is_refused(tmp_path):
    folder = tmp_path / "run"
    assert not RunLock(folder).is_held()
    with locked_run(folder):
        assert RunLock(folder).is_held()
        with pytest.raises(BadInput, match="is in use by process"), locked_run(folder):
            raise AssertionError("two servers")
    assert not RunLock(folder).is_held()


def start(programs, folder, *arguments, method="fedrema"):
    command = [programs / "fedrema", "run", method, *SMALL, "--out", folder, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_kill_9_leaves_no_lock_behind(programs, tmp_path):
    folder = tmp_path / "run"
    process = start(programs, folder, "--rounds", "100000", "--checkpoint-every", "1")
    deadline = time.monotonic() + 60
    while not (folder / "checkpoint" / "state.safetensors").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    assert RunLock(folder).is_held()
    writer = Writer.read(folder / WRITER_FILE)
    assert writer.is_here
    assert writer.is_alive()
    with pytest.raises(BadInput, match=f"in use by process {writer.process} on .*fedrema run fedrema .*: wait"):
        fedrema.resume(folder)
    os.kill(writer.process, 9)
    process.communicate()
    while RunLock(folder).is_held():
        assert time.monotonic() < deadline
    reached = len(fedrema.load(folder).rounds)
    assert len(fedrema.resume(folder, rounds=reached + 2).rounds) == reached + 2


def test_of_two_runs_that_start_together_one_wins(programs, tmp_path):
    folder = tmp_path / "run"
    processes = [start(programs, folder, "--rounds", "60", method=method) for method in ("fedrema", "fedavg")]
    ended = [(process.communicate()[1], process.returncode) for process in processes]
    assert sorted(code for _, code in ended) == [0, 2], ended
    refused = next(told for told, code in ended if code == 2)
    assert "is in use by process" in refused or "already exists" in refused
    run = fedrema.load(folder)
    assert [record["round"] for record in run.rounds] == list(range(1, 61))
    assert ("mean_gap" in run.rounds[0]["trace"]) == (run.method == "fedrema")


def test_reading_needs_no_lock(run, capsys):
    with RunLock(run):
        assert main(["compare", str(run), "--no-plot"]) == 0
        assert main(["report", str(run), "--out", str(run.parent / "page.html")]) == 0
        assert main(["export", str(run), "--out", str(run.parent / "elsewhere")]) == 0


def test_a_damaged_running_json_is_ignored(run):
    with RunLock(run):
        for text in (
            "",
            "[" * 100_000,
            "[]",
            json.dumps({"host": "a", "process": "b", "process_began": 1, "since": 2}),
        ):
            (run / WRITER_FILE).write_text(text)
            assert Writer.read(run / WRITER_FILE) is None
            with pytest.raises(BadInput, match="is in use by another process"):
                RunLock(run).check()


def test_an_export_is_not_shown_as_training(run):
    directory = fedrema.load(run).directory
    with RunLock(run) as lock:
        assert directory.training_process() is None
        lock.training_from(5)
        assert directory.training_process().first == 5
    assert directory.training_process() is None
