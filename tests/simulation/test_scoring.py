"""Accuracies counted by hand."""

import numpy as np
import pytest
import torch

from fedrema.simulation.scoring import accuracy_record, share, summarise, tally


def test_every_second_sample_makes_a_half():
    predicted = torch.tensor([[1, 1, 0, 2, 2], [0, 3, 1, -1, -1], [-1, -1, -1, -1, -1]])
    truth = torch.tensor([[1, 0, 0, 2, 1], [0, 3, 0, 0, 0], [0, 0, 0, 0, 0]])
    correct, asked = tally(predicted, truth)
    # client 0: places 0, 2, 4 → right, right, wrong; places 1, 3 → wrong, right
    # client 1: places 0, 2 → right, wrong; place 1 → right; client 2 has no samples
    assert correct.tolist() == [[2, 1], [1, 1], [0, 0]]
    assert asked.tolist() == [[3, 2], [2, 1], [0, 0]]


def test_padding_is_never_right():
    correct, asked = tally(torch.tensor([[-1, 0]]), torch.tensor([[-1, 0]]))
    assert correct.tolist() == [[0, 1]]
    assert asked.tolist() == [[0, 1]]


def test_nothing_asked_is_no_accuracy():
    assert share(0, 0) is None
    assert share(np.int64(1), np.int64(4)) == 0.25


def test_a_round_counts_samples_and_not_clients():
    correct, asked = np.array([[2, 1], [1, 1], [0, 0]]), np.array([[3, 2], [2, 1], [0, 0]])
    record = accuracy_record(correct, asked, clients=[3, 1, 0], everyone=5)
    assert record["accuracy"] == pytest.approx(5 / 8)
    assert record["half_accuracy"] == pytest.approx([3 / 5, 2 / 3])
    # Client 0 has no test samples, clients 2 and 4 are not there.
    assert record["client_accuracy"] == [None, pytest.approx(2 / 3), None, pytest.approx(3 / 5), None]
    assert record["worst_tenth"] == pytest.approx(3 / 5)


@pytest.mark.parametrize(
    ("clients", "worst"),
    [(1, 0.0), (10, 0.0), (11, 0.5), (20, 0.5), (21, 1.0)],
)
def test_the_worst_tenth_is_rounded_up(clients, worst):
    # Client k answers k of 30 questions right, from the best to the worst.
    right = np.arange(clients)[::-1]
    record = accuracy_record(
        np.stack([right, 0 * right], 1), np.full((clients, 2), 15), list(range(clients)), everyone=clients
    )
    assert record["worst_tenth"] == pytest.approx(worst / 30)


def test_without_any_test_sample_there_is_no_accuracy():
    record = accuracy_record(np.zeros((2, 2), int), np.zeros((2, 2), int), [0, 1], 2)
    assert record == {
        "accuracy": None, "half_accuracy": [None, None], "worst_tenth": None, "client_accuracy": [None, None],
    }  # fmt: skip


def a_round(number, accuracy=None, halves=None, worst=None, **more):
    record = {"round": number, "seconds": {"train": 1.0, "evaluate": 0.25}, **more}
    if accuracy is not None:
        record |= {"accuracy": accuracy, "half_accuracy": halves or [accuracy, accuracy]}
        record["worst_tenth"] = accuracy / 2 if worst is None else worst
    return record


def test_the_honest_figure_is_chosen_on_one_half_and_scored_on_the_other():
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


def test_of_equally_good_rounds_the_first_counts():
    summary = summarise([a_round(1, 0.5, [0.5, 0.1]), a_round(2, 0.5, [0.5, 0.9]), a_round(3, 0.4, [0.2, 0.9])])
    assert summary["best_round"] == 1
    assert summary["honest_accuracy"] == pytest.approx((0.1 + 0.5) / 2)


def test_rounds_with_an_empty_half_choose_nothing():
    assert summarise([a_round(1, 0.5, [0.5, None])])["honest_accuracy"] is None
    summary = summarise([a_round(1, 0.9, [0.9, None]), a_round(2, 0.5, [0.4, 0.6])])
    assert summary["honest_accuracy"] == pytest.approx(0.5)


def test_the_final_figure_is_the_mean_of_the_last_five_scored_rounds():
    # Rounds 2, 4, … are not scored: the last five scored are 5, 7, 9, 11, 13.
    rounds = [a_round(n, n / 100 if n % 2 else None, trained_accuracy=n / 50 if n % 2 else None) for n in range(1, 15)]
    summary = summarise(rounds)
    assert summary["rounds"] == 14
    assert summary["final_accuracy"] == pytest.approx(0.09)
    assert summary["worst_tenth"] == pytest.approx(0.045)
    assert summary["final_trained_accuracy"] == pytest.approx(0.18)
    assert summary["best_round"] == 13


def test_fewer_than_five_rounds_are_all_final():
    summary = summarise([a_round(1, 0.2), a_round(2, 0.6)])
    assert summary["final_accuracy"] == pytest.approx(0.4)
    assert "final_trained_accuracy" not in summary
    assert "critical_rounds" not in summary


def test_seconds_bytes_and_critical_rounds_add_up_and_rounds_without_anyone_cost_nothing():
    rounds = [
        a_round(1, 0.2, bytes_up=10, bytes_down=30, trace={"critical": True}),
        a_round(2, 0.2),  # everybody failed
        a_round(3, 0.2, bytes_up=5, bytes_down=7, trace={"critical": True}),
        a_round(4, 0.2, bytes_up=1, bytes_down=1, trace={"critical": False}),
    ]
    summary = summarise(rounds)
    assert summary["seconds"] == {"train": 4.0, "evaluate": 1.0}
    assert summary["bytes_up"] == 16
    assert summary["bytes_down"] == 38
    assert summary["critical_rounds"] == 2


def test_no_rounds_and_rounds_without_scores_have_no_accuracy():
    assert summarise([]) == {"rounds": 0, "seconds": {}, "bytes_up": 0, "bytes_down": 0}
    unscored = {"accuracy": None, "half_accuracy": [None, None], "worst_tenth": None}
    summary = summarise([a_round(1), {**a_round(2), **unscored}])
    assert summary["rounds"] == 2
    assert not any("accuracy" in name for name in summary)
