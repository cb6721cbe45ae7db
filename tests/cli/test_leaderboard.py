"""fedrema leaderboard: the packaged results, and the row of a method of one's own."""

import os
import re
import shutil
from pathlib import Path

import pytest

from fedrema.cli import main
from fedrema.experiments.leaderboard.board import ALWAYS, COMPLETE, PACKAGED, Board
from fedrema.experiments.store import Store
from fedrema.methods import registry
from tests.cli.refusals import refused

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_method.py"
QUICK = ("--rounds", "2", "--seeds", "2", "--device", "cpu", "--out", "out")


@pytest.fixture
def example(in_an_empty_folder):
    """An empty folder with the example of an own method."""
    shutil.copy(EXAMPLE, in_an_empty_folder)
    return in_an_empty_folder


def row_of(text, title):
    return next(line.split() for line in text.splitlines() if re.match(rf" *\d+ +{title} ", line))


def test_the_packaged_results_are_shown_best_first(capsys, in_an_empty_folder):
    assert main(["leaderboard"]) == 0
    shown = capsys.readouterr().out
    ranks = [float(line.split()[-2]) for line in shown.splitlines() if re.match(r" *\d+ ", line)]
    assert len(ranks) > 25
    assert ranks == sorted(ranks)
    assert row_of(shown, "FedReMa")[3].partition("±")[0] == "97.2"
    words, board = " ".join(shown.split()), Board()
    for column in board.experiment.columns:
        computed = any(board.store.find(cell.settings(0)) for cell in board.experiment.cells if cell.column == column)
        assert (column.title in words.partition("Not computed yet: ")[2]) is not computed
    assert not list(in_an_empty_folder.iterdir())


def test_one_command_produces_the_row_of_an_own_method(capsys, example):
    assert main(["leaderboard", "own_method:FedMedian", "local", "fedavg", *QUICK]) == 0
    shown = capsys.readouterr().out
    rows = {title: row_of(shown, title) for title in ("FedMedian", "Local", "FedAvg")}
    assert sorted(int(row[0]) for row in rows.values()) == [1, 2, 3]
    honest = {title: float(row[2].partition("±")[0]) for title, row in rows.items()}
    assert rows["FedMedian"][-2:] == ["–", "–"]
    for title in ("Local", "FedAvg"):
        assert float(rows[title][5]) == pytest.approx(honest[title] - honest["FedMedian"], abs=0.11)
        assert re.search(r"[+-][\d.]+ to [+-][\d.]+$", " ".join(rows[title]))
    assert re.search(
        r"A round of FedMedian takes \d+ ms on one CPU core; a client sends 9.6 kB and receives 9.6 kB", shown
    )
    assert "FedMedian was not run on CIFAR-10, 100 samples, s = 0.2;" in shown
    report = (example / "out" / "leaderboard.md").read_text()
    assert re.search(r"\| FedMedian \| digits \| 2 \| \d", report)
    packaged, mine = Store(PACKAGED / "runs"), Store(example / "out" / "runs")
    assert {*packaged.keys()} < {*mine.keys()}  # the results of the other methods, without running them
    assert len(mine.keys()) == len(packaged.keys()) + 6


@pytest.mark.slow
def test_a_submission_is_compared_with_all_methods(capsys, example):
    assert main(["leaderboard", "own_method:FedMedian", "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert row_of(shown, "FedReMa")[2].partition("±")[0] == "97.2"
    assert 20 < int(row_of(shown, "FedMedian")[0]) < 35


COLUMNS = ("digits", "few-strong", "few-weak", "many", "dirichlet", "fashion")


def test_the_plan_lists_all_columns_in_order_and_starts_nothing(capsys, example):
    assert main(["leaderboard", "own_method:FedMedian", "--plan", "--device", "cuda"]) == 0
    shown = capsys.readouterr().out
    lines = re.findall(r"^(\S.*?) +(\d+) +(\d+) +\S", shown, flags=re.M)
    assert lines == [(column, "1", "3") for column in COLUMNS]
    assert re.search(r"^18 runs to do", shown, flags=re.M)
    assert [path.name for path in example.iterdir()] == ["own_method.py"]


def test_the_plan_of_the_whole_leaderboard_contains_tuning(capsys, in_an_empty_folder):
    assert main(["leaderboard", "--plan", "--rounds", "2", "--seeds", "1", "--device", "cuda"]) == 0
    shown = capsys.readouterr().out
    every, always = str(len(registry())), str(len(ALWAYS))  # without finished runs there are no best methods
    lines = re.findall(r"^(\S.*?) +(\d+) +(\d+) +\S", shown, flags=re.M)
    assert [line[:2] for line in lines] == [(name, every if name in COMPLETE else always) for name in COLUMNS]
    assert "The best methods, of which the later lines consist, follow from the runs" in shown
    assert main(["leaderboard", "--plan", "--only", "digits", "--device", "cuda"]) == 0
    shown = capsys.readouterr().out
    planned = [line.split()[0] for line in shown.splitlines() if re.match(r"(tuning: |tuned: )?\w+ +\d", line)]
    untuned = [row for column, row in Board().untuned() if column == "digits"]
    assert ("tuning:" in planned) == bool(untuned)
    assert (f"Not counted: {3 * len(untuned)} runs" in shown) == bool(untuned)
    assert not list(in_an_empty_folder.iterdir())


@pytest.mark.datasets
@pytest.mark.skipif("FEDREMA_DATA" not in os.environ, reason="FEDREMA_DATA does not say where the datasets lie")
def test_prepared_partitions_replace_the_dataset(capsys, in_an_empty_folder, monkeypatch):
    arguments = ["leaderboard", "local", "--only", "few-strong", "--seeds", "1"]
    assert main([*arguments, "--prepare", "prepared"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2  # one replicate, and the partition for tuning
    monkeypatch.setenv("FEDREMA_DATA", str(in_an_empty_folder / "prepared"))
    assert main([*arguments, "--rounds", "1", "--device", "cpu", "--out", "out"]) == 0
    assert row_of(capsys.readouterr().out, "Local")[0] == "1"


def test_only_the_named_columns_are_prepared(capsys, in_an_empty_folder):
    assert main(["leaderboard", "all", "--only", "digits", "--prepare", "prepared"]) == 0  # digits needs no preparation
    assert not list(in_an_empty_folder.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fedavgg"], "Method 'fedavgg' is unknown; perhaps you meant fedavg; valid are apfl,"),
        (["own:Missing"], "The method 'own:Missing' cannot be loaded"),
        (
            ["fedavg", "--only", "mnist"],
            "--only 'mnist' is not a column of the leaderboard; valid are digits, few-strong,",
        ),
        (["fedavg", "--seeds", "0"], "--seeds must be at least 1, got 0."),
        (["--out", "nowhere", "--only", ""], "--only '' is not a column"),
        (["--out", "nowhere"], "--out nowhere has no finished runs of the leaderboard; name methods to run"),
    ],
)
def test_bad_input(capsys, in_an_empty_folder, arguments, message):
    assert message in refused(capsys, "leaderboard", *arguments)
    assert not list(in_an_empty_folder.iterdir())


def test_a_file_is_no_folder_for_results(capsys, in_an_empty_folder):
    (in_an_empty_folder / "out").write_text("")
    assert "--out out: out is a file; name a folder" in refused(capsys, "leaderboard", "fedavg", "--out", "out")
