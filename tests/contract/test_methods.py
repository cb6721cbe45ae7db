"""Properties that every registered method must have."""

import dataclasses
import functools

import msgspec
import numpy as np
import pytest
import torch

from fedrema.base.options import field_documentation
from fedrema.core import LocalTraining, Method
from fedrema.methods import registry
from fedrema.methods.apfl import APFL
from fedrema.methods.fedamp import FedAMP
from fedrema.methods.fedbabu import FedBABU
from fedrema.methods.feddistill import FedDistill
from fedrema.methods.fedpac import FedPAC
from fedrema.methods.fedprior import FedPrior
from fedrema.methods.fedproto import FedProto
from fedrema.methods.fedrema import FedReMa
from fedrema.methods.fedrep import FedRep
from fedrema.methods.fedselect import FedSelect
from fedrema.methods.fedvf import FedVF
from fedrema.methods.floco import Floco
from fedrema.methods.knn_per import KNNPer
from fedrema.methods.per_fedavg import PerFedAvg
from fedrema.methods.pfedgraph import PFedGraph
from fedrema.simulation.records import RoundRecord
from tests.fixtures import LOCAL, label, make_federation, make_simulator, run_all, sequence_net, snapshot
from tests.quick import quick

VARIANTS = [
    FedReMa(align=1.0),
    FedReMa(alternate=True),
    FedReMa(align=1.0, alternate=True, weigh="uniform", probe_per_client=True),
    FedProto(weigh="uniform", predict_by="classifier"),
    FedPAC(head_lr=0, weigh="uniform", head_epochs=2),
    FedPAC(align=0.0),
    FedDistill(gamma=1.0, target_loss="mse", include_own=True),
    PerFedAvg(variant="hessian-vector", adapt_steps=3),
    FedBABU(finetune="head", finetune_epochs=2),
    APFL(mixing="outputs", adapt_alpha=False),
    FedAMP(attention="distance", sigma=1e3),
    FedRep(head_epochs=1, finetune_epochs=1),
    FedSelect(select_every=1),
    FedVF(first_stage=0.0, head_every=2),
    FedPrior(smooth=0.1, held_out=0.3),
    FedPrior(align=0.0, held_out=0.0),
    KNNPer(neighbours=3, held_out=0.25),
    PFedGraph(pull_to="models"),
    Floco(endpoints=3, first_stage=0.0, tie=1.0),
]
METHODS = [*(quick(name) for name in registry()), *VARIANTS]
COUNTS = (14, 6, 19, 9)


def run_simulation(method, federation, local=LOCAL, **settings):
    """Run all rounds; return the final state and the records."""
    return run_all(make_simulator(method, federation, local, **settings))


def models(state, clients):
    return [state.params.row(row) for row in range(clients)]


def differences(first, second):
    assert first.keys() == second.keys()
    return max(float((first[name] - second[name]).abs().max()) for name in first)


@pytest.fixture(params=METHODS, ids=label)
def method(request) -> Method:
    return request.param


@pytest.fixture
def federation():
    """Return a smaller federation than in other tests, because there are many methods."""
    return make_federation(counts=COUNTS)


@functools.lru_cache(maxsize=2 * len(METHODS))
def straight(method: Method):
    """Run a method once, for all tests that need only an ordinary run."""
    federation = make_federation(counts=COUNTS)
    state, records = run_simulation(method, federation, record="relations")
    return state, records, dataclasses.replace(federation)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_loop_and_stacked_agree_with_unequal_clients(method, federation, momentum):
    local = dataclasses.replace(LOCAL, momentum=momentum, weight_decay=0.01, clip=0.5)
    looped, loop_records = run_simulation(method, federation, local, backend="loop")
    stacked, stacked_records = run_simulation(method, federation, local, backend="stacked")
    for one, other in zip(models(looped, 4), models(stacked, 4), strict=True):
        assert differences(one, other) < 1e-9
    for one, other in zip(loop_records, stacked_records, strict=True):
        assert one["client_accuracy"] == other["client_accuracy"]
        assert one["trained_client_accuracy"] == other["trained_client_accuracy"]
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-9)


@pytest.mark.parametrize(
    "method",
    [*METHODS[: len(registry())], *(each for each in VARIANTS if each.name in ("apfl", "per-fedavg"))],
    ids=label,
)
def test_with_batch_norm_loop_and_stacked_agree(method):
    federation = make_federation(counts=(9, 3, 14))  # the second client finishes earlier than the others
    local = LocalTraining(epochs=1, batch=4, lr=0.05, drop_incomplete=False)
    states = [
        run_simulation(method, federation, local, net="mlp-bn", rounds=2, backend=each)[0]
        for each in ("loop", "stacked")
    ]
    looped, stacked = map(snapshot, states)
    assert any(name.endswith("running_var") for name in looped)
    assert differences(looped, stacked) < 1e-9


def test_with_dropout_recurrence_and_attention_loop_and_stacked_agree(method):
    federation = make_federation(counts=(9, 3, 14))
    local = LocalTraining(epochs=1, batch=4, lr=0.05, drop_incomplete=False)
    states = [
        run_simulation(method, federation, local, net=sequence_net(), rounds=2, backend=each)[0]
        for each in ("loop", "stacked")
    ]
    looped, stacked = map(snapshot, states)
    assert differences(looped, stacked) < 1e-9


def test_permuting_clients_permutes_results(method, federation):
    order = [2, 0, 3, 1]
    state, records, _ = straight(method)
    permuted, permuted_records = run_simulation(method, federation.reorder(order))
    for place, row in enumerate(order):
        assert differences(permuted.params.row(place), state.params.row(row)) < 1e-9
        assert permuted_records[-1]["client_accuracy"][place] == records[-1]["client_accuracy"][row]


def test_a_resumed_run_equals_an_uninterrupted_one(method, federation, tmp_path):
    from fedrema.runs.checkpoint import load_state, save_state

    local = dataclasses.replace(LOCAL, clip=0.5)  # low enough to take effect
    first = make_simulator(method, federation, local, rounds=4)
    whole = first.start()
    for _ in range(2):
        first.run_round(whole)
    save_state(whole, tmp_path / "state.safetensors", "test")
    list(first.run(whole))
    second = make_simulator(method, federation, local, rounds=4)
    state = load_state(tmp_path / "state.safetensors", "test")
    list(second.run(state))
    expected, found = snapshot(whole), snapshot(state)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


def test_an_absent_client_keeps_its_private_state_and_is_scored_with_the_shared_part(method, federation):
    simulator = make_simulator(method, federation, participation=0.5)
    state = simulator.start()
    took_part = set(simulator.run_round(state).record["participants"])
    took_part |= set(simulator.run_round(state).record["participants"])
    before = snapshot(state)
    record = simulator.run_round(state).record
    absent = {row for row in range(4) if row not in record["participants"]}
    assert len(absent) == 2
    assert absent & took_part
    assert_unchanged(before, snapshot(state), with_state_of_its_own(simulator, state, absent, took_part))
    moment = simulator.moment(state.round)
    assert record["client_accuracy"] == simulator.score(state, moment).metrics["accuracy"].clients


def with_state_of_its_own(simulator, state, absent, took_part):
    """Return the absent clients whose state does not follow from that of others.

    A client that has not taken part yet has the mean of the others' personal parameters, if there are any.
    """
    personal = "personal" in simulator.roles(state.params).values()
    return sorted(absent & took_part if personal else absent)


def assert_unchanged(before, after, rows):
    for name in before:
        if not name.startswith("common/"):
            assert torch.equal(before[name][rows], after[name][rows]), name


def watch_aggregate(method, monkeypatch) -> list[bool]:
    """Return a list that records for each call of `aggregate` whether its inputs are unchanged."""
    seen = []
    original = type(method).aggregate

    def watched(self, net, state, uploads, moment):
        inputs = [
            *uploads.params.values(),
            *uploads.mean.values(),
            *uploads.before.values(),
            *uploads.extras.values(),
            uploads.counts,
            uploads.clients,
        ]
        inputs += [value for value in state.values() if isinstance(value, torch.Tensor)]
        copies = [value.clone() for value in inputs]
        numbers = {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}
        answer = original(self, net, state, uploads, moment)
        seen.extend(torch.equal(value, copy) for value, copy in zip(inputs, copies, strict=True))
        seen.append(all(state[name] == value for name, value in numbers.items()))
        return answer

    monkeypatch.setattr(type(method), "aggregate", watched)
    return seen


def test_a_dropped_client_changes_nothing_and_aggregate_does_not_change_its_inputs(method, federation, monkeypatch):
    unchanged = watch_aggregate(method, monkeypatch)
    simulator = make_simulator(method, federation, dropout=0.6, rounds=4)
    state = simulator.start()
    compared, took_part = 0, set()
    for _ in range(4):
        before = snapshot(state)
        record = simulator.run_round(state).record
        rows = with_state_of_its_own(simulator, state, set(record["dropped"]), took_part)
        assert_unchanged(before, snapshot(state), rows)
        compared += len(rows)
        took_part |= set(record["participants"])
    assert compared > 0
    assert all(unchanged)
    exchanged = {role for role in simulator.roles(state.params).values() if role != "private"}
    assert unchanged or not exchanged  # without uploads there is no aggregation


def test_the_federation_is_not_changed(method, federation):
    _, _, after = straight(method)
    assert after.fingerprint == federation.fingerprint


def test_late_clients_take_part_from_their_round_on(method, federation):
    state, records = run_simulation(method, federation, late=0.25, late_round=3, rounds=4)
    late = [row for row, value in enumerate(records[0]["client_accuracy"]) if value is None]
    assert len(late) == 1
    assert all(late[0] not in record["participants"] for record in records[:2])
    assert late[0] in records[2]["participants"]
    assert records[2]["client_accuracy"][late[0]] is not None
    assert all(torch.isfinite(value).all() for value in state.params.row(late[0]).values())


def test_late_clients_are_the_same_in_both_backends_and_after_resuming(method, federation, tmp_path):
    from fedrema.runs.checkpoint import load_state, save_state

    settings = {
        "late": 0.5,
        "late_round": 2,
        "participation": 0.6,
        "rounds": 4,
    }  # some join before they are first selected
    first = make_simulator(method, federation, **settings)
    whole = first.start()
    for _ in range(2):
        first.run_round(whole)
    save_state(whole, tmp_path / "state.safetensors", "test")
    list(first.run(whole))
    second, state = make_simulator(method, federation, **settings), load_state(tmp_path / "state.safetensors", "test")
    list(second.run(state))
    looped, _ = run_simulation(method, federation, backend="loop", **settings)
    expected, resumed, other = snapshot(whole), snapshot(state), snapshot(looped)
    assert expected.keys() == resumed.keys() == other.keys()
    for name, value in expected.items():
        assert torch.equal(value, resumed[name]), name
        torch.testing.assert_close(value, other[name], rtol=0, atol=1e-9, msg=name)


def test_recorded_bytes_equal_the_sizes_of_messages(method, federation):
    state, (record, *_), _ = straight(method)
    roles = make_simulator(method, federation).roles(state.params)
    each = sum(value.numel() * 8 for name, value in state.params.row(0).items() if roles.get(name) != "private")
    assert record["bytes_up"] >= 4 * each
    assert record["bytes_down"] >= 4 * each


def test_other_ways_of_scoring_do_not_change_training(method, federation):
    state, records, _ = straight(method)
    for name, other in method.beside().items():
        alone, alone_records = run_simulation(other, federation)
        assert all(differences(*pair) == 0 for pair in zip(models(state, 4), models(alone, 4), strict=True))
        beside = [record.alternatives[name]["accuracy"] for record in records]
        assert beside == [record.accuracy for record in alone_records]


def test_a_single_client_can_train(method):
    _, records = run_simulation(method, make_federation(counts=(20,)))
    assert len(records) == 3
    assert records[-1]["accuracy"] is not None


def test_everything_is_documented(method):
    assert method.__doc__
    assert method.title
    assert len(method.paper) > 10
    for name, (_, meaning) in field_documentation(type(method)).items():
        assert meaning, f"{method.name} --{name} has no documentation"


def test_records_can_be_written(method):
    _, records, _ = straight(method)
    assert msgspec.json.decode(msgspec.json.encode(records), type=list[RoundRecord]) == records


def test_relations_are_recorded_for_every_method(method, federation):
    simulator = make_simulator(method, federation, record="relations", participation=0.75)
    state = simulator.start()
    for each in simulator.run(state):
        similarity = each.relations["S"]
        present = each.record["participants"]
        assert similarity.shape == (4, 4)
        inside = similarity[np.ix_(present, present)]
        assert np.allclose(np.diag(inside), 1, atol=1e-6)
        assert np.allclose(inside, inside.T, atol=1e-6)
        assert ((inside >= 0) & (inside <= 1 + 1e-6)).all()
        absent = [row for row in range(4) if row not in present]
        assert np.isnan(similarity[absent]).all()
