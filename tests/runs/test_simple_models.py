"""simple-models.npz: which runs have it, that it changes nothing else, and what commands show of it."""

import csv
import io
import json
import re

import numpy as np
import pytest

import fedrema
from fedrema.cli import main
from fedrema.errors import BadInput
from fedrema.page.document import main_part
from fedrema.page.reading import DownsampledRun
from fedrema.page.verdict import verdict_part
from fedrema.reporting.verdict import verdicts
from tests.cli.refusals import refused

SMALL = {"rounds": 2, "epochs": 1, "hidden": 6, "batch": 5, "lr": 0.05, "device": "cpu"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A file of four clients with a linear relation."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(400, 5)).astype(np.float32)
    y = (x[:, 0] + generator.normal(size=400) > 0).astype(int)
    file = tmp_path_factory.mktemp("data") / "sites.npz"
    np.savez(file, x=x, y=y, client=np.array(["north", "south", "east", "west"])[generator.integers(0, 4, 400)])
    return file


@pytest.fixture
def runs(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    options = [f"--{name}={value}" for name, value in SMALL.items()]
    assert main(["run", "local,fedavg", "--federation", str(data), "--out", "runs", "--quiet", *options]) == 0
    return tmp_path / "runs"


def test_own_data_has_them_with_the_targets_of_the_predictions(runs):
    run = fedrema.load(runs / "fedavg")
    found, predictions = run.simple_models(), run.predictions()
    assert list(found) == ["constant", "linear"]
    for one in found.values():
        assert one.targets.tolist() == predictions.targets.tolist()
        assert one.offsets.tolist() == predictions.offsets.tolist()


def test_datasets_that_are_partitioned_have_none(tmp_path, capsys):
    run = fedrema.run("fedavg", out=tmp_path / "run", clients=4, samples=20, **SMALL)
    assert not run.simple_models()
    assert not (run.path / "simple-models.npz").exists()
    saved = tmp_path / "digits.npz"
    fedrema.make_federation(clients=4, samples=20).save(saved)
    run = fedrema.run("fedavg", federation=str(saved), out=tmp_path / "saved", **SMALL)
    assert not run.simple_models()
    fedrema.run("local", federation=str(saved), out=tmp_path / "other", **SMALL)
    said = refused(capsys, "verdict", str(run.path), str(tmp_path / "other"), "--baseline", "constant")
    assert "own data" in said
    assert "simple-models.npz" in said


def test_cells_of_a_grid_have_none(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = "\n".join(f"{name} = {json.dumps(value)}" for name, value in SMALL.items())
    text = f'title = "t"\nseeds = 1\n[settings]\nfederation = "{data}"\n{settings}\n[columns.c]\n[rows.fedavg]\n'
    (tmp_path / "own.toml").write_text(text)
    fitted = []
    monkeypatch.setattr("fedrema.runs.execute.write_simple_models", lambda directory, _: fitted.append(directory))
    assert main(["grid", "own.toml", "--out", "results"]) == 0
    assert not fitted
    fedrema.run("fedavg", federation=str(data), out="run", **SMALL)
    assert len(fitted) == 1


def test_they_change_neither_identity_nor_training(data, tmp_path, monkeypatch):
    with_them = fedrema.run("fedavg", federation=str(data), out=tmp_path / "with", **SMALL)
    monkeypatch.setattr("fedrema.runs.execute.write_simple_models", lambda *_: None)
    without = fedrema.run("fedavg", federation=str(data), out=tmp_path / "without", **SMALL)
    assert with_them.manifest.identity == without.manifest.identity
    assert with_them.predictions().outputs.tolist() == without.predictions().outputs.tolist()


def test_a_damaged_file_is_reported_and_written_again(runs, capsys):
    file = runs / "fedavg" / "simple-models.npz"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(BadInput, match=r"simple-models\.npz was altered or damaged .* fedrema resume"):
        fedrema.load(runs / "fedavg").simple_models()
    assert main(["resume", str(runs / "fedavg")]) == 0
    assert file.read_bytes() == content
    file.unlink()
    assert main(["resume", str(runs / "fedavg")]) == 0
    assert file.read_bytes() == content


def test_tables_have_rows_and_a_sentence(runs, capsys):
    capsys.readouterr()
    assert main(["compare", "runs", "--no-plot"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Constant, alone – " in shown
    assert "Linear, alone – " in shown
    assert "By accuracy, FedAvg is worse than the constant at " in shown
    assert " of 4 clients and better at " in shown
    for form, text in (("markdown", "| Linear, alone | – |"), ("latex", "Linear, alone & --")):
        assert main(["compare", "runs", "--no-plot", "--format", form]) == 0
        assert text in capsys.readouterr().out
    assert main(["compare", "runs", "--no-plot", "--format", "csv"]) == 0
    rows = {row["method"]: row for row in csv.DictReader(io.StringIO(capsys.readouterr().out))}
    found = fedrema.load(runs / "fedavg").simple_models()["linear"]
    correct = found.outputs.argmax(1) == found.targets
    assert float(rows["Linear, alone"]["final_accuracy"]) == pytest.approx(correct.mean())
    assert rows["Linear, alone"]["seconds"] == ""


def test_counts_of_clients_are_those_of_their_metrics(runs, capsys):
    (against,) = verdicts([fedrema.load(runs / "fedavg")], "log_loss", "constant")
    assert against.baseline == "Constant, alone"
    gains = [client.gain.gain for client in against.clients]
    capsys.readouterr()
    assert main(["verdict", "runs/fedavg", "runs/local", "--metric", "log_loss"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    worse, better = sum(gain < 0 for gain in gains), sum(gain > 0 for gain in gains)
    assert f"FedAvg is worse than the constant at {worse} of 4 clients and better at {better}" in shown
    assert main(["verdict", "runs/fedavg", "runs/local", "--metric", "log_loss", "--json"]) == 0
    (content,) = json.loads(capsys.readouterr().out)
    assert content["simple_models"]["constant"] == {"worse": worse, "better": better, "clients": 4}


def test_a_baseline_that_is_worse_than_constants_is_reported(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    generator = np.random.default_rng(1)  # nothing to learn, and too many rounds
    x, y = generator.normal(size=(300, 8)).astype(np.float32), generator.integers(0, 2, 300)
    federation = fedrema.Federation.from_arrays(x, y, generator.integers(0, 3, 300))
    longer = {**SMALL, "rounds": 3, "epochs": 30, "batch": 40, "lr": 0.5}
    for method in ("local", "fedavg"):
        fedrema.run(method, federation=federation, out=tmp_path / method, **longer)
    assert main(["verdict", str(tmp_path), "--metric", "log_loss"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search("Warning: Local is itself worse than the constant at [23] of 3 clients", shown)
    assert main(["verdict", str(tmp_path), "--metric", "log_loss", "--baseline", "linear"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Local compared with Linear, alone: 0 of 3 clients gain" in shown
    assert "Warning" not in shown


def test_the_report_warns_of_a_baseline_that_is_worse_than_constants(tmp_path):
    generator = np.random.default_rng(1)  # nothing to learn but the more frequent class, and too many rounds
    x, y = generator.normal(size=(300, 8)).astype(np.float32), (generator.random(300) < 0.2).astype(int)
    federation = fedrema.Federation.from_arrays(x, y, generator.integers(0, 3, 300))
    for method in ("local", "fedavg"):
        settings = {**SMALL, "rounds": 3, "epochs": 30, "batch": 40, "lr": 0.5}
        fedrema.run(method, federation=federation, out=tmp_path / method, **settings)
    part = verdict_part([DownsampledRun(tmp_path / method) for method in ("local", "fedavg")])
    assert re.match("Warning: Local is itself worse than the constant at [23] of 3 clients", part["warning"])


def test_the_report_has_rows_and_the_sentence(runs):
    part = main_part([DownsampledRun(runs / method) for method in ("local", "fedavg")])
    assert [one["label"] for one in part["simple"]] == ["Constant, alone", "Linear, alone"]
    assert set(part["simple"][0]["statistics"]) == set(part["groups"][0]["statistics"]) - {
        "epsilon", "seconds", "bytes_up", "bytes_down"
    }  # fmt: skip
    assert "is worse than the linear model at" in part["explanation"]
