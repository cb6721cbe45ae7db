"""fedrema leaderboard: the packaged results, and the row of a method of one's own."""

import re
import shutil
from pathlib import Path

import pytest

from fedrema.cli import main
from fedrema.experiments.leaderboard.board import PACKAGED
from fedrema.experiments.store import Store
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
    assert "Not computed yet: CIFAR-10, 100 samples, s = 0.2" in shown
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


def test_only_the_named_columns_are_prepared(capsys, in_an_empty_folder):
    assert main(["leaderboard", "all", "--only", "digits", "--prepare", "prepared"]) == 0  # digits needs no preparation
    assert not list(in_an_empty_folder.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fedavgg"], "Method 'fedavgg' is unknown; valid are apfl,"),
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
