"""The mean gain: t over clients from five on, the variation of test rows with two to four, none with one."""

import numpy as np
import pytest
from scipy import stats

from fedrema.simulation.auc_gains import auc_difference
from fedrema.simulation.gains import compare_models
from fedrema.tasks import METRICS
from tests.simulation.samples import labelled, numbers, of_class, predictions, scored


def mean_of(metric, pairs):
    return compare_models(METRICS[metric], {f"site {place}": pair for place, pair in enumerate(pairs)}).mean


def absolute(errors):
    zeros = np.zeros(len(errors))
    return numbers(zeros, zeros), numbers(errors, zeros)


def satterthwaite(gains, variances, counts):
    total = np.sum(variances)
    freedom = total**2 / np.sum(np.square(variances) / np.maximum(np.array(counts) - 1, 1))
    half = stats.t.ppf(0.975, freedom) * np.sqrt(total) / len(gains)
    return pytest.approx((np.mean(gains) - half, np.mean(gains) + half))


def test_from_five_clients_there_is_a_t_interval_over_clients():
    gains = [0.5, 1.0, 2.0, 2.5, 4.0]
    found = mean_of("mae", [absolute(np.full(place + 3, gain)) for place, gain in enumerate(gains)])
    half = 2.7764451 * np.std(gains, ddof=1) / np.sqrt(5)
    assert (found.mean, found.interval) == (2, pytest.approx((2 - half, 2 + half)))
    assert (found.scope, found.clients, found.over_clients) == ("clients like these", 5, found.interval)


def test_with_three_clients_the_interval_is_for_these():
    errors = [np.array([1.0, 2.0, 3.0]), np.array([0.0, 4.0, 0.0, 4.0, 2.0]), np.array([6.0])]
    found = mean_of("mae", [absolute(each) for each in errors])
    own = np.array([1.0, 4.0, 0.0])  # variances of the rows
    pooled = (2 * 1 + 4 * 4) / 6
    variances = (np.array([2, 4, 0]) * own + 4 * pooled) / np.array([6, 8, 4]) / np.array([3, 5, 1])
    assert found.interval == satterthwaite([2, 2, 6], variances, [3, 5, 1])
    assert (found.mean, found.scope) == (pytest.approx(10 / 3), "these clients")
    half = 4.3026527 * np.std([2, 2, 6], ddof=1) / np.sqrt(3)
    assert found.over_clients == pytest.approx((10 / 3 - half, 10 / 3 + half))


def test_accuracy_has_a_variance_also_where_no_row_differs():
    found = mean_of("accuracy", [(of_class(range(8), 10), of_class(range(2, 9), 10)), (of_class([], 5),) * 2])
    # Two rows gained, one lost, of ten; none of five.
    own = np.array([4 / 12 - (1 / 12) ** 2, 1 / 7])
    pooled = (9 * own[0] + 4 * own[1]) / 13
    variances = (np.array([9, 4]) * own + 4 * pooled) / np.array([13, 8]) / np.array([10, 5])
    assert found.interval == satterthwaite([0.1, 0.0], variances, [10, 5])
    assert found.interval[0] < 0 < found.interval[1]


def test_rmse_is_linear_in_squared_errors():
    theirs, mine = np.array([1.0, 5.0, 1.0, 5.0]), np.array([1.0, 1.0, 7.0, 7.0])
    found = mean_of("rmse", [(numbers(mine, np.zeros(4)), numbers(theirs, np.zeros(4))), absolute(np.full(8, 2.0))])
    root, other = np.sqrt(13), 5.0
    rows = theirs**2 / (2 * root) - mine**2 / (2 * other)
    own = np.array([rows.var(ddof=1), 0.0])
    pooled = 3 * own[0] / 10
    variances = (np.array([3, 7]) * own + 4 * pooled) / np.array([7, 11]) / np.array([4, 8])
    assert found.interval == satterthwaite([root - other, 2.0], variances, [4, 8])


def test_auc_has_delongs_variance():
    generator = np.random.default_rng(0)
    target = np.array([1] * 8 + [0] * 12)
    pairs = [tuple(scored(generator.normal(size=20) + target, target) for _ in range(2)) for _ in range(2)]
    single = np.array([1] + [0] * 9)  # DeLong's variance is undefined
    pairs.append(tuple(scored(generator.normal(size=10), single) for _ in range(2)))
    pairs.append((of_class([], 30), of_class([], 30)))
    pairs[-1] = tuple(scored(np.arange(9.0), np.zeros(9, int)) for _ in range(2))  # no AUC: left out
    found = mean_of("auc", pairs)
    each = [auc_difference(pair) for pair in pairs[:3]]
    variances = [each[0].variance, each[1].variance, 0.25 / 2.1]
    assert found.interval == satterthwaite([one.difference for one in each], variances, [20, 20, 10])
    assert found.clients == 3


def test_balanced_accuracy_adds_up_the_variances_of_classes():
    target = np.array([0] * 6 + [1] * 4)
    right = [np.array([1, 1, 1, 0, 0, 0, 1, 1, 0, 0], bool), np.array([0, 1, 1, 0, 0, 0, 1, 1, 0, 0], bool)]
    models = [labelled(np.stack([(target == 0) == flags, (target == 1) == flags], -1), target) for flags in right]
    found = mean_of("balanced_accuracy", [tuple(models), tuple(models)])
    one = ((2 / 8 - (1 / 8) ** 2) / 6 + (1 / 6) / 4) / 4  # one row of class 0 gained, no row of class 1
    assert found.interval == satterthwaite([1 / 12, 1 / 12], [one, one], [10, 10])


def test_one_client_and_metrics_without_a_known_variance_have_no_interval():
    found = mean_of("mae", [absolute(np.arange(5.0))])
    assert (found.mean, found.clients, found.interval, found.over_clients) == (2, 1, None, None)
    pairs = [(predictions("multiclass", 40, seed), predictions("multiclass", 40, seed + 9)) for seed in range(3)]
    found = mean_of("f1", pairs)
    assert (found.interval, found.scope) == (None, "")
    assert found.over_clients is not None
    assert mean_of("f1", pairs * 2).scope == "clients like these"
