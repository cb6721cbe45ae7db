"""Scores of every task: honest ones pass the checks, and hostile ones are refused in one sentence."""

import numpy as np
import pytest
import torch

from fedrema.deploy.scores import Score, ScoreChecks, joined_sums
from fedrema.errors import BadInput
from fedrema.simulation.scoring import measure, metric_records
from fedrema.tasks import METRICS, TASKS, Predictions, Task
from fedrema.tasks.metrics import metrics_of

CLASSES = {"multiclass": 4, "binary": 2, "multilabel": 3, "ordinal": 4, "regression": 1, "count": 1}


def all_metrics(task):
    return metrics_of(task, tuple(metric.name for metric in METRICS.values() if task.name in metric.tasks))


def predictions(name, samples, seed=0):
    task = Task(name, CLASSES[name], 2.0, 3.0)
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(1, samples, task.outputs, generator=generator, dtype=torch.float64)
    high = {"multilabel": 2, "regression": 50, "count": 7}.get(name, task.classes)
    shape = (1, samples, 3) if name == "multilabel" else (1, samples)
    target = torch.randint(high, shape, generator=generator)
    target = target.double() if name in ("regression", "count") else target
    return Predictions(task, outputs, target, torch.ones(1, samples, dtype=torch.bool))


def score(name, samples, seed=0):
    found = predictions(name, samples, seed)
    return ScoreChecks(found.task, all_metrics(found.task)), Score.of(measure(all_metrics(found.task), found), samples)


@pytest.mark.parametrize("samples", [1, 2, 3, 25])
@pytest.mark.parametrize("name", TASKS)
def test_honest_scores_of_every_task_and_metric_arrive_as_they_were_sent(name, samples):
    for seed in range(10):
        checks, sent = score(name, samples, seed)
        assert sent.total == ((samples + 1) // 2, samples // 2)
        assert checks.read(sent.facts("received"), "received") == sent
    assert checks.read({}, "received") is None


@pytest.mark.parametrize("name", TASKS)
def test_metrics_of_several_clients_equal_those_of_the_simulator(name):
    metrics = all_metrics(predictions(name, 1).task)
    parts = [measure(metrics, predictions(name, samples, samples)) for samples in (7, 12)]
    together = {metric.name: np.concatenate([part[metric.name] for part in parts]) for metric in metrics}
    scores = [Score.of(part, samples) for part, samples in zip(parts, (7, 12), strict=True)]
    found = metric_records(joined_sums(scores, [metric.name for metric in metrics]), [2, 0], 3)
    assert found == metric_records(together, [2, 0], 3)


def test_without_test_samples_there_is_no_score():
    task = Task("regression")
    assert Score.of(measure(all_metrics(task), predictions("regression", 0)), 0) is None
    assert metric_records(joined_sums([], ["rmse"]), [], 2)["rmse"].clients == [None, None]


def test_the_primary_metric_is_described_with_its_title():
    assert Score((1, 1), {"rmse": ((1, 1), (7, 1), (8, 2)), "r2": ((0, 1),) * 3}).described() == "RMSE 2"
    assert Score((1, 1), {"accuracy": ((1, 1), (0, 1), (1, 2))}).described() == "accuracy 50.0%"
    assert Score((1, 1), {"auc": ((0, 0), (0, 0), (0, 0))}).described() == "AUC undefined"


@pytest.mark.parametrize(
    ("name", "metric", "sums", "why"),
    [
        ("regression", "rmse", [float("nan"), 13, 1, 12, 2, 25], "finite numbers for RMSE"),
        ("regression", "rmse", [1e200, 13, 1, 12, 2, 25], "finite numbers for RMSE"),
        ("regression", "rmse", ["1", 13, 1, 12, 2, 25], "finite numbers for RMSE"),
        ("regression", "rmse", [True, 13, 1, 12, 2, 25], "finite numbers for RMSE"),
        ("regression", "rmse", [1, 14, 1, 11, 2, 25], "RMSE over 14 samples instead of 13"),
        ("regression", "rmse", [1, 0, 1, 12, 2, 25], "RMSE over 0 samples instead of 13"),
        ("regression", "rmse", [-1, 13, 3, 12, 2, 25], "negative RMSE"),
        ("regression", "rmse", [1, 13, 1, 12, 5, 25], "RMSE 5 in all, but 2 in both halves"),
        ("regression", "rmse", [1, 13, 1, 12], "six numbers for RMSE"),
        ("regression", "rmse", None, "six numbers for RMSE"),
        ("regression", "r2", [1, -1, 1, 1, 1, 1], "negative R²"),
        ("regression", "r2", [1, float("inf"), 1, 1, 1, 1], "finite numbers for R²"),
        ("count", "deviance", [1, 13, 1, 12, 2, 26], "Poisson deviance over 26 samples instead of 25"),
        ("multilabel", "f1", [14, 13, 1, 12, 2, 25], "macro F1 above 1"),
        ("multilabel", "auc", [1, 5, 1, 12, 2, 25], "AUC over 5 samples instead of 13"),
        ("multilabel", "auc", [1, 0, 1, 12, 2, 25], "AUC above 1"),
        ("multilabel", "accuracy", [13.5, 13, 0, 12, 13.5, 25], "correct predictions of"),
        ("multiclass", "accuracy", [1.5, 13, 0, 12, 1.5, 25], "must be a whole number"),
        ("multiclass", "brier", [30, 13, 0, 12, 30, 25], "Brier score above 2"),
        ("ordinal", "mae", [1, 13, 1, 12, -2, 25], "negative MAE"),
    ],
)
def test_hostile_scores_are_refused(name, metric, sums, why):
    checks, sent = score(name, 25)
    facts = {**sent.facts("trained"), f"trained-{metric}": sums}
    with pytest.raises(BadInput, match=why) as refused:
        checks.read(facts, "trained")
    assert len(str(refused.value)) < 300


def test_a_metric_that_is_undefined_for_a_client_is_accepted():
    checks, sent = score("multilabel", 25)
    facts = {**sent.facts("received"), "received-auc": [0.0, 0.0, 3.0, 12.0, 5.0, 25.0]}
    assert checks.read(facts, "received").sums["auc"] == ((0, 0), (3, 12), (5, 25))
