"""Differences between AUCs: the exchange of ranks against a recomputed AUC, DeLong's variance against his formula."""

import itertools

import numpy as np
import pytest
from scipy import stats

from fedrema.simulation.auc_gains import auc_difference, exchange_p
from fedrema.simulation.gains import compare_models
from fedrema.tasks import METRICS
from tests.simulation.samples import labelled, predictions, scored


def auc(scores, target):
    """Return the AUC by counting pairs."""
    first, second = scores[target == 1], scores[target == 0]
    return ((first[:, None] > second).mean() + (first[:, None] >= second).mean()) / 2


def pair(rows, positives, seed=0, digits=1):
    generator = np.random.default_rng(seed)
    target = np.array([1] * positives + [0] * (rows - positives))
    scores = (generator.normal(size=(2, rows)) + target).round(digits)  # rounded: some are equal
    return scores, target


def macro(probabilities, target):
    classes = [label for label in range(probabilities.shape[1]) if 0 < (target == label).sum() < len(target)]
    return np.mean([auc(probabilities[:, label], (target == label) * 1) for label in classes])


def test_signs_of_weights_give_the_auc_after_exchanging_ranks():
    scores, target = pair(9, 4)
    found = auc_difference(tuple(scored(each, target) for each in scores))
    assert found.difference == pytest.approx(auc(scores[0], target) - auc(scores[1], target))
    ranks = np.array([stats.rankdata(each) for each in scores])
    for signs in itertools.product([1, -1], repeat=9):
        exchanged = np.where(np.array(signs) == 1, ranks, ranks[::-1])
        expected = auc(exchanged[0], target) - auc(exchanged[1], target)
        assert np.dot(signs, found.weights) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("task", ["multiclass", "multilabel"])
def test_several_classes_are_a_mean_over_classes(task):
    models = predictions(task, 30, seed=1), predictions(task, 30, seed=2)
    found = auc_difference(models)
    probabilities = [model.probabilities[0].numpy() for model in models]
    target = models[0].target[0].numpy()
    if task == "multiclass":
        expected = macro(probabilities[0], target) - macro(probabilities[1], target)
    else:
        first, second = (np.mean([auc(p[:, label], target[:, label]) for label in range(3)]) for p in probabilities)
        expected = first - second
    assert found.difference == pytest.approx(expected)
    assert found.weights.sum() == pytest.approx(expected)


def test_the_variance_is_delongs():
    scores, target = pair(25, 10)
    found = auc_difference(tuple(scored(each, target) for each in scores))
    wins = [
        (s[target == 1][:, None] > s[target == 0]) + 0.5 * (s[target == 1][:, None] == s[target == 0]) for s in scores
    ]
    difference = wins[0] - wins[1]
    expected = difference.mean(axis=1).var(ddof=1) / 10 + difference.mean(axis=0).var(ddof=1) / 15
    assert found.variance == pytest.approx(expected)
    first, second = difference.mean(axis=1).var(ddof=1) / 10, difference.mean(axis=0).var(ddof=1) / 15
    assert found.freedom == pytest.approx((first + second) ** 2 / (first**2 / 9 + second**2 / 14))
    assert found.fewest == 10


def test_the_p_value_counts_permutations_that_differ_as_much():
    scores, target = pair(10, 5, seed=3)
    found = auc_difference(tuple(scored(each, target) for each in scores))
    every = np.array(list(itertools.product([1, -1], repeat=10))) @ found.weights
    exact = (np.abs(every) >= abs(found.difference) - 1e-12).mean()
    assert exchange_p(found, "a") == pytest.approx(exact, abs=0.05)
    assert exchange_p(found, "a") == exchange_p(found, "a")


def test_the_p_value_does_not_depend_on_how_many_signs_are_drawn_at_once():
    scores, target = pair(3000, 1500)
    found = auc_difference(tuple(scored(each, target) for each in scores))
    assert 0.001 <= exchange_p(found, "a") <= 1


def test_the_interval_is_delongs_and_the_conclusion_is_of_the_exchange():
    generator, target = np.random.default_rng(0), np.array([1] * 20 + [0] * 40)
    good, bad = generator.normal(size=60) + 4 * target, generator.normal(size=60)
    (gain,) = compare_models(METRICS["auc"], {"a": (scored(good, target), scored(bad, target))}).clients
    found = auc_difference((scored(good, target), scored(bad, target)))
    half = stats.t.ppf(0.975, found.freedom) * np.sqrt(found.variance)
    assert (gain.low, gain.high) == pytest.approx((gain.gain - half, min(1, gain.gain + half)))
    assert (gain.conclusion, gain.p, gain.events) == ("gain", 0.001, 20)
    (back,) = compare_models(METRICS["auc"], {"a": (scored(bad, target), scored(good, target))}).clients
    assert (back.conclusion, back.p) == ("loss", 0.001)


def test_a_conclusion_needs_the_interval_too():
    found = []
    for seed in range(200):
        (scores, target) = pair(30, 6, seed, digits=3)
        (gain,) = compare_models(METRICS["auc"], {"a": tuple(scored(each, target) for each in scores)}).clients
        excludes_zero = gain.low > 0 or gain.high < 0
        assert (gain.conclusion in ("gain", "loss")) == (excludes_zero and gain.p <= 0.05)
        found.append((excludes_zero, gain.p <= 0.05))
    assert (False, True) in found


def test_one_outcome_only_has_no_auc():
    one = scored(np.arange(20.0), np.zeros(20, int))
    assert np.isnan(auc_difference((one, one)).difference)
    (gain,) = compare_models(METRICS["auc"], {"a": (one, one)}).clients
    assert (gain.value, gain.gain, gain.low, gain.conclusion) == (None, None, None, "too few samples")


def test_a_class_with_few_rows_allows_no_conclusion_and_an_absent_one_does_not_count():
    generator = np.random.default_rng(0)
    outputs = generator.normal(size=(2, 60, 4))
    for few, expected in ((4, "too few samples"), (5, "no difference shown")):
        target = np.array([0] * 30 + [1] * (30 - few) + [2] * few)  # class 3 does not occur
        models = tuple(labelled(each, target, "multiclass") for each in outputs)
        (gain,) = compare_models(METRICS["auc"], {"a": models}).clients
        assert (gain.conclusion, gain.events) == (expected, few)
