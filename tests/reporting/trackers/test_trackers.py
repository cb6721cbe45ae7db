"""--track: numbers and figures in real event files and real local stores."""

import importlib.util
import json
import subprocess
import sys

import pytest

import fedrema
from fedrema.cli import main
from fedrema.methods.fedrema import FedReMa
from fedrema.reporting.trackers import Tracking, scalars_of
from fedrema.runs.execute import Interrupted
from fedrema.simulation.records import MetricRecord, NodeReports, RoundRecord
from tests.reporting.folders import round_record, write_run

QUICK = {"rounds": 3, "clients": 4, "samples": 20, "epochs": 1}


def stop_after(last):
    def watch(finished):
        if finished.record.round == last:
            raise Interrupted

    return watch


def test_scalars_of_a_record():
    record = RoundRecord(
        2,
        participants=[0, 2],
        dropped=[1],
        loss=1.0,
        client_loss=[1.0, 1.0],
        metrics={"accuracy": MetricRecord(0.5, (0.4, 0.6), 0.25, [0.25, 0.75])},
        trained={"accuracy": MetricRecord(None)},
        alternatives={"unadapted": {"accuracy": 0.3}},
        trace={"critical": True, "set_sizes": [1, 2], "gap_ratio": 0.75},
        bytes_up=10,
        seconds={"train": 2.0},
        nodes=NodeReports({"a": "late"}),
    )
    assert scalars_of(record, FedReMa.reports) == {
        "accuracy": 0.5, "worst_tenth": 0.25, "loss": 1.0, "bytes_up": 10.0, "bytes_down": 0.0,
        "beside/unadapted": 0.3, "seconds/train": 2.0, "trace/critical": 1.0, "trace/gap_ratio": 0.75,
        "trace/mean_set_sizes": 1.5, "clients/took_part": 2.0, "clients/failed": 2.0,
    }  # fmt: skip


def test_unknown_and_missing_trackers_are_one_sentence(tmp_path, capsys, monkeypatch):
    arguments = ["run", "fedavg", "--rounds", "1", "--out", str(tmp_path / "run")]
    assert main([*arguments, "--track", "tensorboard,paper"]) == 2
    assert "--track 'paper' is unknown; valid are tensorboard, mlflow, wandb." in capsys.readouterr().err
    found = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "mlflow" else found(name))
    assert main([*arguments, "--track", "mlflow"]) == 2
    assert (
        "--track mlflow needs a package that is not installed: pip install 'fedrema[mlflow]'."
        in capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()


def test_tracking_does_not_change_the_run(tmp_path):
    pytest.importorskip("tensorboard")
    plain = fedrema.run("fedrema", out=tmp_path / "plain", **QUICK)
    tracked = fedrema.run("fedrema", out=tmp_path / "tracked", track="tensorboard", **QUICK)
    assert plain.config["identity"] == tracked.config["identity"]
    assert [record.accuracy for record in plain.rounds] == [record.accuracy for record in tracked.rounds]


def test_tensorboard_receives_numbers_and_figures_also_after_a_stop(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    settings = {**QUICK, "track": "tensorboard", "record": "relations", "checkpoint_every": 1}
    with pytest.raises(Interrupted):
        fedrema.run("fedrema", out=out, on_round=stop_after(2), **settings)
    run = fedrema.resume(out)
    events = EventAccumulator(str(out / "tensorboard"), size_guidance={"images": 0, "scalars": 0})
    events.Reload()
    sent = {event.step: event.value for event in events.Scalars("accuracy")}
    assert sent == pytest.approx({record.round: record.accuracy for record in run.rounds})
    assert len(events.Scalars("accuracy")) == 3
    assert events.Scalars("trace/mean_gap")[0].value == pytest.approx(run.rounds[0].trace["mean_gap"])
    assert set(events.Tags()["images"]) == {"accuracy", "mean_gap", "gap_ratio", "S", "G"}
    assert [event.step for event in events.Images("S")] == [3]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised in the database library of MLflow
def test_mlflow_receives_numbers_settings_and_figures_also_after_a_stop(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed (make test-tracking)")
    monkeypatch.chdir(tmp_path)  # MLflow writes figures to ./mlruns
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    out = tmp_path / "run"
    settings = {**QUICK, "track": "mlflow", "record": "relations", "checkpoint_every": 1}
    with pytest.raises(Interrupted):
        fedrema.run("fedrema", out=out, on_round=stop_after(2), **settings)
    client = mlflow.MlflowClient()
    (experiment,) = [one for one in client.search_experiments() if one.name == "fedrema"]
    (stored,) = client.search_runs([experiment.experiment_id])
    assert stored.info.status == "KILLED"
    run = fedrema.resume(out)
    (stored,) = client.search_runs([experiment.experiment_id])
    assert stored.info.status == "FINISHED"
    history = {one.step: one.value for one in client.get_metric_history(stored.info.run_id, "accuracy")}
    assert history == pytest.approx({record.round: record.accuracy for record in run.rounds})
    assert stored.data.params["clients"] == "4"
    pictures = {file.path for file in client.list_artifacts(stored.info.run_id, "pictures")}
    assert pictures == {f"pictures/{name}.png" for name in ("accuracy", "mean_gap", "gap_ratio", "S", "G")}


def test_wandb_keeps_numbers_offline_in_the_runs_folder(tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed (make test-tracking)")
    # In another process: wandb leaves threads and an exit handler behind.
    code = (
        "import os, fedrema\nos.environ['WANDB_MODE'] = 'offline'\n"
        f"fedrema.run('fedrema', out={str(tmp_path / 'run')!r}, track='wandb', **{QUICK!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)
    (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
    (file,) = folder.glob("*.wandb")
    assert file.stat().st_size > 1000
    assert b"accuracy" in file.read_bytes()
    assert json.loads((tmp_path / "run" / "tracking.json").read_text())["wandb"] == folder.name.rpartition("-")[2]


class Unreachable:
    """A tracker whose server fails in the second round."""

    name = "unreachable"

    def __init__(self):
        self.received = []

    def scalars(self, number, values):
        if number == 2:
            raise ConnectionError("the server does not answer")
        self.received.append(number)


def test_a_failing_tracker_is_dropped_and_training_continues(tmp_path, capsys):
    tracker = Unreachable()
    run = write_run(tmp_path / "run")
    tracked = Tracking([tracker], run.directory)
    for number in (1, 2, 3):
        tracked.round(round_record(number, 0.5))
    tracked.close()
    assert tracker.received == [1]
    message = f"fedrema: unreachable failed and receives no more numbers of {run.path}: the server does not answer\n"
    assert capsys.readouterr().err == message


def test_an_unreachable_store_is_reported_in_one_sentence(tmp_path, monkeypatch, capsys):
    pytest.importorskip("mlflow", reason="mlflow is not installed (make test-tracking)")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nonsense://store")
    arguments = ["run", "fedavg", "--rounds", "1", "--clients", "4", "--samples", "20", "--track", "mlflow"]
    assert main([*arguments, "--out", str(tmp_path / "run")]) == 2
    assert "fedrema: --track mlflow cannot start: " in capsys.readouterr().err
