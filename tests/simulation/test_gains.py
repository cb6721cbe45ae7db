"""Gains of single clients: numbers computed by hand, and conclusions on constructed cases."""

import numpy as np
import pytest
import torch
from scipy import stats

from fedrema.simulation.gains import compare_models
from fedrema.simulation.metric_intervals import metric_intervals
from fedrema.tasks import METRICS, Predictions
from tests.simulation.samples import CASES, labelled, numbers, of_class, predictions, scored


def gains(metric, pairs):
    named = {f"site {place}": pair for place, pair in enumerate(pairs)}
    return compare_models(METRICS[metric], named).clients


def absolute(errors):
    """Return predictions with these absolute errors, and those with none."""
    zeros = np.zeros(len(errors))
    return numbers(zeros, zeros), numbers(errors, zeros)


@pytest.mark.parametrize(("task", "name"), CASES)
def test_values_are_those_of_the_metric_and_the_gain_is_their_difference(task, name):
    metric, mine, theirs = METRICS[name], predictions(task, seed=1), predictions(task, seed=2)
    (found,) = gains(name, [(mine, theirs)])
    values = [metric.value(*(float(part[0]) for part in metric.quotients(each))) for each in (mine, theirs)]
    assert (found.value, found.baseline, found.samples) == (*values, 25)
    assert found.gain == pytest.approx((values[0] - values[1]) * (1 if metric.higher_is_better else -1), abs=1e-12)


@pytest.mark.parametrize(("task", "name"), CASES)
def test_sums_over_samples_give_additive_metrics(task, name):
    """A metric whose numerators are no sums over samples must not be listed as additive."""
    metric, model = METRICS[name], predictions(task)
    first, second = (
        Predictions(model.task, model.outputs[:, half], model.target[:, half], model.mask[:, half])
        for half in (slice(0, 10), slice(10, None))
    )
    parts = [torch.stack(metric.quotients(each)) for each in (first, second)]
    if metric.is_mean_over_samples:
        assert torch.allclose(parts[0] + parts[1], torch.stack(metric.quotients(model)))


def test_the_standard_deviation_is_at_least_that_of_the_federation():
    quiet, loud = np.tile([1.0, 1.2], 10), np.tile([-3.0, 3.0], 50)
    # Row gains of the quiet client: mean 1.1, standard deviation √(20 · 0.01 / 19). Together: √((0.2 + 900) / 118).
    first, second = gains("mae", [absolute(quiet), (absolute(loud + 3)[0], absolute(loud + 3)[1])])
    pooled = np.sqrt((20 * 0.01 + 100 * 9) / (19 + 99))
    half = stats.t.ppf(0.975, 19) * pooled / np.sqrt(20)
    assert (first.gain, first.low, first.high) == pytest.approx((1.1, 1.1 - half, 1.1 + half))
    assert first.conclusion == "no difference shown"
    half = stats.t.ppf(0.975, 99) * 3 * np.sqrt(100 / 99) / 10
    assert (second.low, second.high) == pytest.approx((3 - half, 3 + half))
    assert second.conclusion == "gain"
    assert second.spread == pytest.approx(3 * np.sqrt(100 / 99) / pooled)


def test_conclusions_need_ten_samples_and_a_hundred_degrees_of_freedom():
    errors = np.tile([1.0, 1.4, 1.2], 34)
    nine, ten, rest = errors[:9], errors[:10], errors[:92]
    assert [each.conclusion for each in gains("mae", [absolute(ten), absolute(rest)])] == ["gain", "gain"]  # 9 + 91
    few = gains("mae", [absolute(ten), absolute(rest[:91])])
    assert [each.conclusion for each in few] == ["too few samples"] * 2
    assert [each.low for each in few] == [None, None]
    assert gains("mae", [absolute(nine), absolute(errors)])[0].conclusion == "too few samples"


def test_rows_without_variation_show_nothing():
    same, varied = np.full(10, 0.5), np.tile([-1.0, 1.0], 60)
    assert gains("mae", [absolute(same), absolute(varied + 1)])[0].conclusion == "no difference shown"
    assert [each.conclusion for each in gains("mae", [absolute(np.full(150, 0.5))])] == ["no difference shown"]


def test_rmse_is_judged_by_squared_errors():
    # Squared errors of the baseline are 1, 4 and 7 (mean 4), those of the model 0.25, 1 and 1.75: a quarter of them.
    errors = np.sqrt(np.tile([1.0, 4.0, 7.0], 40))
    zeros = np.zeros(120)
    (found,) = gains("rmse", [(numbers(errors / 2, zeros), numbers(errors, zeros))])
    assert (found.value, found.baseline, found.gain) == pytest.approx((1, 2, 1))
    half = stats.t.ppf(0.975, 119) * 0.75 * np.sqrt(6 * 120 / 119) / np.sqrt(120)
    assert (found.low, found.high) == pytest.approx(((3 - half) / 3, (3 + half) / 3))
    assert found.conclusion == "gain"


def accuracy(mine, theirs, count):
    (found,) = gains("accuracy", [(of_class(mine, count), of_class(theirs, count))])
    return found


def test_accuracy_in_a_small_federation_has_mcnemars_exact_test():
    assert accuracy(range(10), [], 10).conclusion == "gain"
    assert accuracy([], range(10), 10).conclusion == "loss"
    assert accuracy(range(9), [], 9).conclusion == "too few samples"
    assert accuracy(range(20), range(15), 40).conclusion == "no difference shown"  # p = 2 · 0.5⁵ = 0.0625
    assert accuracy(range(21), range(15), 40).conclusion == "gain"  # p = 2 · 0.5⁶ = 0.031
    # The t interval excludes zero, 10 ± 8.9 of 13 rows gained: 11 against 2 has p = 0.022, 10 against 3 has 0.092.
    assert accuracy(range(11), range(11, 13), 13).conclusion == "gain"
    found = accuracy(range(10), range(10, 13), 13)
    assert (found.conclusion, found.low <= 0 <= found.high) == ("no difference shown", True)
    assert accuracy(range(5), range(5), 40).conclusion == "no difference shown"


def exact_rate(samples, differing):
    """Return the probability of a false conclusion when each of some rows is gained or lost with probability ½."""
    rate = 0.0
    for gained in range(differing + 1):
        found = accuracy(range(gained), range(gained, differing), samples)
        rate += stats.binom.pmf(gained, differing, 0.5) * (found.conclusion in ("gain", "loss"))
    return rate


@pytest.mark.parametrize("samples", [10, 13, 20, 50])
def test_false_conclusions_on_accuracy_in_a_small_federation_by_enumeration(samples):
    rates = [exact_rate(samples, differing) for differing in range(samples + 1)]
    assert max(rates) <= 0.05
    assert max(rates) > 0.01


def test_balanced_accuracy_is_a_mean_over_classes_with_welchs_degrees_of_freedom():
    target = np.repeat([0, 1], [110, 120])
    right = np.concatenate([np.arange(110) < 55, np.arange(120) < 90])  # gains of ½ and ¾ over a model that errs
    mine, theirs = (labelled(np.stack([np.where(flags, 1 - target, target), np.where(flags, target, 1 - target)], -1),
                             target) for flags in (right, np.zeros(230, bool)))  # fmt: skip
    (found,) = gains("balanced_accuracy", [(mine, theirs)])
    squares = np.array([0.25 / 109, 0.1875 / 119]) / 4  # variance with ddof 1, / rows, / classes²
    freedom = squares.sum() ** 2 / (squares**2 / [109, 119]).sum()
    half = stats.t.ppf(0.975, freedom) * np.sqrt(squares.sum())
    assert (found.gain, found.low, found.high) == pytest.approx((0.625, 0.625 - half, 0.625 + half))
    assert (found.conclusion, found.events) == ("gain", 110)


def test_one_of_two_classes_allows_no_conclusion_on_balanced_accuracy():
    both, one = of_class(range(0, 240, 3), 240), labelled(np.eye(2)[np.zeros(30, int)], np.zeros(30, int))
    wrong = labelled(one.outputs[0].flip(-1), one.target[0])
    found = gains("balanced_accuracy", [(both, of_class([], 240)), (one, wrong)])
    assert [(each.conclusion, each.events) for each in found] == [("gain", 120), ("too few samples", 0)]
    assert found[1].gain == 1


def test_classes_with_few_rows_allow_no_conclusion():
    target = np.array([1] * 4 + [0] * 120)
    mine, theirs = scored(np.where(target, 2.0, -2.0), target), scored(np.zeros(124), target)
    for metric in ("auc", "balanced_accuracy", "log_loss", "accuracy", "brier"):  # 3 % are positive: rare
        (found,) = gains(metric, [(mine, theirs)])
        assert (found.conclusion, found.low, found.events) == ("too few samples", None, 4), metric
        assert found.gain is not None
    # Where the federation has enough, a client without the rare outcome still has none to judge by.
    more = np.array([1] * 8 + [0] * 92)
    pairs = [(scored(np.where(each, 2.0, -2.0) + np.arange(len(each)) / 1000, each), scored(np.zeros(len(each)), each))
             for each in (more, np.zeros(60, int))]  # fmt: skip
    first, second = gains("log_loss", pairs)
    assert (first.conclusion, first.events) == ("gain", 8)
    assert (second.conclusion, second.events) == ("too few samples", 0)


def test_with_fewer_than_ten_rare_rows_in_the_federation_there_is_no_mean_gain():
    def of(positives):
        target = np.array([1] * positives + [0] * 120)
        pair = scored(np.where(target, 2.0, -2.0), target), scored(np.zeros(len(target)), target)
        return compare_models(METRICS["log_loss"], {"a": pair}).mean.mean

    assert of(9) is None
    assert of(10) > 0


@pytest.mark.parametrize("metric", ["f1", "r2", "calibration_error"])
def test_metrics_without_a_valid_test_have_no_conclusion(metric):
    task = "regression" if metric == "r2" else "multiclass"
    (found,) = gains(metric, [(predictions(task, 200, seed=1), predictions(task, 200, seed=2))])
    assert (found.conclusion, found.low, found.high) == ("not tested", None, None)
    assert found.gain is not None


def test_the_same_model_twice_has_no_difference_in_any_metric():
    for task, name in CASES:
        (found,) = gains(name, [(predictions(task, 600), predictions(task, 600))])
        assert found.gain == 0
        assert found.conclusion in ("no difference shown", "not tested"), name
        assert found.low is None or found.low <= 0 <= found.high


def test_no_samples_no_predictions_and_a_diverged_model():
    pair = of_class([], 0), of_class([], 0)
    outputs = torch.full((1, 120, 2), torch.nan, dtype=torch.float64)
    broken = Predictions(of_class([], 120).task, outputs, of_class([], 120).target, of_class([], 120).mask)
    found = compare_models(
        METRICS["log_loss"], {"a": pair, "b": None, "c": (broken, scored(np.zeros(120), [0, 1] * 60))}
    )
    assert [each.conclusion for each in found.clients] == ["too few samples"] * 3
    assert [each.gain for each in found.clients] == [None] * 3
    assert found.mean.mean is None


def test_results_depend_on_the_clients_name_and_not_on_its_place():
    rows = np.random.default_rng(0)
    pairs = {
        name: (scored(rows.normal(size=80), [0, 1] * 40), scored(rows.normal(size=80), [0, 1] * 40)) for name in "ab"
    }
    found = dict(zip("ab", compare_models(METRICS["auc"], pairs).clients, strict=True))
    back = dict(zip("ba", compare_models(METRICS["auc"], dict(reversed(pairs.items()))).clients, strict=True))
    assert found == back
    renamed = compare_models(METRICS["auc"], {"other": pairs["a"]}).clients[0]
    assert renamed.p != found["a"].p
    assert renamed.p == pytest.approx(found["a"].p, abs=0.08)


def test_intervals_of_a_metric_for_the_model_card():
    metric = METRICS["accuracy"]
    assert metric_intervals(metric, [of_class(range(10), 10), of_class([], 9)])[1] is None
    low, high = metric_intervals(metric, [of_class(range(10), 10)])[0]
    assert (low, high) == pytest.approx((0.025 ** (1 / 10), 1))  # Clopper and Pearson's, of ten correct ones
    errors = np.tile([1.0, 3.0], 60)
    (found,) = metric_intervals(METRICS["mae"], [absolute(errors)[1]])
    half = stats.t.ppf(0.975, 119) * np.sqrt(120 / 119) / np.sqrt(120)
    assert found == pytest.approx((2 - half, 2 + half))
    (found,) = metric_intervals(METRICS["rmse"], [absolute(errors)[1]])
    half = stats.t.ppf(0.975, 119) * 4 * np.sqrt(120 / 119) / np.sqrt(120)
    assert found == pytest.approx((np.sqrt(5 - half), np.sqrt(5 + half)))
    assert metric_intervals(METRICS["mae"], [absolute(errors[:100])[1]]) == [None]
    assert metric_intervals(METRICS["f1"], [of_class(range(10), 40)]) == [None]
