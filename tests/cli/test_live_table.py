"""The live table of a grid: made-up events, and once a real grid in a pseudo-terminal."""

import io
import os
import pty
import re
import subprocess

import pytest
from rich.console import Console

from fedrema.cli import live_table
from fedrema.cli.live_table import LiveTable
from fedrema.experiments.forecast import Forecaster
from fedrema.experiments.launchers import Event
from fedrema.experiments.spec_file import read_experiment
from fedrema.experiments.store import Store, key_of
from fedrema.experiments.tasks import missing_tasks
from tests.experiments.made_runs import keep, made_run, made_summary

FILE = """
title = "Two by two"
seeds = 2
[settings]
rounds = 10
clients = 4
samples = 40
hidden = 4
epochs = 1
[columns.small]
title = "small steps"
lr = 0.01
[columns.large]
title = "large steps"
lr = 0.1
[rows.fedavg]
title = "FedAvg"
[rows.fedper]
title = "FedPer"
"""


class ExampleGrid:
    """An experiment with made-up finished runs, and its live table."""

    def __init__(self, folder, quiet=False, text=FILE):
        (folder / "two.toml").write_text(text)
        self.experiment = read_experiment(folder / "two.toml", {"device": "cpu"})
        self.store = Store(folder / "runs")
        self.tasks = missing_tasks(self.experiment.cells, 2, self.store)
        self.table = LiveTable(
            [(self.experiment, 2)], self.tasks, self.store, Forecaster(self.store, "cpu", workers=2), quiet
        )

    def keep(self, task, seed, accuracy=None, seconds=20.0):
        """Store a made-up run that finished, or diverged without an accuracy; every round takes two seconds."""
        settings = task.cell.settings(seed)
        parts = {"settings": settings.flat(), "failed": "Training diverged."}
        if accuracy is not None:
            summary = made_summary(10, {"train": seconds}, best_accuracy=accuracy)
            parts |= {"ran_on": {"device": "cpu"}, "summary": summary, "failed": ""}
        keep(self.store, made_run(key_of(settings), task.cell.method, seed, **parts))

    def shown(self):
        """Return the non-empty lines that a terminal shows now."""
        console = Console(file=io.StringIO(), width=100)
        console.print(self.table.render())
        lines = [" ".join(line.split()) for line in console.file.getvalue().splitlines()]
        return [line for line in lines if line and set(line) != {"─"}]


@pytest.fixture
def example(tmp_path):
    return ExampleGrid(tmp_path)


def test_cells_and_remaining_time_are_updated_by_events(example):
    small, large, other, last = example.tasks
    assert [task.cell.title for task in example.tasks] == [
        "FedAvg, small steps", "FedAvg, large steps", "FedPer, small steps", "FedPer, large steps",
    ]  # fmt: skip
    table = example.table
    table.report(Event("started", small))
    assert example.shown()[0] == "Two by two"
    assert example.shown()[2:5] == ["FedAvg … ·", "FedPer · ·", "FedAvg, small steps: starting"]
    assert re.fullmatch(r"0 of 8 runs finished, about (a second|\d+ seconds) left", example.shown()[-1])

    table.report(Event("round", small, seed=0, round=4, score=0.25))
    assert example.shown()[4] == "FedAvg, small steps: round 4/10, seed 1 of 2, accuracy 25.0 %"
    table.report(Event("round", small, seed=1, round=6, score=0.5))
    assert example.shown()[4] == "FedAvg, small steps: round 6/10 of 2 seeds, accuracy 37.5 %"

    example.keep(small, 0, 0.5)
    example.keep(small, 1, 0.6)
    table.report(Event("finished", small))
    table.report(Event("started", large))
    table.report(Event("started", other))
    assert example.shown()[2:-1] == [
        "FedAvg 55.0 ± 7.1 …", "FedPer … ·", "FedAvg, large steps: starting", "FedPer, small steps: starting",
    ]  # fmt: skip
    # Two seconds per round, measured by now: 3 tasks of 2 runs of 10 rounds, two at a time.
    assert example.shown()[-1] == "2 of 8 runs finished, about 60 seconds left"
    table.report(Event("round", large, seed=0, round=10, score=0.5))
    table.report(Event("round", large, seed=1, round=5))
    assert example.shown()[4] == "FedAvg, large steps: round 5/10, seed 2 of 2"  # the seeds run one after the other
    assert example.shown()[-1] == "3 of 8 runs finished, about 45 seconds left"

    example.keep(large, 0, 0.7)  # one of two seeds finished
    example.keep(large, 1)
    example.keep(other, 0)
    example.keep(other, 1)
    for task in (large, other):
        table.report(Event("finished", task, failed=("…",)))
    table.report(Event("started", last))
    assert example.shown()[2:4] == ["FedAvg 55.0 ± 7.1 70.0 (1)", "FedPer diverged …"]
    assert example.shown()[-1] == "6 of 8 runs finished, about 20 seconds left"
    example.keep(last, 0, 0.7)
    table.report(Event("failed", last, failed=("its process ended with code 130",)))  # stopped after its first seed
    assert example.shown() == ["7 of 8 runs finished"]


def test_rounds_belong_to_one_of_several_tasks_that_run_together(example):
    for task in example.tasks[:2]:
        example.table.report(Event("started", task))
    example.table.report(Event("round", example.tasks[1], seed=1, round=3, score=0.0))
    assert "FedAvg, small steps: starting" in example.shown()
    assert "FedAvg, large steps: round 3/10, seed 1 of 2, accuracy 0.0 %" in example.shown()


def test_without_columns_the_table_has_one_column_of_accuracies(tmp_path):
    text = re.sub(r"(?s)\[columns.small\].*?(?=\[rows)", "", FILE)
    example = ExampleGrid(tmp_path, text=text)
    example.table.report(Event("started", example.tasks[0]))
    assert example.shown()[1:4] == ["accuracy", "FedAvg …", "FedPer ·"]


def test_without_a_terminal_one_line_is_printed_per_task(example, capsys):
    small, large, *_ = example.tasks
    with example.table as table:
        table.report(Event("started", small))
        table.report(Event("round", small, round=3, score=0.5))
        assert capsys.readouterr().err == ""
        example.keep(small, 0, 0.5)
        example.keep(small, 1, 0.6)
        table.report(Event("finished", small))
        line = "FedAvg, small steps: 55.0 ± 7.1 (best accuracy); 2 of 8 runs finished, about 60 seconds left\n"
        assert capsys.readouterr().err == line
        table.report(Event("started", large))
        table.report(Event("failed", large, failed=("FedAvg, large steps: no data.",)))
        assert re.match(r"FedAvg, large steps: no result; 2 of 8 runs finished, about 40 s", capsys.readouterr().err)


def test_progress_of_a_long_task_is_printed_regularly(example, capsys, monkeypatch):
    monkeypatch.setattr(live_table, "SECONDS_BETWEEN_LINES", 0.0)
    task = example.tasks[0]
    example.table.report(Event("started", task))
    capsys.readouterr()
    example.table.report(Event("round", task, seed=0, round=3, score=0.5))
    told = capsys.readouterr().err
    state = "FedAvg, small steps: round 3/10, seed 1 of 2, accuracy 50.0 %"
    assert told.startswith(f"{state}; 0 of 8 runs finished, about ")
    assert told.count("\n") == 1


def test_quiet_prints_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(live_table, "SECONDS_BETWEEN_LINES", 0.0)
    example = ExampleGrid(tmp_path, quiet=True)
    with example.table as table:
        for kind in ("started", "round", "finished"):
            table.report(Event(kind, example.tasks[0], round=3))
    assert capsys.readouterr() == ("", "")


def test_in_a_terminal_the_table_is_shown_while_it_fills_up(programs, tmp_path):
    (tmp_path / "two.toml").write_text(FILE)
    ours, theirs = pty.openpty()
    command = [programs / "fedrema", "grid", "two.toml", "--device", "cpu", "--out", "out", "--rounds", "1"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux raises an error once no process has the terminal open
            part = b""
        if not part:
            break
        shown += part
    os.close(ours)
    assert process.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "8 runs to do: about" in text
    while_it_fills_up, _, at_the_end = text.rpartition("Two by two")
    assert "Two by two" in while_it_fills_up
    assert "…" in while_it_fills_up
    assert "·" in while_it_fills_up
    assert re.search(r"\d of 8 runs finished, about .* left", while_it_fills_up)
    assert "runs finished" not in at_the_end
    assert "Written: out/two.md" in at_the_end
    assert len(Store(tmp_path / "out" / "runs").keys()) == 8
