"""Metrics of several clients at once, against scikit-learn and formulas written out for one client."""

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn

from fedrema.errors import BadInput
from fedrema.simulation.scoring import measure, metric_record, metric_records
from fedrema.tasks import METRICS, TASKS, Predictions, Task, find_metric
from fedrema.tasks.metrics import BINS, metrics_of

COUNTS = (40, 7, 25, 1, 0)
"""Samples of each client; the fourth can have one class only, the fifth has no samples."""


def make_predictions(task: Task, seed=0, counts=COUNTS) -> Predictions:
    """Return random outputs and targets; padding holds numbers that would change every metric."""
    generator = np.random.default_rng(seed)
    shape = (len(counts), max(counts))
    outputs = np.round(generator.normal(size=(*shape, task.outputs)), 1)  # some scores are equal
    if task.name == "multilabel":
        target = generator.integers(0, 2, (*shape, task.classes)).astype(np.uint8)
    elif task.has_classes:
        target = generator.integers(0, task.classes, shape)
        target[1] = np.where(target[1] == 1, 0, target[1])  # the second client lacks a class
    elif task.name == "count":
        target = generator.poisson(2.0, shape).astype(np.float64)
    else:
        target = generator.normal(3.0, 2.0, shape)
    mask = np.arange(shape[1]) < np.array(counts)[:, None]
    outputs[~mask] = np.nan if not task.has_classes else 1e3
    return Predictions(task, torch.from_numpy(outputs), torch.from_numpy(target), torch.from_numpy(mask))


def of_client(found: Predictions, client: int):
    """Return outputs, target, predictions and probabilities of one client without padding, as NumPy arrays."""
    real = found.mask[client]
    outputs, target = found.outputs[client][real], found.target[client][real]
    probabilities = found.task.probabilities(outputs)
    arrays = (outputs, target, found.task.predict(outputs), probabilities)
    return tuple(None if each is None else each.numpy() for each in arrays)


def auc(target, scores):
    """Return the mean AUC over columns in which both outcomes occur; None if there is no such column."""
    defined = [k for k in range(target.shape[1]) if 0 < target[:, k].sum() < len(target)]
    return np.mean([sklearn.roc_auc_score(target[:, k], scores[:, k]) for k in defined]) if defined else None


def naive_calibration_error(target, probabilities):
    """Return the calibration error, bin by bin: (0, 1/15], (1/15, 2/15], …"""
    total = 0.0
    for number in range(BINS):
        inside = [k for k, p in enumerate(probabilities) if number / BINS < p.max() <= (number + 1) / BINS]
        if inside:
            correct = np.mean([probabilities[k].argmax() == target[k] for k in inside])
            total += len(inside) / len(target) * abs(correct - np.mean([probabilities[k].max() for k in inside]))
    return total


def expected(name: str, task: Task, outputs, target, predicted, probabilities):
    """Return a metric of one client's samples; None where it is undefined."""
    if len(target) == 0:
        return None
    classes = np.arange(task.classes)
    one_hot = target if task.name == "multilabel" else (target[..., None] == classes).astype(int)
    if name == "accuracy":
        return np.mean(predicted == target)
    if name == "balanced_accuracy":
        return np.mean([np.mean(predicted[target == c] == c) for c in np.unique(target)])
    if name == "f1" and task.name == "multilabel":
        return sklearn.f1_score(target, predicted, average="macro", zero_division=np.nan)
    if name == "f1":
        return sklearn.f1_score(target, predicted, average="macro")
    if name == "auc" and task.name == "binary":
        return auc(target[:, None], probabilities[:, 1:])
    if name == "auc":
        return auc(one_hot, probabilities)
    if name == "log_loss" and task.name == "multilabel":
        each = (sklearn.log_loss(target[:, k], probabilities[:, k], labels=[0, 1]) for k in range(task.classes))
        return np.mean(list(each))
    if name == "log_loss":
        return sklearn.log_loss(target, probabilities, labels=classes)
    if name == "brier" and task.name == "multilabel":
        each = (np.mean((probabilities[:, k] - target[:, k]) ** 2) for k in range(task.classes))
        return np.mean(list(each))
    if name == "brier" and task.classes == 2:
        return sklearn.brier_score_loss(target, probabilities[:, 1], labels=[0, 1])
    if name == "brier":
        return np.mean(((probabilities - one_hot) ** 2).sum(1))
    if name == "calibration_error":
        return naive_calibration_error(target, probabilities)
    if name == "mae":
        return sklearn.mean_absolute_error(target, predicted)
    if name == "rmse":
        return sklearn.root_mean_squared_error(target, predicted)
    if name == "r2":
        return sklearn.r2_score(target, predicted) if len(target) > 1 else None
    assert name == "deviance"
    return sklearn.mean_poisson_deviance(target, predicted)


CASES = [
    Task("multiclass", 4),
    Task("binary", 2),
    Task("multilabel", 3),
    Task("ordinal", 5),
    Task("ordinal", 2),
    Task("regression", 1, 3.0, 2.0),
    Task("count", 1, 2.0),
]


@pytest.mark.filterwarnings("ignore:y_pred contains classes not in y_true")
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("name", "task"),
    [(name, task) for task in CASES for name, metric in METRICS.items() if task.name in metric.tasks],
    ids=lambda case: case if isinstance(case, str) else f"{case.name}{case.classes}",
)
def test_metrics_of_every_client_equal_scikit_learn(name, task, seed):
    found = make_predictions(task, seed)
    record = metric_records(measure([find_metric(name)], found), range(len(COUNTS)), len(COUNTS))[name]
    wanted = [expected(name, task, *of_client(found, client)) for client in range(len(COUNTS))]
    assert record.clients == [None if each is None else pytest.approx(each, abs=1e-6) for each in wanted]


def test_every_task_and_metric_is_tested():
    assert {task.name for task in CASES} == set(TASKS)
    for name, metric in METRICS.items():
        assert name == metric.name
        assert set(metric.tasks) <= set(TASKS)
        assert any(task.name in metric.tasks for task in CASES)
        assert metric.title
        assert metric.description
    for task in CASES:
        assert all(task.name in METRICS[name].tasks for name in task.usual)


@pytest.mark.parametrize("task", CASES, ids=lambda task: f"{task.name}{task.classes}")
def test_over_clients_metrics_are_those_of_all_samples_or_weighted_by_samples(task):
    found = make_predictions(task)
    records = metric_records(measure(metrics_of(task, tuple(_defined(task))), found), range(5), 5)
    pooled = Predictions(
        task,
        found.outputs[found.mask][None],
        found.target[found.mask][None],
        torch.ones(1, int(found.mask.sum()), dtype=torch.bool),
    )
    for name, record in records.items():
        if name in ("accuracy", "log_loss", "brier", "mae", "rmse", "deviance"):
            wanted = expected(name, task, *of_client(pooled, 0))
        elif name == "r2":
            parts = [of_client(found, client) for client in range(4)]
            errors = sum(((target - predicted) ** 2).sum() for _, target, predicted, _ in parts)
            deviations = sum(((target - target.mean()) ** 2).sum() for _, target, _, _ in parts)
            wanted = 1 - errors / deviations
        else:
            pairs = [(value, count) for value, count in zip(record.clients, COUNTS, strict=True) if value is not None]
            wanted = sum(value * count for value, count in pairs) / sum(count for _, count in pairs)
        assert record.value == pytest.approx(wanted, abs=1e-9), name


def _defined(task: Task) -> list[str]:
    return [name for name, metric in METRICS.items() if task.name in metric.tasks]


def test_a_multiclass_auc_is_the_mean_of_one_against_the_rest():
    found = make_predictions(Task("multiclass", 3), seed=5, counts=(60,) * 2)
    record = metric_records(measure([find_metric("auc")], found), [0, 1], 2)["auc"]
    _, target, _, probabilities = of_client(found, 0)
    assert record.clients[0] == pytest.approx(sklearn.roc_auc_score(target, probabilities, multi_class="ovr"), abs=1e-9)


def test_equal_scores_count_half_in_the_auc():
    # Positive scores 2, 1; negative scores 1, 0: of four pairs, three are won and one is a tie.
    outputs = torch.tensor([[[0.0, 2.0], [0.0, 1.0], [0.0, 1.0], [0.0, 0.0]]])
    found = Predictions(Task("binary", 2), outputs.double(), torch.tensor([[1, 1, 0, 0]]), torch.ones(1, 4) > 0)
    wins, samples = find_metric("auc").quotients(found)
    assert (wins / samples).tolist() == [3.5 / 4]


def test_a_client_with_one_class_has_no_auc_and_does_not_count():
    outputs = torch.tensor([[[0.0, 1.0], [0.0, 2.0], [0.0, -1.0]]] * 2).double()
    target = torch.tensor([[1, 1, 1], [1, 0, 0]])
    found = Predictions(Task("binary", 2), outputs, target, torch.ones(2, 3) > 0)
    record = metric_records(measure([find_metric("auc")], found), [0, 1], 2)["auc"]
    # The positive sample scores 1; one negative scores 2, the other −1.
    assert record.clients == [None, 0.5]
    assert record.value == 0.5
    assert record.worst_tenth == 0.5
    everyone = metric_records(measure([find_metric("accuracy")], found), [0, 1], 2)["accuracy"]
    assert everyone.clients == [pytest.approx(2 / 3), pytest.approx(2 / 3)]


def test_r2_is_undefined_for_equal_targets_although_their_mean_is_rounded():
    target = torch.full((1, 3), 0.1, dtype=torch.float64)
    assert float(((target - target.sum() / 3) ** 2).sum()) > 0  # a rounding error
    found = Predictions(Task("regression"), torch.zeros(1, 3, 1).double(), target, torch.ones(1, 3) > 0)
    record = metric_records(measure([find_metric("r2")], found), [0], 1)["r2"]
    assert (record.value, record.clients) == (None, [None])


@pytest.mark.parametrize("task", CASES, ids=lambda task: f"{task.name}{task.classes}")
def test_halves_are_every_second_sample(task):
    found = make_predictions(task, counts=(31, 18))
    chosen = metrics_of(task, tuple(_defined(task)))
    records = metric_records(measure(chosen, found), [0, 1], 2)
    for place in (0, 1):
        half = Predictions(task, *(each[:, place::2] for each in (found.outputs, found.target, found.mask)))
        alone = metric_records(measure(chosen, half), [0, 1], 2)
        for name, record in records.items():
            assert record.halves[place] == pytest.approx(alone[name].value, abs=1e-12), name


@pytest.mark.parametrize("task", CASES, ids=lambda task: f"{task.name}{task.classes}")
@pytest.mark.parametrize("samples", [0, 1])
def test_without_samples_every_metric_is_undefined(task, samples):
    found = make_predictions(task, counts=(samples or 3,) * 2)
    found = Predictions(task, *(each[:, :samples] for each in (found.outputs, found.target, found.mask)))
    for record in metric_records(measure(metrics_of(task, tuple(_defined(task))), found), [0, 1], 2).values():
        if samples == 0:
            assert (record.value, record.halves, record.clients) == (None, (None, None), [None, None])
        assert record.halves[1] is None


@pytest.mark.parametrize("task", CASES, ids=lambda task: f"{task.name}{task.classes}")
def test_outputs_that_are_no_numbers_give_no_value_instead_of_an_error(task):
    found = make_predictions(task, counts=(10, 10))
    found.outputs[:, 3] = torch.nan
    for record in metric_records(measure(metrics_of(task, tuple(_defined(task))), found), [0, 1], 2).values():
        assert record.value is None or np.isfinite(record.value)


def test_a_value_without_denominator_or_without_end_is_undefined():
    rmse, r2 = find_metric("rmse"), find_metric("r2")
    assert rmse.value(0, 0) is None
    assert rmse.value(float("inf"), 2) is None
    assert rmse.value(float("nan"), 2) is None
    assert rmse.value(18, 2) == 3
    assert r2.value(1, 4) == 0.75
    assert r2.value(3, 2) == -0.5
    assert isinstance(rmse.value(18.0, 2.0), float)


def test_directions():
    higher = {"accuracy", "balanced_accuracy", "f1", "auc", "r2"}
    assert {name for name, metric in METRICS.items() if metric.higher_is_better} == higher
    for name, metric in METRICS.items():
        assert metric.better(2, 1) == (name in higher)
        assert metric.better(1, 2) == (name not in higher)
        assert not metric.better(1, 1)


def test_values_are_shown_in_per_cent_where_that_is_usual():
    assert find_metric("auc").shown(0.8768) == "87.7"
    assert find_metric("rmse").shown(12.345) == "12.3"
    assert find_metric("log_loss").shown(0.012345) == "0.0123"


def test_the_worst_tenth_is_worst_in_the_direction_of_the_metric():
    # Eleven clients with one sample each, and errors 0, 1, …, 10: the two worst of them have 9 and 10.
    sums = np.stack([np.arange(11.0) ** 2, np.ones(11)], -1)[:, None].repeat(3, axis=1)
    assert metric_record(find_metric("rmse"), sums, range(11), 11).worst_tenth == pytest.approx(9.5)
    assert metric_record(find_metric("r2"), sums, range(11), 11).worst_tenth == pytest.approx(1 - (100 + 81) / 2)


def test_the_metrics_of_a_task_come_first_and_each_once():
    found = metrics_of(Task("binary", 2), ("brier", "accuracy", "f1", "brier"))
    assert [metric.name for metric in found] == ["accuracy", "auc", "brier", "f1"]
    assert [metric.name for metric in metrics_of(Task("count"))] == ["deviance", "rmse"]


def test_unknown_and_unsuitable_metrics_are_refused():
    with pytest.raises(BadInput, match="metric 'precision' is unknown; valid are accuracy, balanced_accuracy, f1"):
        find_metric("precision")
    message = "--metrics auc is not defined for the task regression; valid are mae, rmse, r2."
    with pytest.raises(BadInput, match=message):
        metrics_of(Task("regression"), ("auc",))


def test_outputs_for_classes_that_do_not_occur_count_as_predictions_but_not_as_classes():
    # Three outputs for two classes; the second sample is predicted as the third class.
    outputs = torch.tensor([[[2.0, 0.0, 0.0], [0.0, 0.0, 3.0], [0.0, 1.0, 0.0], [0.0, 2.0, 0.0]]]).double()
    found = Predictions(Task("binary", 2), outputs, torch.tensor([[0, 0, 1, 1]]), torch.ones(1, 4) > 0)
    sums = measure([find_metric(name) for name in ("accuracy", "balanced_accuracy", "auc", "log_loss")], found)
    records = metric_records(sums, [0], 1)
    assert records["accuracy"].value == 0.75
    assert records["balanced_accuracy"].value == 0.75
    probabilities = torch.softmax(outputs[0], -1)
    likely = probabilities[torch.arange(4), found.target[0]]
    assert records["log_loss"].value == pytest.approx(float(-likely.log().mean()))
    assert records["auc"].value == 1.0
