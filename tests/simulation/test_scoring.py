"""Metrics of rounds and runs, against numbers computed by hand."""

from dataclasses import asdict

import numpy as np
import pytest
import torch

from fedrema.simulation.records import MetricRecord, RoundRecord, Summary
from fedrema.simulation.scoring import (
    concatenate_sums,
    measure,
    measure_accuracy,
    metric_record,
    metric_records,
    overall,
    summarise,
)
from fedrema.tasks import Predictions, Task, find_metric

ACCURACY = find_metric("accuracy")
PREDICTED = torch.tensor([[1, 1, 0, 2, 2], [0, 3, 1, -1, -1], [-1, -1, -1, -1, -1]])
TRUTH = torch.tensor([[1, 0, 0, 2, 1], [0, 3, 0, 0, 0], [0, 0, 0, 0, 0]])


def sums_of(correct, samples):
    """Return numerators and denominators [k, 3, 2] from counts by half [k, 2]."""
    halves = np.stack([np.array(correct), np.array(samples)], axis=-1)
    return np.concatenate([halves, halves.sum(axis=1, keepdims=True)], axis=1)


def test_halves_consist_of_every_second_sample():
    found = measure_accuracy(PREDICTED, TRUTH)["accuracy"]
    # client 0: places 0, 2, 4 → right, right, wrong; places 1, 3 → wrong, right
    # client 1: places 0, 2 → right, wrong; place 1 → right; client 2 has no samples
    assert found[:, :, 0].tolist() == [[2, 1, 3], [1, 1, 2], [0, 0, 0]]
    assert found[:, :, 1].tolist() == [[3, 2, 5], [2, 1, 3], [0, 0, 0]]


def test_the_accuracy_from_outputs_equals_that_from_classes():
    outputs = torch.nn.functional.one_hot(PREDICTED.clamp(min=0), 4).double()
    predictions = Predictions(Task("multiclass", 4), outputs, TRUTH, PREDICTED >= 0)
    found = measure([ACCURACY], predictions)["accuracy"]
    assert (found == measure_accuracy(PREDICTED, TRUTH)["accuracy"]).all()


def test_padding_is_never_counted_as_correct():
    found = measure_accuracy(torch.tensor([[-1, 0]]), torch.tensor([[-1, 0]]))["accuracy"]
    assert found[0].tolist() == [[0, 0], [1, 1], [1, 1]]


def test_without_samples_there_is_no_accuracy():
    assert ACCURACY.value(0, 0) is None
    assert ACCURACY.value(1, 4) == 0.25
    assert overall({"accuracy": sums_of([[0, 0]], [[0, 0]])}) == {"accuracy": None}
    assert overall({"accuracy": sums_of([[1, 0], [0, 2]], [[1, 1], [3, 3]])}) == {"accuracy": 0.375}


def test_sums_of_groups_of_clients_are_joined():
    first, second = sums_of([[1, 0]], [[2, 2]]), sums_of([[0, 1]], [[1, 1]])
    joined = concatenate_sums([{"accuracy": first}, {"accuracy": second}])["accuracy"]
    assert joined[:, :2, 0].tolist() == [[1, 0], [0, 1]]
    assert joined[:, :2, 1].tolist() == [[2, 2], [1, 1]]


def test_the_accuracy_of_a_round_is_over_samples_and_not_clients():
    sums = sums_of([[2, 1], [1, 1], [0, 0]], [[3, 2], [2, 1], [0, 0]])
    record = metric_records({"accuracy": sums}, rows=[3, 1, 0], clients=5)["accuracy"]
    assert record.value == pytest.approx(5 / 8)
    assert record.halves == pytest.approx((3 / 5, 2 / 3))
    # Client 0 has no test samples, clients 2 and 4 have not joined.
    assert record.clients == [None, pytest.approx(2 / 3), None, pytest.approx(3 / 5), None]
    assert record.worst_tenth == pytest.approx(3 / 5)


@pytest.mark.parametrize(
    ("clients", "worst"),
    [(1, 0.0), (10, 0.0), (11, 0.5), (20, 0.5), (21, 1.0)],
)
def test_the_worst_tenth_is_rounded_up(clients, worst):
    # Client k classifies k of 30 samples correctly, from the best to the worst.
    right = np.arange(clients)[::-1]
    sums = sums_of(np.stack([right, 0 * right], 1), np.full((clients, 2), 15))
    record = metric_record(ACCURACY, sums, range(clients), clients)
    assert record.worst_tenth == pytest.approx(worst / 30)


def test_the_worst_tenth_of_an_error_has_the_highest_values():
    # Twenty clients with one sample per half and absolute errors 0, 1, …, 19: the two worst have 18 and 19.
    error = np.arange(20.0)
    sums = sums_of(np.stack([error, error], 1), np.ones((20, 2)))
    assert metric_record(find_metric("mae"), sums, range(20), 20).worst_tenth == pytest.approx(18.5)
    assert metric_record(ACCURACY, sums, range(20), 20).worst_tenth == pytest.approx(0.5)


def test_without_any_test_sample_there_is_no_accuracy():
    record = metric_record(ACCURACY, sums_of(np.zeros((2, 2), int), np.zeros((2, 2), int)), [0, 1], 2)
    assert record == MetricRecord(None, (None, None), None, [None, None])


def a_round(number, accuracy=None, halves=None, trained=None, **more):
    metrics = {}
    if accuracy is not None:
        metrics["accuracy"] = MetricRecord(accuracy, tuple(halves or (accuracy, accuracy)), accuracy / 2)
    more["trained"] = {} if trained is None else {"accuracy": MetricRecord(trained)}
    return RoundRecord(number, metrics=metrics, seconds={"train": 1.0, "evaluate": 0.25}, **more)


def test_honest_accuracy_is_chosen_on_one_half_and_scored_on_the_other():
    rounds = [
        a_round(1, 0.50, [0.7, 0.3]),
        a_round(2, 0.65, [0.5, 0.8]),
        a_round(3, 0.60, [0.6, 0.6]),
    ]
    summary = summarise(rounds)
    assert summary["best_accuracy"] == 0.65
    assert summary["best_round"] == 2
    # Half 0 chooses round 1 (scores 0.3 on half 1), half 1 chooses round 2 (scores 0.5 on half 0).
    assert summary["honest_accuracy"] == pytest.approx((0.3 + 0.5) / 2)


def error_round(number, error, halves, worst=None, trained=None, alternative=None):
    """Return the record of a round in which RMSE is the primary metric and R² the second."""
    r2 = 1 - error**2
    metrics = {
        "rmse": MetricRecord(error, halves, worst if worst is not None else 2 * error),
        "r2": MetricRecord(r2, (1 - halves[0] ** 2, 1 - halves[1] ** 2), r2 - 0.1),
    }
    return RoundRecord(
        number,
        metrics=metrics,
        trained={} if trained is None else {"rmse": MetricRecord(trained)},
        alternatives={} if alternative is None else {"generic": {"rmse": alternative, "r2": -alternative}},
        seconds={"train": 1.0},
    )


def test_the_best_and_the_honest_error_are_the_lowest():
    rounds = [
        error_round(1, 0.50, (0.7, 0.3), trained=0.4, alternative=0.9),
        error_round(2, 0.35, (0.5, 0.2), trained=0.2, alternative=0.6),
        error_round(3, 0.40, (0.4, 0.4), trained=0.3, alternative=0.8),
    ]
    summary = summarise(rounds)
    assert summary.primary == "rmse"
    assert (summary["best_rmse"], summary["best_round"]) == (0.35, 2)
    # Half 0 chooses round 3 (0.4 on half 1), half 1 chooses round 2 (0.5 on half 0).
    assert summary["honest_rmse"] == pytest.approx((0.4 + 0.5) / 2)
    assert summary["final_rmse"] == pytest.approx((0.50 + 0.35 + 0.40) / 3)
    assert summary["worst_tenth"] == pytest.approx(2 * (0.50 + 0.35 + 0.40) / 3)
    assert summary["final_trained_rmse"] == pytest.approx(0.3)
    # R² is better if it is higher, so the same rounds are chosen.
    assert (summary["best_r2"], summary["best_round_r2"]) == (pytest.approx(1 - 0.35**2), 2)
    assert summary["honest_r2"] == pytest.approx(1 - (0.4**2 + 0.5**2) / 2)
    assert summary["worst_tenth_r2"] == pytest.approx(0.9 - (0.50**2 + 0.35**2 + 0.40**2) / 3)
    # Other ways of scoring: the lowest error and the highest R².
    assert summary["best_generic_rmse"] == 0.6
    assert summary["best_generic_r2"] == -0.6
    assert summary["final_generic_rmse"] == pytest.approx(2.3 / 3)


def test_a_summary_of_several_metrics_is_read_back_as_it_was_written():
    summary = summarise([error_round(1, 0.5, (0.7, 0.3), trained=0.4, alternative=0.9)])
    content = summary.as_json()
    read = Summary.from_json(content)
    assert read.primary == "rmse"
    assert asdict(read) == asdict(summary)
    assert list(read.as_json()) == list(content)


def test_a_metric_whose_name_ends_like_another_is_read_back():
    scores = {"accuracy": MetricRecord(0.5, (0.5, 0.5), 0.2), "balanced_accuracy": MetricRecord(0.4, (0.4, 0.4), 0.1)}
    generic = {"generic": {"accuracy": 0.3, "balanced_accuracy": 0.2}}
    summary = summarise([RoundRecord(1, metrics=scores, trained=scores, alternatives=generic)])
    assert asdict(Summary.from_json(summary.as_json())) == asdict(summary)


def test_quantities_of_several_metrics_are_found_by_name():
    record = error_round(1, 0.5, (0.7, 0.3), worst=0.8, trained=0.4)
    names = ("rmse", "r2", "worst_tenth", "trained_rmse", "accuracy")
    assert [record.quantity(name) for name in names] == [0.5, 0.75, 0.8, 0.4, None]
    assert record.accuracy is None
    assert record.client_accuracy is None


def test_of_equally_good_rounds_the_first_is_chosen():
    summary = summarise([a_round(1, 0.5, [0.5, 0.1]), a_round(2, 0.5, [0.5, 0.9]), a_round(3, 0.4, [0.2, 0.9])])
    assert summary["best_round"] == 1
    assert summary["honest_accuracy"] == pytest.approx((0.1 + 0.5) / 2)


def test_rounds_with_an_empty_half_are_not_chosen():
    assert summarise([a_round(1, 0.5, [0.5, None])])["honest_accuracy"] is None
    summary = summarise([a_round(1, 0.9, [0.9, None]), a_round(2, 0.5, [0.4, 0.6])])
    assert summary["honest_accuracy"] == pytest.approx(0.5)


def test_final_accuracy_is_the_mean_of_the_last_five_scored_rounds():
    # Rounds 2, 4, … are not scored: the last five scored are 5, 7, 9, 11, 13.
    rounds = [a_round(n, n / 100 if n % 2 else None, trained=n / 50 if n % 2 else None) for n in range(1, 15)]
    summary = summarise(rounds)
    assert summary["rounds"] == 14
    assert summary["final_accuracy"] == pytest.approx(0.09)
    assert summary["worst_tenth"] == pytest.approx(0.045)
    assert summary["final_trained_accuracy"] == pytest.approx(0.18)
    assert summary["best_round"] == 13


def test_final_accuracy_of_fewer_than_five_rounds_is_the_mean_of_all():
    summary = summarise([a_round(1, 0.2), a_round(2, 0.6)])
    assert summary["final_accuracy"] == pytest.approx(0.4)
    assert "final_trained_accuracy" not in summary
    assert "critical_rounds" not in summary


def test_seconds_bytes_and_critical_rounds_are_summed_and_rounds_without_participants_have_no_bytes():
    rounds = [
        a_round(1, 0.2, bytes_up=10, bytes_down=30, trace={"critical": True}),
        a_round(2, 0.2),  # all clients failed
        a_round(3, 0.2, bytes_up=5, bytes_down=7, trace={"critical": True}),
        a_round(4, 0.2, bytes_up=1, bytes_down=1, trace={"critical": False}),
    ]
    summary = summarise(rounds, period="critical")
    assert summary["seconds"] == {"train": 4.0, "evaluate": 1.0}
    assert summary["bytes_up"] == 16
    assert summary["bytes_down"] == 38
    assert summary["critical_rounds"] == 2
    assert "critical_rounds" not in summarise(rounds)  # the method declares no period


def test_other_ways_of_scoring_are_summarised_in_addition_to_the_metric():
    rounds = [a_round(n, n / 10, alternatives={"unadapted": {"accuracy": n / 20}}) for n in (1, 3, 2)]
    summary = summarise(rounds)
    assert summary["best_unadapted_accuracy"] == pytest.approx(0.15)
    assert summary["final_unadapted_accuracy"] == pytest.approx(0.1)


def test_a_summary_is_read_back_as_it_was_written():
    trace = {"critical": True}
    rounds = [
        a_round(n, n / 10, trained=n / 20, alternatives={"unadapted": {"accuracy": n / 30}}, bytes_up=n, trace=trace)
        for n in (1, 2)
    ]
    for records in (rounds, rounds[:1], [a_round(1)], []):
        summary = summarise(records, period="critical")
        content = summary.as_json()
        assert content == summary
        assert Summary.from_json(content).as_json() == content
        assert asdict(Summary.from_json(content)) == asdict(summary)


def test_quantities_of_a_round_are_found_by_name():
    record = a_round(3, 0.5, trained=0.4, trace={"mean_gap": 0.1}, loss=1.5)
    names = ("round", "accuracy", "worst_tenth", "trained_accuracy", "mean_gap", "loss", "nonsense")
    assert [record.quantity(name) for name in names] == [3, 0.5, 0.25, 0.4, 0.1, 1.5, None]
    assert record["accuracy"] == 0.5
    assert record["client_accuracy"] == []
    with pytest.raises(KeyError):
        record["nonsense"]
    assert "accuracy" not in a_round(4)


def test_no_rounds_and_rounds_without_scores_have_no_accuracy():
    assert summarise([]) == {"rounds": 0, "seconds": {}, "bytes_up": 0, "bytes_down": 0}
    unscored = RoundRecord(2, metrics={"accuracy": MetricRecord(None)}, seconds={"train": 1.0, "evaluate": 0.25})
    summary = summarise([a_round(1), unscored])
    assert summary["rounds"] == 2
    assert not any("accuracy" in name for name in summary)
