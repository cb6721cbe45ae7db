"""fedrema run, resume, methods, data, partition, personalize: as a user types them."""

import contextlib
import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

import fedrema
from fedrema.cli import COMMANDS, main
from fedrema.config.settings import parse_settings
from tests.quick import quick_arguments

QUICK = ("--rounds", "3", "--clients", "4", "--samples", "20", "--epochs", "1")


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


def test_help_names_every_command_and_needs_no_torch():
    code = "import sys, fedrema.cli; fedrema.cli.main(['--help']); assert 'torch' not in sys.modules"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert all(command in shown for command in COMMANDS)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert fedrema.__version__ in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    try:
        code = main([command, "--help"])
    except SystemExit as stop:
        code = stop.code or 0
    assert code == 0
    assert "usage: fedrema " + command in capsys.readouterr().out


@pytest.mark.parametrize("method", fedrema.registry())
def test_every_method_explains_its_settings(method, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["run", method, "--help-all"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    for option in ("--lr", "--dataset", "--participation", "--backend", "--out", "--weight-decay", "--schedule"):
        assert option in shown


@pytest.mark.parametrize("method", ["fedprox", "fedavg", "fedrema"])
def test_help_shows_the_essential_options_first_and_help_all_every_option(method, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for option in ("--help", "-h"):
        with pytest.raises(SystemExit) as stop:
            main(["run", method, option])
        assert stop.value.code == 0
        shown = capsys.readouterr().out
        places = [shown.index(f" --{name} ") for name in ("dataset", "federation", "rounds", "out", "seed", "device")]
        assert places == sorted(places)
        assert f"fedrema run {method} --help-all lists all " in " ".join(shown.split())
        own = [field.name.replace("_", "-") for field in dataclasses.fields(fedrema.registry()[method])]
        assert all(f" --{name}" in shown for name in own)
        assert "--participation" not in shown
        assert len(shown.splitlines()) < 100
    with pytest.raises(SystemExit):
        main(["run", method, "--help-all"])
    everything = capsys.readouterr().out
    settings = parse_settings(method, [])
    assert all(f"--{name}" in everything for name in settings.flat())
    for text in (shown, everything):
        assert "None" not in text


def test_help_shows_the_defaults_of_the_dataset(capsys):
    with pytest.raises(SystemExit):
        main(["run", "fedavg", "--dataset", "cifar10", "--help"])
    assert "(default: 100)" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--help"], ["--help-all"], ["fedavg,local", "--help-all"]])
def test_help_without_a_method_names_the_two_kinds_of_help(arguments, capsys):
    assert main(["run", *arguments]) == 0
    shown = capsys.readouterr().out
    assert "fedrema run METHOD --help lists the essential options, fedrema run METHOD --help-all all of them" in shown


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "deploy"])
def test_no_help_speaks_of_none_as_a_value(command, capsys):
    with contextlib.suppress(SystemExit):
        main([command, "--help"])
    assert "{None}" not in capsys.readouterr().out


def test_without_arguments_three_methods_run_side_by_side(in_an_empty_folder, capsys):
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
    assert fedrema.load(folder / "fedrema" / "seed-0").relations()  # so that the report shows who learns from whom
    assert sorted(path.name for path in (folder / "local").iterdir()) == ["seed-0", "seed-1"]


def test_the_report_can_be_opened_at_the_end(in_an_empty_folder, monkeypatch, capsys):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    assert main(["run", "fedavg", *QUICK, "--out", "run", "--open"]) == 0
    assert opened == [(in_an_empty_folder / "run" / "report.html").as_uri()]
    assert main(["run", "fedavg", *QUICK, "--out", "other", "--open", "--quiet"]) == 2
    assert "--open needs a report, and --quiet writes none" in capsys.readouterr().err


def test_one_command_compares_all_methods(in_an_empty_folder, capsys):
    less = ("--retrain-epochs", "1", "--match-steps", "1")  # of CReFF, whose server repeats these very often
    assert main(["run", "all", *QUICK, *less, "--out", "all"]) == 0
    shown = capsys.readouterr().out
    for name, kind in fedrema.registry().items():
        assert kind.title in shown
        assert (in_an_empty_folder / "all" / name / "summary.json").is_file()
    assert "Curves:  all/curves.png" in shown
    assert (in_an_empty_folder / "all" / "curves.png").stat().st_size > 10_000


def test_an_option_goes_to_those_methods_that_have_it(in_an_empty_folder):
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


def test_a_method_that_is_not_there_is_refused_before_any_is_run(in_an_empty_folder, capsys):
    assert main(["run", "fedavg,fedmagic", *QUICK, "--out", "some"]) == 2
    assert "Method 'fedmagic' is unknown" in capsys.readouterr().err
    assert not (in_an_empty_folder / "some").exists()


def test_a_method_that_diverges_does_not_take_the_others_along(in_an_empty_folder, capsys):
    # FedProx with so strong a pull overshoots further in every step.
    asked = ["fedprox,local", *QUICK, "--epochs", "40", "--mu", "1e9", "--clip", "0", "--out", "some"]
    assert main(["run", *asked]) == 2
    shown = capsys.readouterr()
    assert "fedrema: FedProx: Training diverged in round 1" in shown.err
    assert "Local" in shown.out
    assert (in_an_empty_folder / "some" / "local" / "summary.json").is_file()


def test_models_are_exported_as_they_are_used(in_an_empty_folder):
    from safetensors.torch import load_file

    assert main(["run", "fedbabu", *QUICK, "--quiet", "--out", "run"]) == 0
    assert main(["export", "run", "--out", "used"]) == 0
    assert main(["export", "run", "--out", "left", "--no-adapt"]) == 0
    run = fedrema.load("run")
    used, left = (load_file(f"{folder}/0.safetensors") for folder in ("used", "left"))
    random_head = run.personal_parameters(row=0)["head.weight"]
    assert (left["3.weight"] == random_head).all()
    assert (used["3.weight"] - random_head).abs().max() > 1e-3
    assert "trains a little more" in (in_an_empty_folder / "left" / "README.md").read_text()
    assert "trains a little more" not in (in_an_empty_folder / "used" / "README.md").read_text()


def test_models_that_are_adapted_on_data_which_is_gone_can_be_exported_as_they_are(
    in_an_empty_folder, newcomer, capsys
):
    assert main(["partition", "--clients", "4", "--samples", "20", "--save", "own.npz"]) == 0
    assert main(["run", "per-fedavg", "--federation", "own.npz", "--rounds", "1", "--quiet", "--out", "run"]) == 0
    assert main(["partition", "--clients", "4", "--samples", "20", "--data-seed", "1", "--save", "own.npz"]) == 0
    assert main(["export", "run"]) == 2
    assert "The data of run has changed since" in capsys.readouterr().err
    (in_an_empty_folder / "own.npz").unlink()
    assert main(["export", "run"]) == 2
    assert "own.npz" in (complaint := capsys.readouterr().err)
    assert "--no-adapt" in complaint
    assert not (in_an_empty_folder / "run" / "models").exists()
    assert main(["export", "run", "--no-adapt"]) == 0


def test_prototypes_are_exported_with_the_models_that_answer_by_them(in_an_empty_folder):
    from safetensors.torch import load_file

    assert main(["run", "fedproto", *QUICK, "--quiet", "--out", "run"]) == 0
    assert main(["export", "run"]) == 0
    added = load_file("run/models/0.added.safetensors")
    assert added["prototypes"].shape == (10, 32)
    assert added["known"].tolist() == [1.0] * 9 + [0.0]  # so few clients hold no nine


def test_a_run_and_what_follows(in_an_empty_folder, capsys):
    assert main(["run", "fedrema", *QUICK, "--out", "first", "--record", "relations"]) == 0
    assert "Next:    fedrema export first" in capsys.readouterr().out
    assert main(["resume", "first", "--rounds", "5"]) == 0
    assert len(fedrema.load("first").rounds) == 5
    assert "S" in fedrema.load("first").relations()[5]
    assert main(["resume", "first", "--rounds", "2"]) == 2
    assert "--rounds 2 is below 5, the number of rounds that" in capsys.readouterr().err


def test_where_there_is_no_terminal_a_line_comes_now_and_then(capsys, monkeypatch):
    monkeypatch.setattr("fedrema.cli.progress.SECONDS_BETWEEN_LINES", 0.0)
    assert main(["run", "fedrema", *QUICK]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" accuracy")[0] for line in lines] == [f"FedReMa round {number}/3" for number in (1, 2, 3)]
    assert lines[0].endswith("critical")


def test_quiet_says_nothing(capsys):
    assert main(["run", "local", *QUICK, "--quiet"]) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err == ""


def test_the_method_may_stand_in_the_file(in_an_empty_folder):
    (in_an_empty_folder / "mine.toml").write_text('method = "fedper"\nrounds = 2\nout = "mine"\nquiet = true\n')
    assert main(["run", "--config", "mine.toml"]) == 0
    assert fedrema.load("mine").method == "fedper"


def test_one_taken_folder_stops_all_before_the_first(in_an_empty_folder, capsys):
    assert main(["run", "local", *QUICK, "--quiet", "--out", "all/seed-1"]) == 0
    assert main(["run", "local", *QUICK, "--quiet", "--seeds", "2", "--out", "all"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert not (in_an_empty_folder / "all" / "seed-0").exists()


def test_methods(capsys):
    assert main(["methods"]) == 0
    shown = capsys.readouterr().out
    for kind in fedrema.registry().values():
        assert kind.title in shown
    assert "--delta" in shown
    assert main(["methods", "fedrema"]) == 0
    assert "Eq. 6" in capsys.readouterr().out
    assert main(["methods", "--paper"]) == 0
    assert "table1-cifar10" in capsys.readouterr().out


def test_data(capsys, tmp_path):
    assert main(["data", "--data-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for name in ("digits", "mnist", "fmnist", "cifar10", "comes with scikit-learn", "fetched at first use"):
        assert name in shown


def test_data_can_be_fetched_beforehand(capsys, tmp_path, monkeypatch):
    assert main(["data", "--fetch", "digits"]) == 0
    assert main(["data", "--fetch", "imagenet"]) == 2
    assert "imagenet" in capsys.readouterr().err
    monkeypatch.setenv("FEDREMA_MIRROR", "http://127.0.0.1:9")
    assert main(["data", "--data-dir", str(tmp_path), "--fetch", "mnist"]) == 2
    assert "cannot be reached" in capsys.readouterr().err


def test_partition_saves_draws_and_can_be_trained_on(in_an_empty_folder, capsys):
    assert (
        main(["partition", "--partition", "dirichlet", "--alpha", "0.3", "--save", "fed.npz", "--plot", "fed.png"]) == 0
    )
    shown = capsys.readouterr().out
    assert "Saved: fed.npz" in shown
    assert "Drawn: fed.png" in shown
    assert (in_an_empty_folder / "fed.png").read_bytes().startswith(b"\x89PNG")
    assert main(["run", "fedavg", "--federation", "fed.npz", "--rounds", "2", "--quiet", "--out", "run"]) == 0
    assert fedrema.load("run").config["federation"]["fingerprint"] == fedrema.Federation.load("fed.npz").fingerprint


@pytest.fixture
def newcomer(in_an_empty_folder):
    digits = fedrema.make_federation(clients=1, samples=40, s=1.0, partition="iid", data_seed=9)
    np.savez(in_an_empty_folder / "new.npz", x=digits.x, y=digits.y)
    return "new.npz"


@pytest.mark.parametrize("method", fedrema.registry())
def test_a_newcomer_gets_a_model(method, newcomer, capsys, in_an_empty_folder):
    from safetensors.torch import load_file

    assert main(["run", method, *QUICK, *quick_arguments(method), "--quiet", "--out", "run"]) == 0
    assert main(["personalize", "run", "--data", newcomer, "--out", "new.safetensors"]) == 0
    shown = capsys.readouterr().out
    assert "fine-tuned" in shown
    assert ("matched" in shown) == (method in ("fedrema", "fedpac", "fedamp"))  # whose heads the server knows
    assert set(load_file("new.safetensors")) == {"1.weight", "1.bias", "3.weight", "3.bias"}
    assert main(["personalize", "run", "--data", newcomer, "--out", "new.safetensors"]) == 2
    assert "already exists" in capsys.readouterr().err


def test_a_newcomer_that_does_not_fit(newcomer, capsys, in_an_empty_folder):
    assert main(["run", "fedrema", *QUICK, "--quiet", "--out", "run"]) == 0
    generator = np.random.default_rng(0)
    np.savez("wide.npz", x=generator.random((10, 3), np.float32), y=generator.integers(0, 10, 10))
    np.savez("labels.npz", x=generator.random((10, 1, 8, 8), np.float32), y=np.full(10, 99))
    for file, words in [
        ("wide.npz", "has samples of shape (3,); the run was trained on (1, 8, 8)"),
        ("labels.npz", "99"),
        ("missing.npz", "is not a file"),
    ]:
        assert main(["personalize", "run", "--data", file]) == 2
        assert words in capsys.readouterr().err


def test_what_is_chosen_from_own_data_is_said_once_and_recorded(in_an_empty_folder, capsys):
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


def test_names_of_classes_are_kept_and_a_new_client_uses_those_of_the_run(in_an_empty_folder, capsys):
    labels = np.array(["blue", "green", "red"])
    x, y = np.repeat(np.eye(3, dtype="float32"), 30, axis=0), np.repeat(labels, 30)
    np.savez("mine.npz", x=x, y=y, client=np.tile([1, 2, 3], 30))
    assert main(["run", "fedavg", "--federation", "mine.npz", "--rounds", "4", "--lr", "0.1", "--out", "run"]) == 0
    assert fedrema.load("run").config["federation"]["class_names"] == labels.tolist()
    assert main(["export", "run"]) == 0
    assert (
        json.loads((in_an_empty_folder / "run" / "models" / "index.json").read_text())["class_names"] == labels.tolist()
    )
    assert "1 is `green`" in (in_an_empty_folder / "run" / "models" / "README.md").read_text()
    # Its own classes would be 0 = green and 1 = red.
    np.savez("new.npz", x=x[30:], y=y[30:])
    known = fedrema.Federation.from_arrays(x[30:], y[30:], np.zeros(60, int))
    known.save("saved.npz")
    for file in ("new.npz", "saved.npz"):
        capsys.readouterr()
        assert main(["personalize", "run", "--data", file, "--epochs", "0"]) == 0
        assert "fine-tuned  100.0%" in capsys.readouterr().out
    np.savez("odd.npz", x=x[:2], y=["blue", "pink"])
    assert main(["personalize", "run", "--data", "odd.npz"]) == 2
    said = "--data odd.npz: y has the label 'pink' in row 1 (client 'odd'); the classes are blue, green, red."
    assert said in capsys.readouterr().err


OWN_DATA = """
import sys
import numpy as np

def pair():
    file = np.load("new.npz")
    return file["x"], file["y"]

def table():
    x, y = pair()
    return {"x": x, "y": y, "split": np.arange(len(y)) % 4 == 0}

def wrong():
    return [1, 2]

def failing():
    raise OSError("the database is down")

def leaving():
    sys.exit(1)
"""


@pytest.fixture
def own_data(newcomer, in_an_empty_folder):
    (in_an_empty_folder / "newly.py").write_text(OWN_DATA)
    yield "newly"
    sys.modules.pop("newly", None)


def test_a_newcomers_data_may_come_from_a_function(own_data, capsys, in_an_empty_folder):
    assert main(["run", "fedavg", *QUICK, "--quiet", "--out", "run"]) == 0
    assert main(["personalize", "run", "--data", f"{own_data}:pair"]) == 0
    assert "pair: 20 samples to train on, 20 to test with." in capsys.readouterr().out
    assert main(["personalize", "run", "--data", f"{own_data}:table"]) == 0
    assert "table: 30 samples to train on, 10 to test with." in capsys.readouterr().out
    files = {file.name for file in (in_an_empty_folder / "run" / "newcomers").iterdir()}
    assert files == {"pair.safetensors", "table.safetensors"}
    for function, sentence in {
        "wrong": "returned list; valid are (x, y), (x, y, split), or a dict of these.",
        "failing": "failed: OSError: the database is down (newly.py, line 17).",
        "leaving": "failed: it called sys.exit(1); raise an exception instead (newly.py, line 20).",
        "missing": "has no 'missing'",
    }.items():
        assert main(["personalize", "run", "--data", f"{own_data}:{function}"]) == 2
        assert sentence in capsys.readouterr().err


def test_a_newcomer_gets_a_model_from_each_seed(newcomer, capsys, in_an_empty_folder):
    assert main(["run", "fedavg", *QUICK, "--seeds", "2", "--quiet", "--out", "both"]) == 0
    assert main(["personalize", "both", "--data", newcomer, "--out", "one.safetensors"]) == 2
    assert "--out one.safetensors is for the model of one run, but there are 2" in capsys.readouterr().err
    assert main(["personalize", "both", "--data", newcomer]) == 0
    shown = capsys.readouterr().out
    written = sorted(in_an_empty_folder.glob("both/*/newcomers/new.safetensors"))
    assert len(written) == 2
    for file in written:
        assert str(file.parents[1].relative_to(in_an_empty_folder)) in shown
    (in_an_empty_folder / "nothing").mkdir()
    assert main(["personalize", "nothing", "--data", newcomer]) == 2
    assert "nothing holds no run" in capsys.readouterr().err


OWN_METHOD = """
from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar, Literal
from fedrema import Method

@dataclass(frozen=True)
class Own(Method):
    '''One of my own [/b].'''
    name: ClassVar[str] = "fedavg"
    title: ClassVar[str] = "Own [/bold]"
    paper: ClassVar[str] = "none [red]"
    way: Literal["here", "there"] = "here"
    '''Which way [1].'''
    bare: float = 0.5
"""


def test_ones_own_method_is_explained(capsys, in_an_empty_folder):
    (in_an_empty_folder / "a_method_of_mine.py").write_text(OWN_METHOD)
    try:
        assert main(["methods", "a_method_of_mine:Own"]) == 0
    finally:
        sys.modules.pop("a_method_of_mine", None)
    shown = capsys.readouterr().out
    assert "Own [/bold]  (fedrema run a_method_of_mine:Own)" in shown
    assert "One of my own [/b]." in shown
    assert "none [red]" in shown
    assert "Which way [1]. One of here, there." in shown
    assert "--bare" in shown
