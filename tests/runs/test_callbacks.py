"""Callbacks that receive rounds, and stop runs."""

import numpy as np
import pytest

import fedrema
from fedrema import EarlyStopping
from fedrema.simulation.records import MetricRecord, RoundRecord
from fedrema.simulation.state import Round
from tests.runs.test_execute import assert_same_result

SETTINGS = {"rounds": 6, "clients": 4, "samples": 20}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def after(last, answer=True):
    return lambda finished: answer if finished.record.round == last else None


def test_a_stopped_run_is_finished_and_can_be_resumed_bit_identically():
    stopped = fedrema.run("fedrema", out="stopped", on_round=after(2), record="relations", **SETTINGS)
    assert (stopped.finished, stopped.stopped_early, stopped.summary.rounds) == (True, True, 2)
    assert stopped.settings["rounds"] == 6
    assert len(stopped.predictions().targets) > 0
    assert sorted(stopped.relations()) == [1, 2]
    assert "2 rounds of 6, stopped early" in repr(stopped)
    whole = fedrema.run("fedrema", out="whole", record="relations", **SETTINGS)
    assert not whole.stopped_early
    assert_same_result(fedrema.resume("stopped").path, whole.path)


def test_a_run_that_is_stopped_after_its_last_round_is_not_stopped_early():
    assert not fedrema.run("local", out="run", on_round=after(6), **SETTINGS).stopped_early


def test_all_callbacks_see_the_round_that_stops_the_run():
    first, last = [], []
    callbacks = [lambda done: first.append(done.record.round), after(3, np.bool_(True))]
    fedrema.run("local", out="run", on_round=[*callbacks, lambda done: last.append(done.record.round)], **SETTINGS)
    assert first == last == [1, 2, 3]


def test_a_wrong_answer_and_a_wrong_callback_are_refused():
    with pytest.raises(fedrema.BadInput, match="on_round returned 'no' after round 2: it must return True"):
        fedrema.run("local", out="run", on_round=after(2, "no"), **SETTINGS)
    with pytest.raises(fedrema.BadInput, match="on_round=3 is invalid"):
        fedrema.run("local", out="other", on_round=3, **SETTINGS)


def test_each_run_of_a_series_counts_for_itself():
    stopping = EarlyStopping(patience=2, min_change=1.0)  # no accuracy can improve by that much
    runs = fedrema.run("local", out="series", seeds=2, on_round=stopping, **SETTINGS)
    assert [run.summary.rounds for run in runs] == [3, 3]
    comparison = fedrema.compare(runs)
    assert len(comparison.groups) == 1
    assert "Stopped early: Local, after 3 of 6 rounds." in str(comparison.table())
    assert [run.summary.rounds for run in fedrema.resume_all("series")] == [6, 6]


def rounds_until_stop(stopping, accuracies, losses=None):
    """Return how many rounds of these accuracies are seen before the stop; None: all."""
    stop = stopping.start()
    for number, accuracy in enumerate(accuracies, 1):
        metrics = {} if accuracy is None else {"accuracy": MetricRecord(accuracy)}
        loss = losses[number - 1] if losses else None
        if stop(Round(RoundRecord(number, metrics=metrics, loss=loss, trace={"gap": 0.5}))):
            return number
    return None


def test_early_stopping_waits_for_evaluated_rounds_without_improvement():
    assert rounds_until_stop(EarlyStopping(patience=2), [0.1, 0.3, 0.2, 0.3, 0.9]) == 4
    assert rounds_until_stop(EarlyStopping(patience=2), [0.1, 0.3, None, 0.2, 0.4, 0.5]) is None
    assert rounds_until_stop(EarlyStopping(patience=1, min_change=0.1), [0.1, 0.15]) == 2
    falling = EarlyStopping("loss", patience=1)
    assert rounds_until_stop(falling, [0.5] * 4, [3.0, 2.0, 1.0, 1.5]) == 4


def test_early_stopping_refuses_what_it_cannot_use():
    with pytest.raises(fedrema.BadInput, match=r"patience=0\) is invalid"):
        EarlyStopping(patience=0)
    with pytest.raises(fedrema.BadInput, match="round 1 has no such number"):
        rounds_until_stop(EarlyStopping("accuracies"), [0.5])
    with pytest.raises(fedrema.BadInput, match="set higher_is_better"):
        rounds_until_stop(EarlyStopping("gap"), [0.5])
    assert rounds_until_stop(EarlyStopping("gap", patience=1, higher_is_better=False), [0.5, 0.5]) == 2
