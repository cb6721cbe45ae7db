"""fedrema personalize."""

import json
import sys

import numpy as np
import pytest

import fedrema
from fedrema.cli import main
from tests.quick import quick_arguments

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")

QUICK = ("--rounds", "3", "--clients", "4", "--samples", "20", "--epochs", "1")


@pytest.fixture
def new_client(in_an_empty_folder):
    digits = fedrema.make_federation(clients=1, samples=40, s=1.0, partition="iid", data_seed=9)
    np.savez(in_an_empty_folder / "new.npz", x=digits.x, y=digits.y)
    return "new.npz"


@pytest.mark.parametrize("method", fedrema.registry())
def test_a_new_client_gets_a_model(method, new_client, capsys, in_an_empty_folder):
    from safetensors.torch import load_file

    assert main(["run", method, *QUICK, *quick_arguments(method), "--quiet", "--out", "run"]) == 0
    assert main(["personalize", "run", "--data", new_client, "--out", "new.safetensors"]) == 0
    shown = capsys.readouterr().out
    assert "fine-tuned" in shown
    collect_heads = ("cwfedavg", "fedamp", "fedpac", "fedrema", "pfedgraph")
    assert ("matched" in shown) == (method in collect_heads)
    assert set(load_file("new.safetensors")) == {"1.weight", "1.bias", "3.weight", "3.bias"}
    assert main(["personalize", "run", "--data", new_client, "--out", "new.safetensors"]) == 2
    assert "already exists" in capsys.readouterr().err


def test_data_that_does_not_fit_the_run_is_refused(new_client, capsys, in_an_empty_folder):
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
def own_data(new_client, in_an_empty_folder):
    (in_an_empty_folder / "newly.py").write_text(OWN_DATA)
    yield "newly"
    sys.modules.pop("newly", None)


def test_a_new_clients_data_may_come_from_a_function(own_data, capsys, in_an_empty_folder):
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


def test_a_new_client_gets_a_model_from_each_seed(new_client, capsys, in_an_empty_folder):
    assert main(["run", "fedavg", *QUICK, "--seeds", "2", "--quiet", "--out", "both"]) == 0
    assert main(["personalize", "both", "--data", new_client, "--out", "one.safetensors"]) == 2
    assert "--out one.safetensors is for the model of one run, but there are 2" in capsys.readouterr().err
    assert main(["personalize", "both", "--data", new_client]) == 0
    shown = capsys.readouterr().out
    written = sorted(in_an_empty_folder.glob("both/*/newcomers/new.safetensors"))
    assert len(written) == 2
    for file in written:
        assert str(file.parents[1].relative_to(in_an_empty_folder)) in shown
    (in_an_empty_folder / "nothing").mkdir()
    assert main(["personalize", "nothing", "--data", new_client]) == 2
    assert "nothing holds no run" in capsys.readouterr().err
