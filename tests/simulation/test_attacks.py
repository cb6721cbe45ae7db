"""Attackers and defences in the simulator: what is sent, who is scored, backends, resuming, and what is refused."""

import math

import numpy as np
import pytest
import torch

from fedrema.core import Simulation
from fedrema.engine import ClientTensors
from fedrema.errors import BadInput
from fedrema.methods import find_method
from fedrema.runs.checkpoint import load_state, save_state
from fedrema.simulation.attacks import flipped
from fedrema.simulation.scoring import summarise
from fedrema.tasks import Task
from tests.fixtures import assert_same_state, clones, make_federation, make_simulator, run_all, tensor
from tests.quick import quick

COUNTS = (14, 6, 19, 9, 11)
ATTACKS = ["label-flip", "scale", "noise", "counts", "free-ride"]
DEFENCES = ["median", "trimmed-mean", "krum", "norm-bound"]


def attacked(name="fedavg", **settings):
    return make_simulator(quick(name), make_federation(counts=COUNTS), **settings)


@pytest.mark.parametrize("name", ["fedavg", "fedrema", "fedpac"])
@pytest.mark.parametrize("settings", [*({"attack": a} for a in ATTACKS), *({"defence": d} for d in DEFENCES)], ids=str)
def test_both_backends_and_a_resumed_run_are_the_same(settings, name, tmp_path):
    settings = {"rounds": 3, "defence_share": 0.1, **settings} if "defence" in settings else {"rounds": 3, **settings}
    looped, first = run_all(attacked(name, backend="loop", **settings))
    simulator = attacked(name, **settings)
    whole = simulator.start()
    records = [simulator.run_round(whole).record]
    save_state(whole, tmp_path / "state.safetensors", "test")
    records += [each.record for each in simulator.run(whole)]
    resumed = load_state(tmp_path / "state.safetensors", "test")
    list(attacked(name, **settings).run(resumed))
    assert_same_state(looped, whole, 1e-9)
    assert_same_state(whole, resumed)
    assert [each.attackers for each in first] == [each.attackers for each in records]
    assert [each["client_accuracy"] for each in first] == [each["client_accuracy"] for each in records]


def sent_in_first_round(simulator):
    """Return the cohort as it was trained and as it was sent, and the parameters before."""
    seen = []
    original = simulator.attackers.tampered

    def tampered(cohort, before, roles, moment):
        # The state is updated in place at the end of the round.
        copy = ClientTensors(clones(before.own), clones(before.common))
        seen.append((cohort, original(cohort, before, roles, moment), copy))
        return seen[0][1]

    object.__setattr__(simulator.attackers, "tampered", tampered)
    state = simulator.start()
    record = simulator.run_round(state).record
    return *seen[0], record


@pytest.mark.parametrize(("attack", "strength"), [("scale", -3.0), ("noise", 2.0), ("free-ride", None)])
def test_attackers_send_something_else_and_honest_clients_do_not(attack, strength):
    simulator = attacked("fedrema", attack=attack, attackers=0.4, attack_strength=strength)
    trained, sent, before, record = sent_in_first_round(simulator)
    assert len(record.attackers) == 2
    start = before.merged()
    for row in range(5):
        changed = {name: value[row] - start[name].expand_as(value)[row] for name, value in trained.params.own.items()}
        found = {name: value[row] - start[name].expand_as(value)[row] for name, value in sent.params.own.items()}
        flat, other = (torch.cat([value.flatten() for value in each.values()]) for each in (changed, found))
        if row not in record.attackers:
            assert torch.equal(flat, other)
        elif attack == "scale":
            torch.testing.assert_close(other, -3 * flat)
        elif attack == "noise":
            assert float(other.norm()) == pytest.approx(2 * float(flat.norm()))
            assert abs(float(torch.dot(other, flat))) < 0.5 * float(other.norm() * flat.norm())
        else:
            assert not other.any()


def test_private_parameters_are_not_tampered_with():
    simulator = attacked("fedper", attack="free-ride", attackers=0.4)
    trained, sent, before, record = sent_in_first_round(simulator)
    start = before.merged()
    for row in record.attackers:
        assert torch.equal(sent.params.own["head.weight"][row], trained.params.own["head.weight"][row])
        body = next(name for name in start if name.startswith("body."))
        assert torch.equal(sent.params.own[body][row], start[body])


def test_false_counts_change_the_weights_of_the_mean():
    simulator = attacked(attack="counts", attackers=0.2, attack_strength=7.0)
    row = int(simulator.attackers.rows[0])
    counts = simulator.attackers.counts(torch.arange(5), simulator.counts)
    expected = simulator.counts.clone()
    expected[row] *= 7
    assert torch.equal(counts, expected)


def test_flipped_labels_are_those_of_attackers_only():
    simulator, honest = attacked(attack="label-flip"), attacked()
    row = int(simulator.attackers.rows[0])
    count = int(honest.train.counts[row])
    assert torch.equal(simulator.train.y[row, :count], 3 - honest.train.y[row, :count])
    others = [other for other in range(5) if other != row]
    assert torch.equal(simulator.train.y[others], honest.train.y[others])
    assert torch.equal(simulator.test.y, honest.test.y)


def test_targets_of_other_tasks_are_flipped_too():
    assert flipped(torch.tensor([0, 1, 4]), Task("ordinal", 5)).tolist() == [4, 3, 0]
    assert flipped(torch.tensor([[0, 1], [1, 1]]), Task("multilabel", 2)).tolist() == [[1, 0], [0, 0]]
    assert flipped(tensor([1.0, 2.0, 6.0]), Task("regression")).tolist() == [5, 4, 0]
    assert flipped(tensor([2.0, 3.0, 9.0]), Task("count")).tolist() == [9, 8, 2]


def test_attackers_are_not_scored_and_are_recorded():
    simulator = attacked(attack="noise", attackers=0.4)
    state, records = run_all(simulator)
    rows = simulator.attackers.rows.tolist()
    assert len(rows) == 2
    for record in records:
        assert record.attackers == rows
        assert [row for row, value in enumerate(record["client_accuracy"]) if value is None] == rows
        assert [row for row, value in enumerate(record["trained_client_accuracy"]) if value is None] == rows
        honest = [value for row, value in enumerate(record.client_loss) if row not in rows]
        assert record.loss == pytest.approx(np.mean(honest))
    assert [row for row in range(5) if row not in rows] == list(simulator.predict_tests(state).rows)
    summary = summarise(records)
    assert summary["attackers"] == rows
    assert type(summary).from_json(summary.as_json()) == summary


def test_attackers_follow_from_the_seed_and_the_names():
    drawn = [attacked(attack="noise", attackers=0.4, seed=seed).attackers.rows.tolist() for seed in range(8)]
    assert len({tuple(rows) for rows in drawn}) > 2
    assert drawn[3] == attacked(attack="scale", attackers=0.4, seed=3).attackers.rows.tolist()


@pytest.mark.parametrize("defence", DEFENCES)
def test_a_defence_is_the_same_in_chunks(defence):
    federation = make_federation(counts=[4] * 40)
    states = [
        run_all(make_simulator(quick("fedavg"), federation, defence=defence, rounds=2, chunk=chunk))[0]
        for chunk in (32, 64)
    ]
    assert_same_state(*states)


@pytest.mark.parametrize("defence", DEFENCES)
def test_a_defence_protects_the_shared_model_from_large_updates(defence):
    federation = make_federation(counts=[30] * 12)
    settings = {"attack": "scale", "attackers": 0.15, "attack_strength": -30.0, "rounds": 8}
    with_it, without = (
        run_all(make_simulator(quick("fedavg"), federation, **settings, **chosen))[1][-1].accuracy
        for chosen in ({"defence": defence}, {})
    )
    assert with_it > without + 0.2


def test_attack_and_local_privacy_can_be_combined():
    pytest.importorskip("opacus")
    simulator = attacked(attack="free-ride", attackers=0.4, dp="local", dp_noise=1.0)
    _, records = run_all(simulator)
    assert records[-1].privacy.epsilon > 0


# What is refused


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"attack": "noise", "attackers": 0.0}, "--attackers must be above 0"),
        ({"attack": "noise", "attackers": 1.0}, "--attackers must be above 0"),
        ({"attackers": 0.3}, "--attackers has no effect without --attack"),
        ({"attack_strength": 2.0}, "--attack-strength has no effect without --attack"),
        ({"attack": "free-ride", "attack_strength": 2.0}, "no effect with --attack free-ride"),
        ({"attack": "noise", "attack_strength": -2.0}, "--attack-strength must be above 0"),
        ({"attack": "scale", "attack_strength": math.nan}, "--attack-strength must be above 0"),
        ({"attack": "counts", "dp": "local"}, "same weight"),
        ({"defence": "median", "dp": "central"}, "cannot be combined with --dp central"),
        ({"defence": "krum", "defence_share": 0.5}, "--defence-share must be at least 0 and below 0.5"),
        ({"defence_share": 0.3}, "--defence-share has no effect without --defence"),
        ({"defence": "median", "defence_bound": 1.0}, "--defence-bound has no effect with --defence median"),
        ({"defence": "norm-bound", "defence_bound": -1.0}, "--defence-bound must be 0 or more"),
    ],
)
def test_invalid_settings_are_refused(settings, words):
    with pytest.raises(BadInput, match=words):
        Simulation(**settings)


def test_too_few_clients_or_too_little_memory_are_refused():
    with pytest.raises(BadInput, match="leaves no honest one"):
        attacked(attack="noise", attackers=0.95)
    with pytest.raises(BadInput, match=r"2 f \+ 2"):
        attacked(defence="krum", defence_share=0.3).start()
    with pytest.raises(BadInput, match="has none"):
        make_simulator(find_method("local")(), defence="median").start()
    with pytest.raises(BadInput, match="stores the updates of all participants"):
        attacked(defence="median", memory=1e-6).start()
