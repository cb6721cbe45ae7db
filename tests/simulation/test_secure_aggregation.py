"""Simulations with --secure-aggregation: the exact quantised sum, and what each method reveals."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from fedrema.base.options import Purpose
from fedrema.cli import main
from fedrema.config.settings import make_settings
from fedrema.core import Answer, Method, Role
from fedrema.core.fixed_point import FixedPoint, QuantisedSum
from fedrema.errors import BadInput
from fedrema.methods import registry
from fedrema.methods.fedavg import FedAvg
from fedrema.runs.secure_coverage import dummy_coverage
from tests.fixtures import make_federation, make_simulator, run_all
from tests.quick import quick

COUNTS = (14, 6, 19, 9)


def secure(method, **settings):
    return make_simulator(method, make_federation(counts=COUNTS), secure_aggregation=True, **settings)


@pytest.mark.parametrize("name", registry())
def test_a_method_is_covered_or_declares_what_the_server_sees_or_is_refused(name, monkeypatch):
    method = quick(name)
    if dummy_coverage(method)[0].kind == "refused":
        with pytest.raises(BadInput, match="protects parameters of which the server uses only the mean"):
            secure(method).start()
        return
    seen = []
    original = type(method).aggregate

    def watched(self, net, state, uploads, moment):
        seen.append(uploads)
        return original(self, net, state, uploads, moment)

    simulator = secure(method, rounds=2)
    state = simulator.start()
    coverage = simulator.coverage(state)  # found out with dummy uploads, before the real ones are recorded
    monkeypatch.setattr(type(method), "aggregate", watched)
    added = []
    monkeypatch.setattr(QuantisedSum, "add", recorded(added, QuantisedSum.add))
    before = {key: value.clone() for key, value in state.params.common.items()}
    record = simulator.run_round(state).record
    (uploads,) = seen
    roles = simulator.roles(state.params)
    assert set(uploads.mean) == {key for key, role in roles.items() if role is Role.SHARED}
    assert set(uploads.params) == {key for key, role in roles.items() if role in (Role.PERSONAL, Role.COLLECTED)}
    assert set(uploads.params) == set(coverage.params)
    assert set(uploads.extras) == set(coverage.extras)
    is_hidden = len(set(uploads.counts.tolist())) == 1
    assert is_hidden == coverage.hides_counts
    assert float(uploads.counts.sum()) == float(simulator.counts.sum()) == record.secure_sum.samples
    ((params, counts),) = added
    for key, mean in uploads.mean.items():
        exact = sum(
            int(
                torch.round((value - before[key]).clamp(-100, 100) * (float(count) * FixedPoint().scale)).reshape(-1)[0]
            )
            for value, count in zip(params[key], counts, strict=True)
        )  # Python's integers
        first = before[key].reshape(-1)[0].item() + exact / (FixedPoint().scale * float(counts.sum()))
        assert mean.reshape(-1)[0].item() == first
    assert record.secure_sum.clipped_clients == 0


def recorded(calls, original):
    def add(self, params, counts):
        calls.append((params, counts))
        return original(self, params, counts)

    return add


@pytest.mark.parametrize("settings", [{}, {"chunk": 32, "backend": "loop"}, {"participation": 0.5, "dropout": 0.3}])
def test_the_result_is_that_of_the_plain_mean_to_the_precision_of_the_sum(settings):
    plain, _ = run_all(make_simulator(FedAvg(), make_federation(counts=COUNTS), **settings))
    summed, _ = run_all(secure(FedAvg(), **settings))
    for name, value in plain.params.common.items():
        torch.testing.assert_close(summed.params.common[name], value, rtol=0, atol=1e-7)
        assert not torch.equal(summed.params.common[name], value)  # rounding is part of the result


def test_chunks_give_the_same_bits():
    federation = make_federation(counts=[6] * 40)
    states = [
        run_all(make_simulator(FedAvg(), federation, secure_aggregation=True, rounds=2, chunk=chunk))[0]
        for chunk in (32, 64)
    ]
    for name, value in states[0].params.common.items():
        assert torch.equal(states[1].params.common[name], value)


def test_clipped_changes_are_recorded():
    _, records = run_all(secure(FedAvg(), secure_range=1e-3, rounds=1))
    assert records[0].secure_sum.clipped_clients == 4
    assert records[0]["clipped_clients"] == 4


def test_too_many_samples_are_refused_before_training():
    with pytest.raises(BadInput, match=r"--secure-samples 30 is too small: 4 clients participate, and one has 16"):
        run_all(secure(FedAvg(), secure_samples=30))


@pytest.mark.parametrize("mode", ["central", "local"])
def test_it_can_be_combined_with_differential_privacy(mode):
    pytest.importorskip("opacus")
    private = {"dp": mode, "dp_noise": 0.1, "rounds": 2}
    plain, _ = run_all(make_simulator(FedAvg(), make_federation(counts=COUNTS), **private))
    summed, records = run_all(secure(FedAvg(), **private))
    for name, value in plain.params.common.items():
        torch.testing.assert_close(summed.params.common[name], value, rtol=0, atol=1e-6)
    assert records[-1].secure_sum.samples == 4  # all clients have the same weight


@dataclass(frozen=True)
class Counting(Method):
    """A method whose result depends on the sample counts of single clients."""

    name: ClassVar[str] = "counting"
    title: ClassVar[str] = "Counting"
    paper: ClassVar[str] = "an example"

    def aggregate(self, net, state, uploads, moment):
        """Add the largest count."""
        return Answer({name: value + 0 * uploads.counts.max() for name, value in uploads.mean.items()},
                      state={"largest": float(uploads.counts.max())})  # fmt: skip


def test_a_method_that_needs_single_counts_is_recognised_by_its_result():
    coverage, net = dummy_coverage(Counting())
    assert coverage.is_complete
    assert coverage.needs_counts
    assert coverage.described(net) == "complete; the server still receives from each client: the number of samples"
    assert dummy_coverage(FedAvg())[0].hides_counts


def test_fedrema_methods_shows_the_coverage(capsys):
    for name, words in {
        "fedavg": "Secure aggregation: complete\n",
        "fedproto": "Secure aggregation: refused, because no parameter is only averaged\n",
        "fedrema": "Secure aggregation: partial; the server still receives from each client: head",
    }.items():
        assert main(["methods", name]) == 0
        assert words in capsys.readouterr().out


def test_the_setting_defines_a_result_and_leaves_the_identity_of_other_runs_unchanged():
    names = {"secure-aggregation", "secure-bits", "secure-range", "secure-samples"}
    assert not names & make_settings("fedavg", {}).identifying(*Purpose).keys()
    chosen = make_settings("fedavg", {"secure_aggregation": True, "secure_range": 5.0}).identifying(*Purpose)
    assert names & chosen.keys() == {"secure-aggregation", "secure-range"}
