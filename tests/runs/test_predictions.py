"""predictions.npz: what the final models predict for the clients' own test samples."""

import logging

import numpy as np
import pytest
import torch
from torch import nn

import fedrema
from fedrema.errors import BadInput
from fedrema.runs import execute as execution
from fedrema.simulation.scoring import measure, metric_records
from fedrema.tasks.metrics import metrics_of
from tests.fixtures import make_federation
from tests.quick import quick
from tests.runs.damaged import command

SMALL = {"rounds": 2, "epochs": 1, "hidden": 6, "batch": 5, "lr": 0.05, "device": "cpu"}
TASKS = {
    "binary": lambda generator, n: generator.integers(0, 2, n),
    "multilabel": lambda generator, n: generator.integers(0, 2, (n, 3)),
    "ordinal": lambda generator, n: generator.integers(0, 4, n),
    "regression": lambda generator, n: generator.normal(size=n),
    "count": lambda generator, n: generator.poisson(3.0, n),
}


def federation_of(task, samples=120):
    generator = np.random.default_rng(0)
    client = generator.integers(0, 4, samples)
    x = generator.normal(size=(samples, 6)).astype(np.float32)
    return fedrema.Federation.from_arrays(x, TASKS[task](generator, samples), client, task=task)


def records_of(run):
    """Return the metrics that follow from a run's predictions.npz."""
    found, federation = run.predictions(), run.manifest.federation
    recorded = tuple(run.rounds[-1].metrics)
    sums = measure(metrics_of(federation.task, recorded), found.padded(max(federation.test_counts)))
    return {name: metric_records(sums, found.rows, len(run.names))[name] for name in recorded}


@pytest.mark.parametrize("backend", ["stacked", "loop"])
@pytest.mark.parametrize("method", fedrema.registry())
def test_stored_predictions_have_the_metrics_of_the_last_round(method, backend, tmp_path):
    run = fedrema.run(
        quick(method), federation=make_federation(), out=tmp_path / "run", backend=backend, metrics="log_loss", **SMALL
    )
    assert records_of(run) == run.rounds[-1].metrics


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("task", TASKS)
def test_every_task_stores_its_predictions(task, precision, tmp_path):
    out = tmp_path / "run"
    run = fedrema.run("fedavg", federation=federation_of(task), out=out, precision=precision, **SMALL)
    assert records_of(run) == run.rounds[-1].metrics
    assert run.predictions().outputs.dtype == np.dtype(precision)


@pytest.mark.parametrize("metrics", ["", "log_loss"])
def test_outputs_beyond_the_classes_count_as_wrong_whichever_metrics_are_recorded(metrics, tmp_path):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        wide = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 9))  # the data has four classes
    settings = {**SMALL, "lr": 0.0001, "head": "2", "metrics": metrics}
    run = fedrema.run("fedavg", federation=make_federation(), net=wide, out=tmp_path / "run", **settings)
    assert records_of(run) == run.rounds[-1].metrics
    assert run.predictions().outputs.shape[1] == 9


def test_predictions_follow_the_last_round_of_a_resumed_run(tmp_path):
    run = fedrema.run("fedavg", federation=make_federation(), out=tmp_path / "run", late=0.5, late_round=3, **SMALL)
    assert len(run.predictions().rows) == 2
    before = run.predictions().outputs
    longer = fedrema.resume(run.path, rounds=4)
    assert len(longer.predictions().rows) == 4
    assert records_of(longer) == longer.rounds[-1].metrics
    assert before.shape != longer.predictions().outputs.shape
    whole = fedrema.run(
        "fedavg", federation=make_federation(), out=tmp_path / "whole", late=0.5, late_round=3, **{**SMALL, "rounds": 4}
    )
    np.testing.assert_array_equal(whole.predictions().outputs, longer.predictions().outputs)


def test_resume_writes_missing_and_damaged_predictions_again(tmp_path):
    run = fedrema.run("fedavg", federation=make_federation(), out=tmp_path / "run", **SMALL)
    file = run.directory.predictions_file
    content = file.read_bytes()
    file.unlink()
    with pytest.raises(BadInput, match=r"predictions.npz is missing: fedrema resume .* writes it, unless"):
        run.predictions()
    assert command("resume", run.path, "--quiet")[0] == 0
    assert file.read_bytes() == content
    file.write_bytes(content[:-100])
    with pytest.raises(BadInput, match="was altered or damaged since fedrema wrote it: fedrema resume"):
        run.predictions()
    assert command("resume", run.path, "--quiet")[0] == 0
    assert file.read_bytes() == content


def test_an_unfinished_run_has_no_predictions(tmp_path):
    run = fedrema.run("fedavg", federation=make_federation(), out=tmp_path / "run", **SMALL)
    run.directory.remove_summary()
    assert not run.directory.predictions_file.exists()
    with pytest.raises(BadInput, match="has not finished: continue it with fedrema resume"):
        run.predictions()


def test_very_large_predictions_are_not_written(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(execution, "MOST_PREDICTIONS", 10)
    with caplog.at_level(logging.WARNING, "fedrema"):
        run = fedrema.run("fedavg", federation=make_federation(), out=tmp_path / "run", **SMALL)
    assert run.finished
    assert not run.directory.predictions_file.exists()
    assert "predictions.npz is not written" in caplog.text
