"""Joint training of several seeds: the same results as separate runs."""

import dataclasses
import functools
import os
import signal

import numpy as np
import pytest
import torch

from fedrema.cli.arguments import parse_settings
from fedrema.engine import JointTraining, StackedEngine
from fedrema.engine.batches import Order
from fedrema.engine.joint import join_orders
from fedrema.errors import BadInput, Diverged
from fedrema.methods import registry
from fedrema.methods.fedavg import FedAvg
from fedrema.methods.fedpac import FedPAC
from fedrema.methods.fedprox import FedProx
from fedrema.methods.fedrema import FedReMa
from fedrema.runs import execute_many
from fedrema.runs.execute import Interrupted, execute, resume
from fedrema.runs.execute_many import execute_all, group_joint
from fedrema.runs.lock import RunLock
from fedrema.runs.run import Run
from fedrema.simulation.simulator import Simulator
from tests.contract.test_methods import METHODS
from tests.fixtures import label, make_federation, make_simulator, network, run_all, snapshot, unwatched


@pytest.fixture(autouse=True)
def also_on_a_cpu(monkeypatch):
    """Allow joint training on the CPU: the computation is the same as on a GPU."""
    monkeypatch.setattr(execute_many, "TOGETHER_ON", ("cpu", "cuda"))


def settings_of(tmp_path, name="together", seeds=3, method="fedrema", *arguments):
    words = ["--rounds", "3", "--clients", "5", "--samples", "40", "--epochs", "1", "--hidden", "8", *arguments]
    base = parse_settings(method, [*words, "--quiet"])
    return [base.seeded(seed).placed(tmp_path / name / f"seed-{seed}") for seed in range(seeds)]


def run_jointly(method, federation, seeds, **settings):
    """Run several seeds separately and jointly; return states and records of both, and the sizes of joint cohorts."""
    simulators = []
    for seed in seeds:
        chosen = {"rounds": 2, "seed": seed, **settings}
        simulators.append(make_simulator(method, federation, net=network(federation, seed=seed), **chosen))
    alone = [run_all(each) for each in simulators]
    joint_training = JointTraining(simulators[0].engine)
    sizes = []
    original = joint_training.engine.train
    joint_training.engine.train = lambda cohort, *rest: sizes.append(len(cohort)) or original(cohort, *rest)

    def run(simulation, engine):
        simulation.engine = engine
        return run_all(simulation)

    found = joint_training.run([functools.partial(run, each) for each in simulators])
    return alone, found, sizes


def run_with(simulation, engine):
    simulation.engine = engine
    return run_all(simulation)


def run_jointly_each(pairs):
    """Run methods on federations separately and jointly; like `run_jointly`."""
    simulators = [
        make_simulator(method, federation, net=network(federation, seed=seed), rounds=2, seed=seed)
        for seed, (method, federation) in enumerate(pairs)
    ]
    alone = [run_all(each) for each in simulators]
    joint_training, sizes = JointTraining(simulators[0].engine), []
    original = joint_training.engine.train
    joint_training.engine.train = lambda cohort, *rest: sizes.append(len(cohort)) or original(cohort, *rest)
    return alone, joint_training.run([functools.partial(run_with, each) for each in simulators]), sizes


def assert_same(alone, jointly):
    """Compare states and records to 1e-12."""
    for (state, records), (other, other_records) in zip(alone, jointly, strict=True):
        expected, found = snapshot(state), snapshot(other)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert torch.allclose(value.double(), found[name].double(), rtol=0, atol=1e-12), name
        for record, other_record in zip(records, other_records, strict=True):
            assert record["client_accuracy"] == other_record["client_accuracy"]


@pytest.mark.parametrize("method", METHODS, ids=label)
def test_joint_training_has_the_same_results_as_separate_runs(method, federation):
    alone, jointly, sizes = run_jointly(method, federation, seeds=(0, 1, 2), participation=0.75)
    for (state, records), (other, other_records) in zip(alone, jointly, strict=True):
        expected, found = snapshot(state), snapshot(other)
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert torch.allclose(value.double(), found[name].double(), rtol=0, atol=1e-12), name
        for record, other_record in zip(records, other_records, strict=True):
            for name in ("client_accuracy", "trained_client_accuracy", "participants", "bytes_up", "bytes_down"):
                assert record[name] == other_record[name]
            assert record["client_loss"] == pytest.approx(other_record["client_loss"], abs=1e-12)
    assert set(sizes) <= {9, 12}  # three of four clients train in each seed; all four adapt


def test_a_run_that_ends_early_does_not_block_the_others():
    federation = make_federation()
    alone, jointly, sizes = run_jointly(FedAvg(), federation, seeds=(0, 1))
    assert set(sizes) == {8}
    assert len(alone) == len(jointly) == 2


def test_joint_runs_equal_separate_runs(tmp_path):
    done = [outcome for _, outcome in execute_all(settings_of(tmp_path), unwatched)]
    for seed, run in enumerate(done):
        single = execute(settings_of(tmp_path, "single")[seed])
        assert run.summary["best_accuracy"] == single.summary["best_accuracy"]
        for row in range(5):
            one, other = run.personal_parameters(row=row), single.personal_parameters(row=row)
            assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.fixture
def _large_steps(monkeypatch):
    """Treat every step as large, so that runs take turns instead of being trained jointly."""
    monkeypatch.setattr(execute_many, "SMALL_STEP", 0.0)
    monkeypatch.setattr(JointTraining, "run", None)


@pytest.mark.usefixtures("_large_steps")
@pytest.mark.parametrize("method", ["fedrema", "fedpac"])
def test_runs_that_take_turns_equal_separate_runs_to_the_bit(method, tmp_path):
    words = ["--backend", "stacked", "--threads", "1"]
    running, rounds = [], []

    def watching(settings):
        seed = settings.simulation.seed

        def watch(result):
            running.append(seed)
            rounds.append(result.record["round"])

        return watch

    done = [outcome for _, outcome in execute_all(settings_of(tmp_path, "turns", 3, method, *words), watching)]
    assert rounds == sorted(rounds)  # they took turns
    assert len(set(running[:3])) == 3
    for seed, run in enumerate(done):
        single = execute(settings_of(tmp_path, "single", 3, method, *words)[seed])
        assert [each.metrics for each in run.rounds] == [each.metrics for each in single.rounds]
        for row in range(5):
            one, other = run.personal_parameters(row=row), single.personal_parameters(row=row)
            assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.usefixtures("_large_steps")
def test_an_error_in_one_of_several_turns_is_raised_to_the_caller(tmp_path, monkeypatch):
    original = Simulator.score

    def broken(self, state, moment):
        if self.seed == 1 and moment.round == 2:
            raise RuntimeError("broken on purpose")
        return original(self, state, moment)

    monkeypatch.setattr(Simulator, "score", broken)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        list(execute_all(settings_of(tmp_path), unwatched))
    assert [len(Run(tmp_path / "together" / f"seed-{seed}").rounds) for seed in range(3)] == [3, 1, 3]


@pytest.mark.usefixtures("_large_steps")
def test_the_runs_of_many_turns_are_split_evenly(tmp_path, monkeypatch):
    sizes = []
    original = execute_many.run_in_turns
    monkeypatch.setattr(
        execute_many, "run_in_turns", lambda jobs, device: sizes.append(len(jobs)) or original(jobs, device)
    )
    list(execute_all(settings_of(tmp_path, seeds=6), unwatched))
    assert sizes == [3, 3]


def test_if_a_run_cannot_be_prepared_no_other_stays_locked(tmp_path, monkeypatch):
    original = execute_many.prepare_new

    def refusing(settings, *rest, **more):
        if settings.simulation.seed == 2:
            raise BadInput("refused on purpose")
        return original(settings, *rest, **more)

    monkeypatch.setattr(execute_many, "prepare_new", refusing)
    with pytest.raises(BadInput, match="refused on purpose"):
        list(execute_all(settings_of(tmp_path), unwatched))
    assert not any(RunLock(tmp_path / "together" / f"seed-{seed}").is_held() for seed in range(3))
    monkeypatch.undo()
    done = [outcome for _, outcome in execute_all(settings_of(tmp_path), unwatched, resume=True)]
    assert [run.summary["rounds"] for run in done] == [3, 3, 3]


def test_memory_is_not_estimated_for_a_single_run(tmp_path, monkeypatch):
    asked = []
    original = Simulator.clients_in_memory
    monkeypatch.setattr(Simulator, "clients_in_memory", lambda self: asked.append(self) or original(self))
    assert len(list(execute_all(settings_of(tmp_path, seeds=1), unwatched))) == 1
    assert not asked
    assert len(list(execute_all(settings_of(tmp_path, "several", seeds=2), unwatched))) == 2
    assert len(asked) == 1


def test_a_seed_that_diverges_does_not_stop_the_others(tmp_path, monkeypatch):
    original = Simulator.local_training

    def poisoned(self, cohort, moment):
        trained, losses = original(self, cohort, moment)
        if self.seed == 1 and moment.round == 2:
            losses = losses * float("nan")
        return trained, losses

    monkeypatch.setattr(Simulator, "local_training", poisoned)
    outcomes = [outcome for _, outcome in execute_all(settings_of(tmp_path), unwatched)]
    assert [type(outcome) for outcome in outcomes] == [Run, Diverged, Run]
    assert "round 2" in str(outcomes[1])
    assert [len(outcome.rounds) for outcome in outcomes if isinstance(outcome, Run)] == [3, 3]


def test_an_error_in_one_thread_is_raised_to_the_caller(tmp_path, monkeypatch):
    def broken(self, state, moment):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(Simulator, "score", broken)
    with pytest.raises(RuntimeError, match="broken on purpose"):
        list(execute_all(settings_of(tmp_path), unwatched))


def test_an_error_in_joint_training_is_raised_to_the_caller(tmp_path, monkeypatch):
    def broken(self, cohort, samples, plan):
        raise RuntimeError("the program is broken")

    monkeypatch.setattr(StackedEngine, "train", broken)
    with pytest.raises(RuntimeError, match="the program is broken"):
        list(execute_all(settings_of(tmp_path), unwatched))


@pytest.mark.parametrize("how", ["jointly", "in turns"])
def test_on_a_stop_all_seeds_are_saved_and_can_be_resumed(how, tmp_path, request):
    if how == "in turns":
        request.getfixturevalue("_large_steps")
    whole = [outcome for _, outcome in execute_all(settings_of(tmp_path, "whole"), unwatched)]

    def watching(settings):
        def watch(result):
            if result.record["round"] == 1:
                os.kill(os.getpid(), signal.SIGINT)

        return watch if settings.simulation.seed == 0 else lambda result: None

    with pytest.raises(Interrupted):
        list(execute_all(settings_of(tmp_path, "stopped"), watching))
    for seed, run in enumerate(whole):
        folder = tmp_path / "stopped" / f"seed-{seed}"
        assert len(Run(folder).rounds) < 3
        again = resume(folder)
        for row in range(5):
            one, other = run.personal_parameters(row=row), again.personal_parameters(row=row)
            assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_only_runs_that_differ_in_the_seed_are_grouped(tmp_path):
    first, second = settings_of(tmp_path, "a", 2), settings_of(tmp_path, "b", 2, "fedavg")
    other = settings_of(tmp_path, "c", 2, "fedrema", "--delta", "0.3")
    assert [len(group) for group in group_joint([*first, *second, *other])] == [2, 2, 2]


@pytest.mark.parametrize(
    ("method", "changes", "joint"),
    [
        ("fedrema", ["--data-seed", "7"], True),
        ("fedrema", ["--s", "0.7", "--delta", "0.2"], True),
        ("fedprox", ["--mu", "0.3"], True),
        ("fedavg", ["--partition", "dirichlet", "--alpha", "0.3"], False),  # clients of other sizes
        ("fedrema", ["--temperature", "0.4"], False),
        ("fedavg", ["--lr", "0.3"], False),
        ("fedavg", ["--samples", "30"], False),
        ("fedavg", ["--clients", "4"], False),
    ],
)
def test_runs_of_one_shape_are_grouped(method, changes, joint, tmp_path):
    one, other = settings_of(tmp_path, "a", 1, method), settings_of(tmp_path, "b", 1, method, *changes)
    assert len(group_joint([*one, *other])) == (1 if joint else 2)


def test_runs_with_class_weights_of_their_partition_are_not_grouped(tmp_path):
    words = ["--class-weights", "balanced"]
    one = settings_of(tmp_path, "a", 2, "fedavg", *words)
    other = settings_of(tmp_path, "b", 2, "fedavg", *words, "--data-seed", "1")
    assert [len(group) for group in group_joint([*one, *other])] == [2, 2]


def differing(method):
    """Return three variants of a method that differ in the settings that joint runs may differ in."""
    joint = [field.name for field in dataclasses.fields(method) if field.metadata.get("joint")]
    values = (0.3, 0.5, 0.9)
    return [dataclasses.replace(method, **dict.fromkeys(joint, value)) if joint else method for value in values]


# Of every kind: settings that may differ, alternating phases, hooks, memory, second models, adaptation, own steps.
KINDS = ("fedavg", "fedprox", "fedrema", "fedpac", "fedproto", "fedala", "per-fedavg", "scaffold", "ditto", "fedbabu")


@pytest.mark.parametrize("method", [registry()[name]() for name in KINDS], ids=label)
def test_joint_runs_on_other_partitions_with_other_settings_equal_separate_runs(method):
    federations = [make_federation(seed=seed) for seed in range(3)]
    joined = zip(differing(method), federations, strict=True)
    alone, jointly, sizes = run_jointly_each(list(joined))
    assert_same(alone, jointly)
    assert set(sizes) == {12}  # four clients of each run in every call


@pytest.mark.parametrize("method", [FedProx(), FedReMa(), FedPAC()], ids=label)
def test_the_settings_that_differ_matter(method):
    federation = make_federation()
    alone, jointly, _ = run_jointly_each([(each, federation) for each in differing(method)])
    assert_same(alone, jointly)
    states = [snapshot(state) for state, _ in jointly]
    assert not all(torch.equal(value, states[2][name]) for name, value in states[0].items())


def test_federations_of_other_shapes_are_trained_separately():
    small, large = make_federation(), make_federation(counts=[9, 9, 9, 9])
    alone, jointly, sizes = run_jointly_each([(FedAvg(), small), (FedAvg(), large)])
    assert_same(alone, jointly)
    assert set(sizes) == {4}


def test_hooks_that_do_not_read_the_moment_are_joint(monkeypatch):
    applied = []
    original = StackedEngine.apply_hook
    monkeypatch.setattr(
        StackedEngine, "apply_hook", lambda self, hook, cohort, samples: applied.append(len(cohort)) or
        original(self, hook, cohort, samples)
    )  # fmt: skip
    federations = [make_federation(seed=seed) for seed in range(3)]
    simulators = [make_simulator(FedPAC(), each, rounds=2) for each in federations]
    applied.clear()
    JointTraining(simulators[0].engine).run([functools.partial(run_with, each) for each in simulators])
    assert applied.count(12) == 4  # begin and end of two rounds


def test_replicates_of_a_grid_are_trained_jointly(tmp_path, monkeypatch):
    sizes = []
    original = StackedEngine.train
    monkeypatch.setattr(
        StackedEngine, "train", lambda self, cohort, *rest: sizes.append(len(cohort)) or original(self, cohort, *rest)
    )
    replicates = [
        dataclasses.replace(each, data=dataclasses.replace(each.data, data_seed=seed))
        for seed, each in enumerate(settings_of(tmp_path))
    ]
    done = [outcome for _, outcome in execute_all(replicates, unwatched)]
    assert set(sizes) == {15}
    assert len({run.manifest.federation.fingerprint for run in done}) == 3
    for seed, run in enumerate(done):
        single = execute(replicates[seed].placed(tmp_path / "single" / str(seed)))
        assert run.summary["best_accuracy"] == single.summary["best_accuracy"]
        assert [record["client_accuracy"] for record in run.rounds] == [
            record["client_accuracy"] for record in single.rounds
        ]


def test_as_many_seeds_train_jointly_as_fit_into_memory(tmp_path):
    settings = settings_of(tmp_path, "few", 3, "fedrema", "--memory", "0.00001")
    started = []

    def watching(each):
        started.append(each.simulation.seed)
        return lambda result: None

    finished = execute_all(settings, watching)
    next(finished)
    assert len(started) < 3
    assert len(list(finished)) == 2


def test_orders_of_unequal_length_are_padded():
    short = Order(np.ones((1, 1, 1, 2), np.int64), np.full((1, 1, 1), 2), np.array([1]), np.full((1, 1, 1), 7))
    long = Order(np.full((2, 3, 1, 4), 5), np.full((2, 3, 1), 4), np.array([3, 2]), np.full((2, 3, 1), 8))
    both = join_orders([short, long])
    assert both.index.shape == (3, 3, 1, 4)
    assert both.index[0, :, 0].tolist() == [[1, 1, 0, 0], [0] * 4, [0] * 4]
    assert both.sizes[0, :, 0].tolist() == [2, 0, 0]
    assert both.steps.tolist() == [1, 3, 2]
    assert both.keys[:, :, 0].tolist() == [[7, 0, 0], [8, 8, 8], [8, 8, 8]]
