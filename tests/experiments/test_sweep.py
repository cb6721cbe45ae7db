"""Sweeps: their rows, the choice of the best settings, and the use of these settings."""

import tomllib

import pytest

from fedrema.cli import main
from fedrema.cli.arguments import parse_settings
from fedrema.errors import BadInput
from fedrema.experiments.spec_file import read_experiment
from fedrema.experiments.store import Store
from fedrema.experiments.sweep import Choice, choices, choices_markdown, tuned_file
from tests.experiments.test_claims import Bench

FILE = """
title = "How large?"
seeds = 2
[settings]
rounds = 2
clients = 4
samples = 40
hidden = 4
[rows.fedprox]
title = "FedProx"
[rows.pull]
method = "fedprox"
mu = 7
[rows.local]
[sweep]
lr = [0.01, 0.1]
[sweep.fedprox]
mu = [0.1, 1]
"""


def test_every_combination_is_a_row(tmp_path):
    (tmp_path / "how.toml").write_text(FILE)
    experiment = read_experiment(tmp_path / "how.toml")
    assert [row.title for row in experiment.rows] == [
        "FedProx, lr = 0.01, mu = 0.1",
        "FedProx, lr = 0.01, mu = 1",
        "FedProx, lr = 0.1, mu = 0.1",
        "FedProx, lr = 0.1, mu = 1",
        "pull, lr = 0.01",
        "pull, lr = 0.1",
        "local, lr = 0.01",
        "local, lr = 0.1",
    ]
    settings = experiment.cells[3].settings(0)
    assert (settings.method.name, settings.method.mu, settings.local.lr) == ("fedprox", 1, 0.1)
    assert experiment.cells[4].settings(0).method.mu == 7


def swept(tmp_path):
    made = Bench(tmp_path, "", FILE)
    honest = {
        "fedprox lr = 0.01 mu = 0.1": (0.70, 0.72),
        "fedprox lr = 0.01 mu = 1": (0.80, 0.60),  # it has the best seed but not the best mean
        "fedprox lr = 0.1 mu = 0.1": (0.75, 0.73),
        "fedprox lr = 0.1 mu = 1": (0.99,),  # one seed only: not compared
        "local lr = 0.01": (0.5, 0.5),
        "local lr = 0.1": (0.4, 0.5),
    }
    for row, values in honest.items():
        for seed, value in enumerate(values):
            made.keep(row, "", seed, honest_accuracy=value, best_accuracy=1 - value)
    return made


def test_the_highest_mean_honest_accuracy_is_chosen(tmp_path):
    made = swept(tmp_path)
    found = choices(made.experiment, 2, made.store)
    assert [(each.dataset, each.method, dict(each.settings), each.tried) for each in found] == [
        ("digits", "fedprox", {"lr": 0.1, "mu": 0.1}, 3),
        ("digits", "local", {"lr": 0.01}, 2),
    ]
    assert [each.honest for each in found] == [pytest.approx(74), pytest.approx(50)]
    assert "| digits | FedProx, lr = 0.1, mu = 0.1 | 74.0 | 3 |" in choices_markdown(found)


def test_the_choice_is_by_the_mean_over_columns_of_one_dataset(tmp_path):
    text = FILE.replace("[rows.fedprox]", "[columns.a]\ns = 0.1\n[columns.b]\ns = 0.2\n[rows.fedprox]")
    made = Bench(tmp_path, "", text)
    for column, low, high in (("a", 0.9, 0.5), ("b", 0.2, 0.5)):  # means 0.55 and 0.5
        for seed in (0, 1):
            made.keep("local lr = 0.01", column, seed, honest_accuracy=low)
            made.keep("local lr = 0.1", column, seed, honest_accuracy=high)
    (choice,) = choices(made.experiment, 2, made.store)
    assert (dict(choice.settings), choice.honest) == ({"lr": 0.01}, pytest.approx(55))


def test_without_a_sweep_nothing_is_chosen(tmp_path):
    made = Bench(tmp_path, "", FILE[: FILE.index("[sweep]")])
    made.keep("local", "", 0, honest_accuracy=0.5)
    assert choices(made.experiment, 2, made.store) == []


def test_the_chosen_settings_are_written_to_a_file_that_tuned_reads(tmp_path):
    text = tuned_file(
        [
            Choice("digits", "fedprox", "", {"lr": 0.25, "mu": 3}, 1, 2),
            Choice("my data.npz", "mine:Pull", "", {"strength": 0.5}, 1, 2),
        ],
        "How large?",
    )
    assert tomllib.loads(text)["my data.npz"]["mine:Pull"] == {"strength": 0.5}
    file = tmp_path / "tuned.toml"
    file.write_text(text)
    settings = parse_settings("fedprox", ["--tuned", str(file)])
    assert (settings.local.lr, settings.method.mu) == (0.25, 3)
    # Arguments and a config file override it; it overrides the paper's settings.
    (tmp_path / "config.toml").write_text("mu = 4\n")
    over = parse_settings("fedprox", ["--tuned", str(file), "--config", str(tmp_path / "config.toml"), "--lr", "0.5"])
    assert (over.local.lr, over.method.mu) == (0.5, 4)
    paper = parse_settings("fedprox", ["--paper", "table1-mnist", "--dataset", "digits", "--tuned", str(file)])
    assert (paper.local.lr, paper.simulation.rounds) == (0.25, 500)


def test_of_several_rows_of_a_method_the_best_is_chosen_with_all_its_settings(tmp_path):
    made = swept(tmp_path)
    for seed in (0, 1):
        made.keep("pull lr = 0.1", "", seed, honest_accuracy=0.9)
        made.keep("pull lr = 0.01", "", seed, honest_accuracy=0.8)
    found = choices(made.experiment, 2, made.store)
    assert [each.method for each in found] == ["fedprox", "fedprox", "local"]
    assert tomllib.loads(tuned_file(found, ""))["digits"]["fedprox"] == {"mu": 7, "lr": 0.1}


def test_a_method_or_dataset_that_is_not_in_the_file_is_refused(tmp_path):
    file = tmp_path / "tuned.toml"
    file.write_text("[digits.fedprox]\nmu = 1\n")
    for method, dataset in (("moon", "digits"), ("fedprox", "mnist")):
        with pytest.raises(BadInput, match=f"has no settings for {dataset}.{method}; it has digits.fedprox"):
            parse_settings(method, ["--dataset", dataset, "--tuned", str(file)])
    file.write_text("digits = 3\n")
    with pytest.raises(BadInput, match=r"has no settings for digits\.fedprox; it has none"):
        parse_settings("fedprox", ["--tuned", str(file)])
    with pytest.raises(BadInput, match=r"--tuned .*none\.toml cannot be read"):
        parse_settings("fedprox", ["--tuned", str(tmp_path / "none.toml")])


def test_a_run_uses_the_settings_chosen_by_a_sweep(tmp_path):
    (tmp_path / "how.toml").write_text(FILE)
    out = tmp_path / "out"
    assert main(["grid", str(tmp_path / "how.toml"), "--out", str(out), "--quiet"]) == 0
    page = (out / "how.md").read_text()
    assert "### Chosen" in page
    chosen = tomllib.loads((out / "how-tuned.toml").read_text())["digits"]
    assert set(chosen) == {"fedprox", "local"}
    found = choices(read_experiment(tmp_path / "how.toml"), 2, Store(out / "runs"))
    assert chosen["local"] == dict(found[-1].settings)
    tuned = ["--tuned", str(out / "how-tuned.toml"), "--rounds", "1", "--out", str(tmp_path / "run"), "--quiet"]
    assert main(["run", "local", *tuned]) == 0
