"""fedrema run and resume, as a user types them."""

import numpy as np
import pytest

import fedrema
from fedrema.cli import main

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

QUICK = ("--rounds", "3", "--clients", "4", "--samples", "20", "--epochs", "1")


def test_without_arguments_three_methods_run(in_an_empty_folder, capsys):
    assert main(["run", *QUICK, "--seeds", "2"]) == 0
    shown = capsys.readouterr().out
    for title in ("Local", "FedAvg", "FedReMa"):
        assert title in shown
    folder = next((in_an_empty_folder / "runs").iterdir())
    assert folder.name.startswith("demo-digits-")
    assert f"Results: runs/{folder.name}" in shown
    assert sorted(path.name for path in folder.iterdir()) == [
        "curves.png",
        "fedavg",
        "fedrema",
        "local",
        "report.html",
    ]
    assert f"Report:  runs/{folder.name}/report.html" in shown
    assert fedrema.load(folder / "fedrema" / "seed-0").relations()  # recorded for the report's graph of clients
    assert sorted(path.name for path in (folder / "local").iterdir()) == ["seed-0", "seed-1"]


def test_the_report_can_be_opened_at_the_end(in_an_empty_folder, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    assert main(["run", "fedavg", *QUICK, "--out", "run", "--open"]) == 0
    assert opened == [(in_an_empty_folder / "run" / "report.html").as_uri()]
    assert main(["run", "fedavg", *QUICK, "--out", "other", "--open", "--quiet"]) == 2
    assert "--open needs a report, and --quiet writes none" in capsys.readouterr().err


def test_one_command_compares_all_methods(in_an_empty_folder, capsys):
    less = ("--retrain-epochs", "1", "--match-steps", "1")  # of CReFF, whose server step is slow with the defaults
    assert main(["run", "all", *QUICK, *less, "--out", "all"]) == 0
    shown = capsys.readouterr().out
    for name, kind in fedrema.registry().items():
        assert kind.title in shown
        assert (in_an_empty_folder / "all" / name / "summary.json").is_file()
    assert "Curves:  all/curves.png" in shown
    assert (in_an_empty_folder / "all" / "curves.png").stat().st_size > 10_000


def test_an_option_is_given_to_the_methods_that_have_it(in_an_empty_folder):
    several = ["run", "fedavg,fedprox,fedrema", *QUICK, "--quiet"]
    assert main([*several, "--mu=0.25", "--alternate", "--delta", "0.3", "--out", "some"]) == 0
    settings = {name: fedrema.load(f"some/{name}").settings for name in ("fedavg", "fedprox", "fedrema")}
    assert (settings["fedprox"]["mu"], settings["fedrema"]["delta"], settings["fedrema"]["alternate"]) == (
        0.25,
        0.3,
        True,
    )
    assert "mu" not in settings["fedavg"]
    assert main([*several, "--gamma", "1", "--out", "none"]) == 2  # none of the three has it


def test_an_unknown_method_is_refused_before_any_method_runs(in_an_empty_folder, capsys):
    assert main(["run", "fedavg,fedmagic", *QUICK, "--out", "some"]) == 2
    assert "Method 'fedmagic' is unknown" in capsys.readouterr().err
    assert not (in_an_empty_folder / "some").exists()


@pytest.mark.parametrize(
    ("methods", "options", "words"),
    [
        ("local,fedavg,fedproto", ("--task", "regression"), "FedProto does not support the task regression"),
        ("local,fedavg,fedrod", ("--dp", "sample", "--net", "mlp-bn"), "--dp sample needs gradients"),
        ("local,ifca", ("--secure-aggregation",), "--secure-aggregation"),
        ("local,fedavg,floco", ("--hidden", "10000000000"), "of memory, but only"),
    ],
)
@pytest.mark.parametrize("seeds", ["1", "2"])
def test_every_method_is_checked_before_the_first_one_trains(
    methods, options, words, seeds, in_an_empty_folder, capsys
):
    y = np.arange(90) % 3
    np.savez("mine.npz", x=np.eye(3)[y], y=y, client=np.repeat([1, 2, 3], 30))
    data = ("--federation", "mine.npz", "--rounds", "1", "--seeds", seeds, "--out", "some")
    assert main(["run", methods, *data, *options]) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert "round" not in shown.err  # no progress: nothing was trained
    assert not (in_an_empty_folder / "some").exists()
    assert main(["run", "local,fedavg", *data, "--quiet"]) == 0  # the same folder is free


def test_seeds_are_checked_before_the_first_one_trains(in_an_empty_folder):
    with pytest.raises(fedrema.BadInput, match="of memory, but only"):
        fedrema.run("fedavg", rounds=1, hidden=10**10, seeds=2, out="some")
    assert not (in_an_empty_folder / "some").exists()


def test_other_methods_run_when_one_diverges(in_an_empty_folder, capsys):
    # With so strong a proximal term FedProx diverges.
    asked = ["fedprox,local", *QUICK, "--epochs", "40", "--mu", "1e9", "--clip", "0", "--out", "some"]
    assert main(["run", *asked]) == 2
    shown = capsys.readouterr()
    assert "fedrema: FedProx: Training diverged in round 1" in shown.err
    assert "Local" in shown.out
    assert (in_an_empty_folder / "some" / "local" / "summary.json").is_file()


def test_a_run_suggests_export_and_can_be_extended(in_an_empty_folder, capsys):
    assert main(["run", "fedrema", *QUICK, "--out", "first", "--record", "relations"]) == 0
    assert "Next:    fedrema export first" in capsys.readouterr().out
    assert main(["resume", "first", "--rounds", "5"]) == 0
    assert len(fedrema.load("first").rounds) == 5
    assert "S" in fedrema.load("first").relations()[5]
    assert main(["resume", "first", "--rounds", "2"]) == 2
    assert "--rounds 2 is below 5, the number of rounds that" in capsys.readouterr().err


def test_without_a_terminal_progress_is_printed_regularly(capsys, monkeypatch):
    monkeypatch.setattr("fedrema.reporting.progress.SECONDS_BETWEEN_LINES", 0.0)
    assert main(["run", "fedrema", *QUICK]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" accuracy")[0] for line in lines] == [f"FedReMa round {number}/3" for number in (1, 2, 3)]
    assert lines[0].endswith("critical")


def test_quiet_prints_nothing(capsys):
    assert main(["run", "local", *QUICK, "--quiet"]) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == ""


def test_the_method_may_be_given_in_the_file(in_an_empty_folder):
    (in_an_empty_folder / "mine.toml").write_text('method = "fedper"\nrounds = 2\nout = "mine"\nquiet = true\n')
    assert main(["run", "--config", "mine.toml"]) == 0
    assert fedrema.load("mine").method == "fedper"


def test_one_existing_folder_refuses_all_runs_before_the_first(in_an_empty_folder, capsys):
    assert main(["run", "local", *QUICK, "--quiet", "--out", "all/seed-1"]) == 0
    assert main(["run", "local", *QUICK, "--quiet", "--seeds", "2", "--out", "all"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert not (in_an_empty_folder / "all" / "seed-0").exists()


def test_settings_chosen_from_own_data_are_printed_once_and_recorded(in_an_empty_folder, capsys):
    y = np.arange(90) % 3
    np.savez("mine.npz", x=np.eye(3)[y], y=y, client=np.repeat([1, 2, 3], 30))
    assert main(["run", "fedavg,local", "--federation", "mine.npz", "--rounds", "1", "--seeds", "2", "--out", "r"]) == 0
    said = capsys.readouterr().err
    line = "Chosen from the data (3 clients, 72 training and 18 test samples, 3 classes): --batch 10 --lr 0.02\n"
    assert said.count(line) == said.count("Chosen") == 1
    settings = fedrema.load("r/fedavg/seed-0").settings
    assert (settings["batch"], settings["lr"]) == (10, 0.02)
    assert main(["run", "fedavg", "--federation", "mine.npz", "--rounds", "1", "--batch", "5", "--lr", "0.1"]) == 0
    assert "Chosen" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("y", "said"),
    [
        (np.linspace(0, 1, 90), "18 test samples, a quantity: regression): "),
        (np.stack([np.arange(90) % 2, np.arange(90) % 3 == 0], 1), "18 test samples, 2 labels: multilabel): "),
        (np.arange(90) % 2, "18 test samples, 2 classes): "),
    ],
)
def test_the_task_that_is_inferred_from_own_data_is_printed(y, said, in_an_empty_folder, capsys):
    x = np.random.default_rng(0).normal(size=(90, 3))
    np.savez("mine.npz", x=x, y=y, client=np.repeat([1, 2, 3], 30))
    assert main(["run", "fedrema", "--federation", "mine.npz", "--rounds", "1", "--out", "r"]) == 0
    assert said in capsys.readouterr().err
