"""A failed round leaves the state as it was, also if it fails while it is scored; traces need names of their own."""

import copy
from dataclasses import dataclass, fields
from typing import ClassVar

import pytest
import torch

import fedrema
from fedrema.core import LocalTraining
from fedrema.methods import find_method
from fedrema.simulation.records import RoundRecord
from fedrema.tasks import METRICS
from tests.fixtures import make_federation, make_simulator

FAILING: list[int] = []
"""Rounds in which scoring fails, once each."""


def fail(moment, error=RuntimeError):
    if moment.round in FAILING:
        FAILING.remove(moment.round)
        raise error("The scores cannot be computed.")


def failing(name):
    """Return a method whose scoring fails in the rounds in `FAILING`."""
    kind = find_method(name)

    def ready(self, net, client, data, moment):
        fail(moment)
        return kind.ready(self, net, client, data, moment)

    return dataclass(frozen=True)(type("Failing", (kind,), {"ready": ready, "__annotations__": {}}))()


def tensors(state):
    """Return a copy of everything in a state."""
    groups = {
        "own": state.params.own,
        "common": state.params.common,
        "memory": state.memory,
        "inbox": state.inbox.own,
        "sent": state.inbox.common,
        "velocity": state.velocity,
        "server": state.server,
        "privacy": state.privacy,
    }
    return copy.deepcopy({**groups, "round": state.round})


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, group in expected.items():
        if isinstance(group, dict):
            assert_equal(found[name], group)
        elif isinstance(group, torch.Tensor):
            assert torch.equal(found[name], group), name
        else:
            assert found[name] == group, name


CASES = {
    "late clients": {"participation": 0.7, "late": 0.4, "late_round": 3},
    "momentum": {"local": LocalTraining(epochs=1, batch=4, lr=0.1, momentum=0.9, keep_momentum=True)},
    "momentum of some": {
        "local": LocalTraining(epochs=1, batch=4, lr=0.1, momentum=0.9, keep_momentum=True),
        "participation": 0.5,
    },
    "privacy": {"dp": "central", "dp_noise": 1.0, "dp_clip": 1.0},
}


METHODS = ("fedavg", "fedrema", "ditto", "scaffold", "fedproto", "ifca")
PAIRS = [(name, case) for case in CASES for name in (METHODS if case != "privacy" else ("fedavg", "ditto"))]


@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_a_round_whose_scoring_fails_changes_nothing(name, case):
    settings = {"rounds": 4, **CASES[case]}
    method, federation = failing(name), make_federation()
    simulator = make_simulator(method, federation, **settings)
    state = simulator.start()
    expected_simulator = make_simulator(method, federation, **settings)
    expected = expected_simulator.start()
    FAILING[:] = [1, 3]
    failures = 0
    while state.round < 4:
        before = tensors(state)
        try:
            simulator.run_round(state)
        except (RuntimeError, fedrema.BadInput):
            failures += 1
            assert_equal(tensors(state), before)
    FAILING.clear()
    assert failures == 2
    for _ in expected_simulator.run(expected):
        pass
    assert_equal(tensors(state), tensors(expected))


@dataclass(frozen=True)
class Diverging(fedrema.Method):
    """Personal heads; its scoring says that it diverged."""

    name: ClassVar[str] = "diverging"
    title: ClassVar[str] = "Diverging"
    paper: ClassVar[str] = "none"

    def role(self, net, name):
        return fedrema.Role.PRIVATE if net.in_head(name) else fedrema.Role.SHARED

    def ready(self, net, client, data, moment):
        fail(moment, fedrema.Diverged)
        return client


def test_a_run_whose_scoring_diverged_is_resumed_with_the_same_result(tmp_path):
    settings = {"rounds": 4, "clients": 4, "samples": 20, "epochs": 1, "hidden": 6, "device": "cpu"}
    whole = fedrema.run(Diverging(), out=tmp_path / "whole", **settings)
    FAILING[:] = [3]
    with pytest.raises(fedrema.Diverged, match="round 2 is kept"):
        fedrema.run(Diverging(), out=tmp_path / "failed", **settings)
    assert not FAILING
    resumed = fedrema.resume(tmp_path / "failed")
    for name, value in whole.state().params.merged().items():
        assert torch.equal(resumed.state().params.merged()[name], value)
    assert [record.metrics for record in resumed.rounds] == [record.metrics for record in whole.rounds]


def tracing(name, declared=False):
    """Return a method that reports a quantity by some name."""

    def aggregate(self, net, state, uploads, moment):
        return fedrema.Answer(shared=uploads.mean, state=state, trace={name: 1.0})

    reports = fedrema.Reports(traces=(fedrema.Trace(name, "mine"),) if declared else ())
    own = {"aggregate": aggregate, "reports": reports, "__annotations__": {"reports": ClassVar[fedrema.Reports]}}
    names = {"name": "tracing", "title": "Tracing", "paper": "none"}
    return dataclass(frozen=True)(type("Tracing", (fedrema.Method,), {**own, **names}))()


RECORDED = (
    *(field.name for field in fields(RoundRecord)),
    *("epsilon", "delta", "clip", "rejected", "clipped", "attempts", "samples", "clipped_clients"),
    *("accuracy", "client_accuracy", "trained_accuracy", "trained_client_accuracy", "worst_tenth", "primary", "S"),
    *(f"trained_client_{metric}" for metric in METRICS),
)


@pytest.mark.parametrize("name", RECORDED)
def test_a_trace_with_the_name_of_something_recorded_is_refused(name, tmp_path):
    settings = {"rounds": 1, "clients": 3, "samples": 20, "device": "cpu"}
    for declared in (True, False):
        with pytest.raises(fedrema.BadInput) as raised:
            fedrema.run(tracing(name, declared), out=tmp_path / str(declared), **settings)
        assert f"traces {name!r}, but every record of a round has something else of that name" in str(raised.value)
        assert str(raised.value).count(". ") == 0
    assert not (tmp_path / "True").exists()


def test_a_trace_with_another_name_is_recorded(tmp_path):
    run = fedrema.run(tracing("own_loss", declared=True), out=tmp_path / "run", rounds=1, clients=3, samples=20)
    assert run.rounds[0]["own_loss"] == 1.0
    assert run.rounds[0]["loss"] == run.rounds[0].loss
