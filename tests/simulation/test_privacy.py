"""Differential privacy in the simulator: clipping and noise by hand, both backends, resuming, and what is refused."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from fedrema.core import LocalTraining, Role, Simulation
from fedrema.core.options import ADAPTIVE
from fedrema.data import Federation
from fedrema.engine.private_steps import SampleNoise, sample_gradients
from fedrema.errors import BadInput
from fedrema.methods import find_method
from fedrema.methods.fedrema import FedReMa
from fedrema.runs.checkpoint import load_state, save_state
from fedrema.simulation import accounting
from fedrema.simulation.privacy import COUNT_NOISE, FIRST_CLIP
from fedrema.simulation.scoring import summarise
from tests.fixtures import (
    BACKENDS,
    LOCAL,
    assert_same_state,
    batch_of,
    make_federation,
    make_simulator,
    run_all,
    sequence_net,
    snapshot,
)
from tests.quick import quick

pytest.importorskip("opacus")

COUNTS = (14, 6, 19, 9)
MODES = ["central", "local", "sample"]
COVERED = {
    "central": ["fedavg", "fedrema", "fedper", "scaffold", "fedclassavg"],
    "local": ["fedavg", "fedrema", "fedper", "scaffold", "fedclassavg"],
    "sample": ["fedavg", "fedrema", "fedper", "scaffold", "apfl", "fedala"],
}
CASES = [(mode, name) for mode, names in COVERED.items() for name in names]


def private(name="fedavg", **settings):
    return make_simulator(quick(name), make_federation(counts=COUNTS), **settings)


@pytest.mark.parametrize(("mode", "name"), CASES)
def test_both_backends_compute_the_same(mode, name):
    (looped, first), (stacked, second) = (run_all(private(name, dp=mode, backend=each)) for each in BACKENDS)
    assert_same_state(looped, stacked, 1e-9)
    assert [record.privacy for record in first] == [record.privacy for record in second]
    assert first[-1].loss == pytest.approx(second[-1].loss, abs=1e-9)


@pytest.mark.parametrize(("mode", "clip"), [*((mode, "0.5") for mode in MODES), ("central", ADAPTIVE)])
@pytest.mark.parametrize("name", ["fedavg", "fedrema"])
def test_a_resumed_run_equals_an_uninterrupted_one(mode, clip, name, tmp_path):
    settings = {"dp": mode, "dp_clip": clip, "participation": 0.5, "rounds": 4}
    first = private(name, **settings)
    whole = first.start()
    for _ in range(2):
        first.run_round(whole)
    save_state(whole, tmp_path / "state.safetensors", "test")
    expected = [each.record.privacy for each in first.run(whole)]
    resumed = load_state(tmp_path / "state.safetensors", "test")
    found = [each.record.privacy for each in private(name, **settings).run(resumed)]
    assert_same_state(whole, resumed)
    assert found == expected
    assert whole.privacy.keys() == resumed.privacy.keys()
    assert all(torch.equal(value, resumed.privacy[name]) for name, value in whole.privacy.items())


@pytest.mark.parametrize("mode", ["central", "local"])
def test_chunks_do_not_change_results(mode):
    federation = make_federation(counts=[4] * 40)
    states = [
        run_all(make_simulator(quick("fedrema"), federation, dp=mode, rounds=2, chunk=chunk))[0] for chunk in (32, 64)
    ]
    assert_same_state(*states)


@pytest.mark.parametrize("mode", MODES)
def test_noise_depends_on_seed_round_and_client(mode):
    states = [run_all(private(dp=mode, seed=seed, rounds=1))[0] for seed in (1, 1, 2)]
    first, again, other = map(snapshot, states)
    name = "common/head.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])


def round_with(simulator):
    """Run one round; return the parameters before it and what `aggregate` received."""
    seen = []
    original = simulator.aggregate
    simulator.aggregate = lambda uploads, *rest: seen.append(uploads) or original(uploads, *rest)
    state = simulator.start()
    before = {name: value.clone() for name, value in state.params.merged().items()}
    record = simulator.run_round(state).record
    return before, seen[0], record


def test_the_mean_of_clipped_updates_has_equal_weights():
    clip = 0.01
    before, uploads, record = round_with(private(dp="central", dp_clip=str(clip), dp_noise=0.0))
    assert uploads.counts.tolist() == [1, 1, 1, 1]
    # Every update is longer than the norm: the mean of clipped updates is the mean of unit vectors.
    plain = private()
    state = plain.start()
    trained, _ = plain.local_training(plain.cohort(state, torch.arange(4), with_velocity=True), plain.moment(1))
    updates = {name: value - before[name] for name, value in trained.params.own.items()}
    norms = torch.stack([value.flatten(1).square().sum(1) for value in updates.values()]).sum(0).sqrt()
    assert (norms > clip).all()
    for name, value in updates.items():
        units = value / norms.reshape(-1, *[1] * (value.dim() - 1))
        torch.testing.assert_close(uploads.mean[name] - before[name], clip * units.mean(0))
    assert record.privacy.epsilon is None
    assert record.privacy.clip == clip


def test_central_noise_has_the_deviation_of_the_multiplier_divided_by_the_number_of_updates():
    quiet, loud = (round_with(private(dp="central", dp_noise=z, hidden=400))[1].mean for z in (0.0, 2.0))
    noise = torch.cat([(loud[name] - quiet[name]).flatten() for name in loud])
    assert float(noise.std()) == pytest.approx(2.0 / 4, rel=0.05)
    assert abs(float(noise.mean())) < 0.05


def test_personal_tensors_are_noised_for_each_client_and_clipped_with_the_shared_ones():
    settings = {"dp": "central", "dp_clip": "0.5", "hidden": 400}
    (before, quiet, _), (_, loud, _) = (round_with(private("fedrema", dp_noise=z, **settings)) for z in (0.0, 2.0))
    for name, value in quiet.params.items():
        noise = (loud.params[name] - value).flatten(1)
        if noise.shape[1] > 1000:
            assert noise.std(1).tolist() == pytest.approx([1.0] * 4, rel=0.1)  # 2 · 0.5
            assert abs(torch.corrcoef(noise) - torch.eye(4)).max() < 0.1
    # Head and body together are clipped to one norm, so the heads alone are within it.
    heads = torch.cat([(value - before[name]).flatten(1) for name, value in quiet.params.items()], 1)
    assert (heads.norm(dim=1) <= 0.5 + 1e-9).all()


def test_local_noise_is_on_everything_that_is_sent():
    simulator = private("fedper", dp="local", dp_noise=1.0, hidden=400)
    state = simulator.start()
    roles = simulator.roles(state.params)
    before = snapshot(state)
    cohort = simulator.cohort(state, torch.arange(4))
    unchanged = dataclasses.replace(cohort, params=type(cohort.params)(cohort.params.copied(4)))
    sent, norms = simulator.privacy.protected(
        unchanged, cohort.params, roles, state.privacy, simulator.moment(1), updates=4
    )
    assert norms.tolist() == [0, 0, 0, 0]
    for name, role in roles.items():
        start = before.get(f"params/{name}", before.get(f"common/{name}"))
        noise = (sent.params.own[name] - start).flatten()
        if role is Role.PRIVATE:
            assert not noise.any()
        elif len(noise) > 1000:
            assert float(noise.std()) == pytest.approx(1.0, rel=0.1)


def test_the_adapted_norm_follows_the_formula():
    simulator = private(dp="central", dp_clip=ADAPTIVE, dp_noise=0.0)
    state = simulator.start()
    first = simulator.run_round(state).record.privacy
    second = simulator.run_round(state).record.privacy
    assert first.clip == FIRST_CLIP
    # No update is below 0.1: C ← C · exp(−0.2 (0 − 0.5)).
    assert second.clip == pytest.approx(FIRST_CLIP * math.exp(0.1))


def test_with_an_adapted_norm_the_noisy_count_takes_its_share_of_the_budget():
    privacy = private(dp="central", dp_clip=ADAPTIVE, dp_noise=0.5).privacy
    for updates in (4, 1000):
        count = max(COUNT_NOISE * updates, 0.5)
        together = privacy._multiplier(updates) ** -2 + (2 * count) ** -2
        assert together == pytest.approx(0.5**-2)


def test_the_adapted_norm_approaches_the_median():
    simulator = private(dp="central", dp_clip=ADAPTIVE, dp_noise=0.0, rounds=60)
    norms = torch.tensor([1.0, 2.0, 3.0, 4.0])
    clip = FIRST_CLIP
    for number in range(1, 200):
        clip = simulator.privacy._adapted_clip(clip, norms, simulator.moment(number))
    assert 1.9 < clip < 3.1


# ε


def test_epsilon_of_full_participation_is_that_of_a_gaussian_mechanism():
    for mode, delta in (("central", 4**-1.1), ("local", 1e-5)):
        _, records = run_all(private(dp=mode, dp_noise=3.0))
        expected = [accounting.epsilon(n * accounting.gaussian(1.5), delta) for n in (1, 2, 3)]
        assert [record.privacy.epsilon for record in records] == pytest.approx(expected)
        assert records[0].privacy.delta == pytest.approx(delta)
        summary = summarise(records)
        assert summary["epsilon"] == records[-1].privacy.epsilon
        assert type(summary).from_json(summary.as_json()) == summary
        assert records[-1]["epsilon"] == records[-1].privacy.epsilon


def test_sampling_of_clients_reduces_epsilon_for_shared_parameters_only():
    federation = make_federation(counts=[4] * 20)
    settings = {"participation": 0.1, "rounds": 3, "dp": "central", "dp_noise": 8.0, "dp_delta": 1e-3}
    shared, personal = (
        run_all(make_simulator(quick(name), federation, **settings))[1][-1].privacy.epsilon
        for name in ("fedavg", "fedrema")
    )
    most = max(sum(row in each.participants for each in run_all(make_simulator(quick("fedavg"), federation,
        participation=0.1))[1]) for row in range(20))  # fmt: skip
    assert personal == pytest.approx(accounting.epsilon(most * accounting.gaussian(4.0), 1e-3))
    assert shared == pytest.approx(accounting.epsilon(3 * accounting.without_replacement(0.1, 4.0), 1e-3))
    assert shared < personal


def test_epsilon_of_samples_is_that_of_the_client_with_the_largest_sampling_rate():
    _, records = run_all(private(dp="sample", dp_noise=1.2))
    train = private().train.counts.tolist()
    steps = {count: 3 * LOCAL.epochs * max(count // LOCAL.batch, 1) for count in train}
    each = [
        accounting.epsilon(taken * accounting.poisson(min(LOCAL.batch, count) / count, 1.2), 1e-5)
        for count, taken in steps.items()
    ]
    assert records[-1].privacy.epsilon == pytest.approx(max(each), rel=1e-6)


# Gradients of samples


def test_gradients_of_samples_are_clipped_summed_and_divided_by_the_expected_size():
    simulator = private()
    state = simulator.start()
    client = simulator.cohort(state, torch.tensor([0])).one(0)
    data = simulator.train.of(0).rows(slice(5))
    keyed = dataclasses.replace(data, key=torch.tensor(7))
    names = tuple(client.params)
    gradients, losses = sample_gradients(simulator.net, simulator.method.loss, client, keyed, names, ())
    expected = {name: torch.zeros_like(value) for name, value in client.params.items()}
    for at in range(5):
        leaves = {name: value.clone().requires_grad_() for name, value in client.params.items()}
        loss = simulator.method.loss(simulator.net, client.having(params=leaves), data.rows(slice(at, at + 1)))
        found = torch.autograd.grad(loss, list(leaves.values()))
        norm = math.sqrt(sum(float(value.square().sum()) for value in found))
        assert float(losses[at]) == pytest.approx(loss.item())
        for name, value in zip(leaves, found, strict=True):
            torch.testing.assert_close(gradients[name][at], value)
            expected[name] += value * min(1, 0.3 / norm)
    private_gradient = SampleNoise(0.3, 0.0).private_gradient(gradients, keyed, torch.tensor(4.0).double(), axes=0)
    for name, value in expected.items():
        torch.testing.assert_close(private_gradient[name], value / 4)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("axes", [0, 1])
def test_a_sample_whose_gradient_is_not_finite_counts_as_0(value, axes):
    gradients = {"v": torch.tensor([[3.0], [1.0], [0.0]]), "w": torch.tensor([[4.0], [value], [0.5]])}
    batch = batch_of(torch.zeros(3, 1), [0] * 3, [1, 1, 1])
    if axes:
        gradients = {name: torch.stack([each, each]) for name, each in gradients.items()}
        batch = batch_of(torch.zeros(2, 3, 1), [[0] * 3] * 2, [[1] * 3] * 2)
    batch = dataclasses.replace(batch, key=torch.tensor([5, 6]) if axes else torch.tensor(5))
    expected = torch.tensor([2.0, 2.0]) if axes else torch.tensor(2.0)
    found = SampleNoise(1.0, 0.0).private_gradient(gradients, batch, expected, axes)
    for name, sums in {"v": 0.6, "w": 0.8 + 0.5}.items():  # the first sample has norm 5, the last one 0.5
        torch.testing.assert_close(found[name].reshape(-1), torch.full((1 + axes,), sums / 2))


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e30), (torch.float16, 1000.0), (torch.bfloat16, 1e30)])
def test_the_norm_of_a_large_gradient_does_not_overflow(dtype, size):
    gradients = {"w": torch.tensor([[size, -size], [0.0, 0.0]], dtype=dtype)}
    batch = dataclasses.replace(batch_of(torch.zeros(2, 1), [0] * 2, [1, 1]), key=torch.tensor(5))
    found = SampleNoise(0.5, 0.0).private_gradient(gradients, batch, torch.tensor(1.0), 0)["w"]
    torch.testing.assert_close(found.float(), 0.5 * torch.tensor([1.0, -1.0]) / math.sqrt(2), rtol=0.01, atol=0)


@pytest.mark.parametrize("mode", ["central", "local"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_update_that_is_not_finite_counts_as_0(mode, value):
    simulator = private(dp=mode, dp_clip="0.01", dp_noise=0.0)
    state = simulator.start()
    before = state.params
    trained, _ = simulator.local_training(
        simulator.cohort(state, torch.arange(4), with_velocity=True), simulator.moment(1)
    )
    own = {name: each.clone() for name, each in trained.params.own.items()}
    own["head.weight"][1].view(-1)[0] = value
    spoilt = dataclasses.replace(trained, params=dataclasses.replace(trained.params, own=own))
    roles, start = simulator.roles(trained.params), before.merged()
    sent, norms = simulator.privacy.protected(spoilt, before, roles, state.privacy, simulator.moment(1), 4)
    clipped = torch.cat([(each - start[name]).flatten(1) for name, each in sent.params.own.items()], 1)
    assert clipped.norm(dim=1).tolist() == pytest.approx([0.01, 0.0, 0.01, 0.01], rel=1e-6)
    assert not norms[1].isfinite()


def test_noise_on_gradients_has_the_deviation_of_the_multiplier_and_differs_between_keys():
    zero = {"w": torch.zeros(2, 3, 200, 100, dtype=torch.float64)}
    batch = dataclasses.replace(batch_of(torch.zeros(2, 3, 1), [[0] * 3] * 2, [[1] * 3] * 2), key=torch.tensor([5, 6]))
    expected = torch.ones(2, dtype=torch.float64)
    found = SampleNoise(0.5, 2.0).private_gradient(zero, batch, expected, axes=1)["w"].flatten(1)
    assert found.std(1).tolist() == pytest.approx([1.0, 1.0], rel=0.02)
    assert found.mean(1).tolist() == pytest.approx([0.0, 0.0], abs=0.02)
    assert abs(float(torch.corrcoef(found)[0, 1])) < 0.02
    assert float((found[0] ** 4).mean()) == pytest.approx(3.0, rel=0.1)


@pytest.mark.parametrize("net", ["cnn", "sequence"])
def test_convolutions_recurrence_attention_and_dropout_agree_in_both_backends(net):
    federation = make_federation(counts=(9, 4))
    if net == "cnn":
        drawn = np.random.default_rng(0)
        x, y = drawn.normal(size=(24, 1, 16, 16)).astype(np.float32), np.arange(24) % 3
        federation = Federation.from_arrays(x, y, np.repeat([0, 1], 12), classes=3)
    local = LocalTraining(epochs=1, batch=4, lr=0.05, drop_incomplete=False, augment="noise" if net == "cnn" else "")
    states = [
        run_all(
            make_simulator(
                quick("fedavg"),
                federation,
                local,
                net=sequence_net() if net == "sequence" else "cnn",
                rounds=1,
                backend=each,
                dp="sample",
            )
        )[0]
        for each in BACKENDS
    ]
    assert_same_state(*states, 1e-9)


def test_batches_of_private_steps_are_drawn_by_poisson_sampling():
    from fedrema.core import Phase
    from fedrema.engine import draw_order

    local = LocalTraining(epochs=200, batch=5, drop_incomplete=False)
    order = draw_order(("a",), [20], Phase(200, 0.1, 0.0), local, (0, 1, "train"), poisson=True)
    assert order.steps.tolist() == [800]
    sizes = order.sizes[0, :, 0]
    assert sizes.mean() == pytest.approx(5, abs=0.3)
    assert sizes.std() == pytest.approx(math.sqrt(20 * 0.25 * 0.75), abs=0.3)


# What is refused


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dp": "central", "dp_clip": "0"}, "--dp-clip must be a number above 0"),
        ({"dp": "central", "dp_clip": "much"}, "--dp-clip must be a number above 0"),
        ({"dp": "local", "dp_noise": -1.0}, "--dp-noise must be 0 or more"),
        ({"dp": "local", "dp_noise": math.inf}, "--dp-noise must be 0 or more"),
        ({"dp": "local", "dp_delta": 1.0}, "--dp-delta must be above 0 and below 1"),
        ({"dp": "local", "dp_clip": ADAPTIVE}, "needs --dp central"),
        ({"dp": "sample", "dp_clip": ADAPTIVE}, "needs --dp central"),
        ({"dp_noise": 2.0}, "--dp-noise has no effect without --dp"),
        ({"dp_clip": "2"}, "--dp-clip has no effect without --dp"),
    ],
)
def test_invalid_settings_are_refused(settings, words):
    with pytest.raises(BadInput, match=words):
        Simulation(**settings)


@pytest.mark.parametrize(
    ("mode", "method", "words"),
    [
        ("central", find_method("fedpac")(), "does not cover"),
        ("local", FedReMa(align=1.0), "does not cover"),
        ("central", find_method("local")(), "send no parameters"),
        ("sample", find_method("fedfa")(), "couples the samples"),
        ("sample", find_method("fedrod")(), "reads the samples outside"),
        ("sample", find_method("per-fedavg")(), "one gradient per step"),
    ],
)
def test_methods_that_are_not_covered_are_refused_before_training(mode, method, words):
    with pytest.raises(BadInput, match=words):
        make_simulator(method, dp=mode).start()


def test_batch_norm_is_refused_unless_its_statistics_are_private():
    for mode in MODES:
        with pytest.raises(BadInput, match="batch norm"):
            make_simulator(quick("fedavg"), net="mlp-bn", dp=mode).start()
    make_simulator(quick("fedbn"), net="mlp-bn", dp="local").start()


def test_class_weights_couple_samples():
    local = dataclasses.replace(LOCAL, class_weights="1,2,3,4")
    with pytest.raises(BadInput, match="couples the samples"):
        make_simulator(quick("fedavg"), local=local, dp="sample").start()


def test_without_opacus_one_sentence_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "opacus.accountants.analysis", None)
    with pytest.raises(BadInput, match="pip install"):
        private(dp="local")


# Without differential privacy


def test_settings_that_were_added_do_not_change_the_identity_of_earlier_runs():
    from fedrema.base.options import Purpose
    from fedrema.config.settings import make_settings
    from fedrema.core.options import ATTACK, DEFENCE, PRIVACY

    added = {name.replace("_", "-") for name in (*PRIVACY, *ATTACK, *DEFENCE)}
    assert not added & make_settings("fedavg", {}).identifying(*Purpose).keys()
    private = make_settings("fedavg", {"dp": "local", "dp_noise": 2.0}).identifying(*Purpose)
    assert added & private.keys() == {"dp", "dp-noise"}


def test_records_of_earlier_versions_can_be_read():
    import msgspec

    from fedrema.simulation.records import RoundRecord, Summary

    record = msgspec.json.decode(b'{"round": 3}', type=RoundRecord)
    assert record.privacy is None
    assert record.attackers == []
    summary = summarise([run_all(private(rounds=1))[1][0]]).as_json()
    assert not {"epsilon", "delta", "attackers"} & summary.keys()
    assert Summary.from_json(summary).epsilon is None


def test_an_inspected_run_has_neither_noise_nor_attackers():
    inspected = Simulation(dp="local", dp_noise=2.0, attack="noise", defence="krum").for_inspection()
    assert (inspected.dp, inspected.attack, inspected.defence) == ("none", "none", "none")
