"""Paired bootstrap intervals: against a loop in plain Python, against scipy, and conclusions on constructed cases."""

import numpy as np
import pytest
import torch
from scipy import stats

from fedrema.base.random import numpy_generator
from fedrema.simulation import bootstrap
from fedrema.simulation.bootstrap import RESAMPLES, mean_interval, paired_gains
from fedrema.tasks import METRICS, TASKS, Predictions, Task

SIZES = {"binary": 2, "multiclass": 4, "multilabel": 3, "ordinal": 4, "regression": 1, "count": 1}
CASES = [(task, metric.name) for task in TASKS for metric in METRICS.values() if task in metric.tasks]


def predictions(task, samples=25, seed=0):
    """Return random predictions of one client, and its targets, which do not depend on the seed."""
    classes = SIZES[task]
    described = Task(task, classes, centre=2.0 if task in ("regression", "count") else 0.0)
    truth, generator = np.random.default_rng(99), np.random.default_rng(seed)
    target = {
        "multilabel": lambda: truth.integers(0, 2, (samples, classes)),
        "regression": lambda: truth.normal(size=samples),
        "count": lambda: truth.poisson(2.0, samples),
    }.get(task, lambda: truth.integers(0, classes, samples))()
    outputs = torch.from_numpy(generator.normal(size=(samples, described.outputs)))
    return Predictions(described, outputs[None], torch.from_numpy(target)[None], torch.ones(1, samples, dtype=bool))


def of_class(right, total, samples=None):
    """Return predictions of a two-class task in which the given samples are right; all targets are 0."""
    correct = np.zeros(total, bool)
    correct[right] = True
    outputs = torch.from_numpy(np.stack([correct, ~correct], -1).astype(np.float64))
    target = torch.zeros(total, dtype=torch.long)
    return Predictions(Task("binary", 2), outputs[None], target[None], torch.ones(1, total, dtype=bool))


def naive(metric, mine, theirs, *key):
    """Return gain and interval by a loop over resamples."""
    samples = mine.outputs.shape[1]
    index = numpy_generator("verdict", *key).integers(0, samples, (RESAMPLES, samples))

    def value(model, chosen):
        chosen = torch.as_tensor(chosen)
        drawn = Predictions(model.task, model.outputs[:, chosen], model.target[:, chosen], model.mask[:, chosen])
        found = metric.value(*(float(part[0]) for part in metric.quotients(drawn)))
        return np.nan if found is None else found

    sign = 1 if metric.higher_is_better else -1
    gains = [sign * (value(mine, each) - value(theirs, each)) for each in index[:200]]
    everything = np.arange(samples)
    return sign * (value(mine, everything) - value(theirs, everything)), gains


@pytest.mark.parametrize(("task", "name"), CASES)
def test_gains_agree_with_a_loop_over_resamples(task, name, monkeypatch):
    monkeypatch.setattr(bootstrap, "RESAMPLES", 200)
    metric, mine, theirs = METRICS[name], predictions(task, seed=1), predictions(task, seed=2)
    gain, resampled = naive(metric, mine, theirs, "client", "north")
    (found,) = paired_gains(metric, [mine], theirs, "client", "north")
    assert found.gain == pytest.approx(gain, abs=1e-12)
    assert (found.low, found.high) == pytest.approx(tuple(np.nanquantile(resampled, [0.025, 0.975])), abs=1e-9)
    assert found.samples == 25


@pytest.mark.parametrize(("task", "name"), CASES)
def test_sums_over_samples_give_additive_metrics(task, name):
    """A metric whose numerators are no sums over samples must not be listed as additive."""
    metric, model = METRICS[name], predictions(task)
    samples = bootstrap._per_sample(metric, model).sum(axis=1)
    whole = torch.stack(metric.quotients(model))[:, 0].numpy()
    if metric.is_mean_over_samples:
        np.testing.assert_allclose(samples, whole)


def test_intervals_agree_with_scipy():
    generator = np.random.default_rng(0)
    mine, theirs = (of_class(np.flatnonzero(generator.random(300) < share), 300) for share in (0.8, 0.6))
    (found,) = paired_gains(METRICS["accuracy"], [mine], theirs, "client", "a")
    right = [(model.predicted == 0)[0].double().numpy() for model in (mine, theirs)]
    expected = stats.bootstrap(
        right,
        lambda first, second, axis: first.mean(axis=axis) - second.mean(axis=axis),
        n_resamples=20_000,
        paired=True,
        vectorized=True,
        method="percentile",
        rng=np.random.default_rng(1),
    ).confidence_interval
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=0.01)
    assert found.conclusion == "gain"


def test_an_interval_of_rmse_agrees_with_scipy():
    mine, theirs = predictions("regression", 200, seed=1), predictions("regression", 200, seed=2)
    (found,) = paired_gains(METRICS["rmse"], [mine], theirs, "client", "a")
    errors = [((model.predicted - model.target)[0]).numpy() for model in (theirs, mine)]
    expected = stats.bootstrap(
        errors,
        lambda first, second, axis: np.sqrt((first**2).mean(axis)) - np.sqrt((second**2).mean(axis)),
        n_resamples=20_000,
        paired=True,
        vectorized=True,
        method="percentile",
        rng=np.random.default_rng(1),
    ).confidence_interval
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), abs=0.02)


def conclusion(metric, mine, theirs):
    return paired_gains(METRICS[metric], [mine], theirs, "client", "x")[0].conclusion


def test_conclusions():
    half, more = of_class(range(20), 40), of_class(range(35), 40)
    assert conclusion("accuracy", more, half) == "gain"
    assert conclusion("accuracy", half, more) == "loss"
    assert conclusion("log_loss", more, half) == "gain"  # lower is better
    assert conclusion("accuracy", half, half) == "no difference shown"
    assert conclusion("accuracy", of_class(range(21), 40), half) == "no difference shown"
    assert conclusion("accuracy", of_class(range(9), 9), of_class([], 9)) == "too few samples"
    assert conclusion("accuracy", of_class(range(10), 10), of_class([], 10)) == "gain"


def test_the_same_model_twice_has_no_difference_in_any_metric():
    for task, name in CASES:
        (found,) = paired_gains(METRICS[name], [predictions(task)], predictions(task), "client", "x")
        assert (found.gain, found.low, found.high) == (0, 0, 0)
        assert found.conclusion == "no difference shown"


def test_a_metric_that_is_undefined_in_most_resamples_gives_too_few_samples():
    # All targets are 0, so that there is no pair of a positive and a negative sample.
    (found,) = paired_gains(METRICS["auc"], [of_class(range(20), 40)], of_class(range(10), 40), "client", "x")
    assert (found.value, found.gain, found.low, found.conclusion) == (None, None, None, "too few samples")
    # One positive among n samples: (1 - 1/n)^n of the resamples lack it, less than half.
    mine, theirs = predictions("binary", 30, 1), predictions("binary", 30, 2)
    target = torch.zeros(1, 30, dtype=torch.long)
    target[0, 3] = 1
    one = [Predictions(each.task, each.outputs, target, each.mask) for each in (mine, theirs)]
    assert paired_gains(METRICS["auc"], [one[0]], one[1], "client", "x")[0].low is not None


def test_no_samples_at_all():
    (found,) = paired_gains(METRICS["accuracy"], [of_class([], 0)], of_class([], 0), "client", "x")
    assert (found.samples, found.value, found.conclusion) == (0, None, "too few samples")


def test_results_depend_on_the_clients_name_only(monkeypatch):
    mine, theirs = predictions("multiclass", seed=1), predictions("multiclass", seed=2)
    metric = METRICS["log_loss"]
    (first,) = paired_gains(metric, [mine], theirs, "client", "a")
    assert paired_gains(metric, [theirs, mine], theirs, "client", "a")[1] == first
    assert paired_gains(metric, [mine], theirs, "client", "b")[0].low != first.low


def test_the_interval_of_the_mean_gain_agrees_with_scipy():
    gains = np.random.default_rng(0).normal(size=40)
    found = mean_interval(gains.tolist(), "clients")
    expected = stats.bootstrap(
        [gains], np.mean, n_resamples=20_000, method="percentile", rng=np.random.default_rng(1)
    ).confidence_interval
    assert found == pytest.approx((expected.low, expected.high), abs=0.04)
    assert mean_interval([0.5], "clients") is None


def test_the_interval_over_clients_is_deterministic_and_covers_the_mean():
    values = np.random.default_rng(1).normal(5, 2, 40).tolist()
    low, high = mean_interval(values, "clients")
    assert mean_interval(values, "clients") == (low, high)
    error = np.std(values) / np.sqrt(len(values))
    assert (low, high) == pytest.approx((np.mean(values) - 1.96 * error, np.mean(values) + 1.96 * error), abs=0.15)
    assert mean_interval([3.0, 3.0], "clients") == (3.0, 3.0)
    assert mean_interval([1.0], "clients") is None


def test_the_interval_does_not_depend_on_how_many_numbers_are_drawn_at_once(monkeypatch):
    values = [1.0, 2.0, 5.0, 9.0]
    expected = mean_interval(values, "clients")
    monkeypatch.setattr(bootstrap, "CELLS", 20)
    assert mean_interval(values, "clients") == expected
