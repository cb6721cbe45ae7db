"""fedrema verdict: gains of single clients, summaries, errors, and each model on each client's samples."""

import csv
import io
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

import fedrema
from fedrema.cli import main
from fedrema.page.reading import DownsampledRun
from fedrema.page.render import write_page
from fedrema.page.verdict import verdict_part
from fedrema.reporting.verdict import best_and_worst, verdicts
from fedrema.runs.model_matrix import model_matrix
from fedrema.simulation.gains import compare_models
from fedrema.tasks import METRICS
from tests.cli.refusals import refused
from tests.fixtures import make_federation
from tests.quick import quick

SETTINGS = {"rounds": 3, "clients": 4, "samples": 40, "epochs": 1, "hidden": 6, "device": "cpu"}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs of Local, FedAvg and FedReMa on the same clients, and of FedAvg on others."""
    folder = tmp_path_factory.mktemp("trained")
    for method in ("local", "fedavg", "fedrema"):
        fedrema.run(method, out=folder / "same" / method, **SETTINGS)
    fedrema.run("fedavg", out=folder / "other", data_seed=5, **SETTINGS)
    return folder


@pytest.fixture
def runs(trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path / "runs"


def test_the_table_and_the_sentence(runs, capsys):
    assert main(["verdict", "runs/same/fedrema", "runs/same/local"]) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines[1].split() == ["client", "samples", "Local", "FedReMa", "gain", "95", "%", "interval", "conclusion"]
    recorded = {
        method: fedrema.load(runs / "same" / method).rounds[-1]["client_accuracy"] for method in ("local", "fedrema")
    }
    rows = [line.split() for line in lines[2:6]]
    assert sorted(row[0] for row in rows) == ["0", "1", "2", "3"]
    for row in rows:
        local, joint = (recorded[method][int(row[0])] for method in ("local", "fedrema"))
        assert [float(cell) for cell in row[2:5]] == [round(100 * each, 1) for each in (local, joint, joint - local)]
    gains = [float(row[4]) for row in rows]
    assert gains == sorted(gains, reverse=True)
    shown = " ".join(shown.split())
    assert "FedReMa compared with Local: " in shown
    assert " of 4 clients " in shown
    assert f"mean gain of these 4 clients {np.mean(gains):.1f} points [" in shown
    assert "four clients do not show what a further client would gain." in shown
    assert "do not contain the variation over training seeds and splits" in shown
    assert "not corrected for the number of clients" in shown
    assert "One run per method" not in shown


def test_every_other_method_is_compared_with_the_baseline(runs, capsys):
    assert main(["verdict", "runs/same", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["method"], one["baseline"]) for one in found] == [("FedAvg", "Local"), ("FedReMa", "Local")]
    assert main(["verdict", "runs/same", "--json", "--baseline", "fedavg", "--metric", "log_loss"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {(one["method"], one["baseline"], one["metric"]) for one in found} == {
        ("FedReMa", "FedAvg", "log_loss"),
        ("Local", "FedAvg", "log_loss"),
    }
    client = found[0]["clients"][0]
    assert client["gain"] == pytest.approx(client["baseline"] - client["value"])  # a lower log loss is better
    assert main(["verdict", "runs/same/fedrema", "runs/same/fedavg", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["baseline"] == "FedAvg"


def test_csv(runs, capsys, tmp_path):
    assert main(["verdict", "runs/same", "--csv", "gains.csv"]) == 0
    assert "Gains: gains.csv" in capsys.readouterr().out
    rows = list(csv.DictReader(io.StringIO((tmp_path / "gains.csv").read_text())))
    assert len(rows) == 8
    assert float(rows[0]["gain"]) == pytest.approx(float(rows[0]["value"]) - float(rows[0]["baseline"]))
    assert {row["compared_with"] for row in rows} == {"Local"}


def test_results_do_not_depend_on_the_other_runs(runs):
    loaded = [fedrema.load(runs / "same" / method) for method in ("fedrema", "fedavg", "local")]
    alone = verdicts([loaded[0], loaded[2]])[0]
    assert next(one for one in verdicts(loaded) if one.label == "FedReMa") == alone
    mine, theirs = (run.predictions() for run in (loaded[0], loaded[2]))
    pairs = {name: (mine.of(row), theirs.of(row)) for row, name in enumerate(loaded[0].names)}
    expected = dict(zip(pairs, compare_models(METRICS["accuracy"], pairs).clients, strict=True))
    assert {client.name: client.gain for client in alone.clients} == expected


def test_of_several_seeds_the_first_run_is_used(runs, capsys):
    fedrema.run("fedrema", out=runs / "same" / "another", seed=1, **SETTINGS)
    assert main(["verdict", "runs/same/another", "runs/same/fedrema", "runs/same/local"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "One run per method is used, the first one named: FedReMa seed 1, Local seed 0." in shown


def test_of_many_clients_the_best_and_the_worst_are_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for method in ("local", "fedavg"):
        fedrema.run(method, out=method, **{**SETTINGS, "rounds": 1, "clients": 45, "samples": 10})
    assert main(["verdict", "local", "fedavg"]) == 0
    shown = capsys.readouterr().out
    assert "… 15 more" in shown
    assert "45 have too few test samples" in shown
    assert len([line for line in shown.splitlines() if line.endswith("too few samples")]) in (0, 30)
    assert main(["verdict", "local", "fedavg", "--all"]) == 0
    assert "more" not in capsys.readouterr().out
    assert best_and_worst(range(41))[0] == [*range(15), *range(26, 41)]


def test_errors(runs, capsys, tmp_path):
    assert "there is no run of Local or FedAvg to compare with" in refused(capsys, "verdict", "runs/same/fedrema")
    assert "Local is the only method" in refused(capsys, "verdict", "runs/same/local")
    said = refused(capsys, "verdict", "runs/same/local", "runs/other")
    assert "were trained on different federations: their clients cannot be compared" in said
    said = refused(capsys, "verdict", "runs/same", "--baseline", "ditto")
    assert "--baseline 'ditto' is not among the methods; valid are" in said
    assert "metric 'speed' is unknown" in refused(capsys, "verdict", "runs/same", "--metric", "speed")
    said = refused(capsys, "verdict", "runs/same", "--metric", "rmse")
    assert "--metric rmse is not defined for the task multiclass; valid are accuracy" in said
    assert "needs at least one folder of a run" in refused(capsys, "verdict")
    (runs / "same" / "local" / "predictions.npz").unlink()
    said = refused(capsys, "verdict", "runs/same")
    assert "local/predictions.npz is missing: fedrema resume runs/same/local writes it" in said
    assert main(["resume", "runs/same/local", "--quiet"]) == 0
    assert main(["verdict", "runs/same"]) == 0
    capsys.readouterr()
    (runs / "same" / "local" / "summary.json").unlink()
    assert "has not finished: continue it with fedrema resume runs/same/local" in refused(
        capsys, "verdict", "runs/same"
    )


def test_errors_of_the_matrix(runs, capsys):
    said = refused(capsys, "verdict", "runs/same", "--matrix", "m.csv")
    assert "is for the models of one run, but there are 3" in said
    said = refused(capsys, "verdict", "runs/other", "--matrix", "m.txt")
    assert "names ending in .csv, .png, .svg or .pdf are valid" in said
    said = refused(capsys, "verdict", "runs/other", "--matrix", "m.csv", "--csv", "a.csv")
    assert "--csv is for a comparison of runs and excludes --matrix" in said


def test_runs_of_a_deployment_are_refused(runs, capsys):
    for method in ("fedavg", "local"):
        directory = fedrema.load(runs / "same" / method).directory
        manifest = directory.manifest()
        deployed = replace(manifest.federation, info={"network": "flower"})
        directory.write_manifest(replace(manifest, federation=deployed))
    said = refused(capsys, "verdict", "runs/same")
    assert "belongs to a deployment: its test samples never leave the nodes" in said
    assert "belongs to a deployment" in refused(capsys, "verdict", "runs/same/fedavg", "--matrix", "m.csv")


def test_the_matrix_as_a_file(runs, capsys, tmp_path):
    assert main(["verdict", "runs/same/fedrema", "--matrix", "m.csv"]) == 0
    assert capsys.readouterr().out == "Matrix: m.csv\n"
    rows = list(csv.reader(io.StringIO((tmp_path / "m.csv").read_text())))
    assert rows[0] == ["model", "0", "1", "2", "3"]
    diagonal = [float(row[place + 1]) for place, row in enumerate(rows[1:])]
    assert diagonal == fedrema.load(runs / "same" / "fedrema").rounds[-1]["client_accuracy"]
    assert main(["verdict", "runs/same/fedrema", "--matrix", "m.png", "--metric", "log_loss"]) == 0
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("method", ["fedavg", "fedrema", "fedbabu", "fedproto", "fedrod", "fedprior", "fedamp"])
def test_the_diagonal_of_the_matrix_is_the_recorded_metric(method, tmp_path):
    run = fedrema.run(
        quick(method), federation=make_federation(), out=tmp_path, rounds=2, epochs=1, batch=5, lr=0.05, device="cpu"
    )
    found = model_matrix(run)
    assert found.values.diagonal().tolist() == run.rounds[-1]["client_accuracy"]
    assert found.values.shape == (4, 4)


def test_the_matrix_agrees_with_single_models_in_chunks(tmp_path):
    federation = make_federation((20,) * 40)
    run = fedrema.run("local", federation=federation, out=tmp_path, rounds=2, epochs=1, chunk=32, lr=0.05, batch=5)
    found = fedrema.model_matrix(run)
    for model, client in ((0, 39), (39, 0), (33, 5)):
        split = federation.split("test")
        x, y = (each[client, : split.count[client]] for each in (split.x, split.y))
        predicted = run.personal_model(row=model)(torch.from_numpy(x)).argmax(1).numpy()
        assert found.values[model, client] == pytest.approx((predicted == y).mean())


def test_the_matrix_needs_unchanged_data(tmp_path, capsys):
    federation = make_federation()
    federation.save(tmp_path / "mine.npz")
    arguments = ["--federation", str(tmp_path / "mine.npz"), "--rounds", "1", "--out", str(tmp_path / "run"), "--quiet"]
    assert main(["run", "fedavg", *arguments]) == 0
    make_federation(seed=4).save(tmp_path / "mine.npz")
    capsys.readouterr()
    said = refused(capsys, "verdict", str(tmp_path / "run"), "--matrix", str(tmp_path / "m.csv"))
    assert "has changed since training: its models cannot be evaluated on it" in said


def pages(folder):
    return [DownsampledRun(file.parent) for file in sorted(folder.rglob("config.json"))]


def test_the_page_shows_the_gains(runs):
    part = verdict_part(pages(runs / "same"))
    assert (part["baseline"], part["metric"], part["percent"]) == ("Local", "accuracy", True)
    assert [method["label"] for method in part["methods"]] == ["FedAvg", "FedReMa"]
    assert sum(part["methods"][0]["counts"].values()) == 4
    expected = verdicts([fedrema.load(runs / "same" / method) for method in ("local", "fedrema")])[0]
    assert part["methods"][1]["clients"][0] == expected.as_json()["clients"][0]
    write_page([runs / "same"], runs / "page.html")
    text = (runs / "page.html").read_text()
    assert json.loads(text.partition('id="part-verdict">')[2].partition("</script>")[0]) == part
    assert "Is joining worthwhile?" in text


def test_the_page_says_why_there_are_no_gains(runs, monkeypatch):
    assert verdict_part([])["methods"] == []
    alone = verdict_part(pages(runs / "same" / "fedrema"))
    assert (alone["methods"], alone["note"]) == ([], "")
    assert verdict_part(pages(runs / "other"))["note"] == ""
    file = runs / "same" / "fedrema" / "predictions.npz"
    content = file.read_bytes()
    file.write_bytes(content[:-50])
    with pytest.raises(fedrema.BadInput, match=r"predictions\.npz was altered or damaged"):
        verdict_part(pages(runs / "same"))
    assert "cannot be read" in verdict_part(pages(runs / "same"), live=True)["note"]
    file.unlink()
    assert [method["label"] for method in verdict_part(pages(runs / "same"))["methods"]] == ["FedAvg"]
    (runs / "same" / "local" / "summary.json").unlink()
    assert verdict_part(pages(runs / "same"))["note"] == "Available when Local and another method have finished."
    file.write_bytes(content)
    monkeypatch.setattr("fedrema.page.verdict.MOST_SAMPLES", 5)
    assert main(["resume", str(runs / "same" / "local"), "--quiet"]) == 0
    assert "fedrema verdict computes it" in verdict_part(pages(runs / "same"))["note"]


def test_a_new_client_learns_whether_joining_is_worthwhile(runs, capsys, tmp_path):
    digits = fedrema.make_federation(clients=1, samples=60, s=1.0, partition="iid", data_seed=9)
    np.savez(tmp_path / "new.npz", x=digits.x, y=digits.y)
    assert main(["personalize", "runs/same/fedrema", "--data", "new.npz"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    stages = {line[0]: float(line[-1].rstrip("%")) for line in lines if line and line[-1].endswith("%")}
    after = next(place for place, line in enumerate(lines) if "compared" in line)
    arrival, local = lines[after + 1], lines[after + 2]
    assert arrival[:2] == ["on", "arrival"]
    assert float(arrival[2]) == pytest.approx(stages["fine-tuned"] - stages["on"], abs=0.11)
    assert local[:3] == ["Local", "(3", "epochs)"]  # one epoch in each of the run's three rounds
    assert float(local[3]) == pytest.approx(stages["fine-tuned"] - stages["Local"], abs=0.11)


def test_a_new_client_trains_alone_for_at_most_fifty_epochs(runs, tmp_path):
    from fedrema.runs.new_clients import personalize

    run = fedrema.run("fedavg", out=tmp_path / "long", **{**SETTINGS, "rounds": 2, "epochs": 40})
    digits = fedrema.make_federation(clients=1, samples=30, s=1.0, partition="iid", data_seed=9)
    np.savez(tmp_path / "new.npz", x=digits.x, y=digits.y)
    assert personalize(run.path, tmp_path / "new.npz", epochs=0).local_epochs == 50
