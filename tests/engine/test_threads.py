"""Threads per operation: a fixed rule, recorded with a run, used again on resume; torch's own setting is restored."""

from typing import ClassVar

import numpy as np
import pytest
import torch

import fedrema
from fedrema.cli import main
from fedrema.cli.arguments import parse_settings
from fedrema.config.presets import PRESETS
from fedrema.core import LocalTraining
from fedrema.data import Federation
from fedrema.deploy.node import Node
from fedrema.engine import LoopEngine, StackedEngine, backends
from fedrema.engine.backends import threads_per_operation
from fedrema.engine.costs import operations_per_step
from fedrema.engine.devices import torch_threads
from fedrema.errors import BadInput
from fedrema.methods.fedavg import FedAvg
from fedrema.methods.fedrema import FedReMa
from fedrema.models.networks import Network, build_net
from fedrema.runs.checkpoint import read_checkpoint
from fedrema.runs.execute import build_simulator, prepare_resumed
from tests.fixtures import make_federation, tanh_module, tanh_simulator


@pytest.fixture
def four_threads():
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(1)


class Watching(FedAvg):
    """Records how many threads torch uses in each hook."""

    seen: ClassVar[set[int]] = set()

    def loss(self, net, client, batch):
        self.seen.add(torch.get_num_threads())
        return super().loss(net, client, batch)

    def aggregate(self, net, state, uploads, moment):
        self.seen.add(torch.get_num_threads())
        return super().aggregate(net, state, uploads, moment)

    def predict(self, net, client, x):
        self.seen.add(torch.get_num_threads())
        return super().predict(net, client, x)


def auto_simulator(method, hidden=9, **settings):
    local = LocalTraining(epochs=1, batch=5, lr=0.05)
    chosen = {"precision": "auto", "rounds": 2, **settings}
    return tanh_simulator(method, chosen.pop("backend", "auto"), local, tanh_module(hidden=hidden), **chosen)


@pytest.mark.parametrize("backend", ["stacked", "loop"])
def test_small_networks_train_score_and_aggregate_with_one_thread(backend, four_threads):
    Watching.seen.clear()
    small = auto_simulator(Watching(), backend=backend)
    for _ in small.run(small.start()):
        assert torch.get_num_threads() == 4  # between rounds torch has the caller's setting
    assert Watching.seen == {1}
    assert small.threads == 1


@pytest.mark.parametrize("backend", ["stacked", "loop"])
def test_the_requested_number_is_used_and_torchs_setting_restored(backend, four_threads):
    Watching.seen.clear()
    asked = auto_simulator(Watching(), backend=backend, threads=3)
    list(asked.run(asked.start()))
    assert Watching.seen == {3}
    assert torch.get_num_threads() == 4


def test_torchs_setting_is_restored_when_a_round_fails(four_threads):
    class Broken(FedAvg):
        def aggregate(self, net, state, uploads, moment):
            raise RuntimeError("broken")

    broken = auto_simulator(Broken())
    with pytest.raises(BadInput, match="RuntimeError: broken"):
        list(broken.run(broken.start()))
    assert torch.get_num_threads() == 4


@pytest.mark.parametrize(
    ("stacked", "operations", "clients", "side_by_side", "wanted"),
    [
        (True, 1e6, 20, 4, 1),
        (True, 29e6, 1000, 4, 4),  # enough clients to share the work of an operation
        (False, 1e6, 1, 1, 1),
        (False, 1e9, 20, 4, 1),  # one client per core
        (False, 1e9, 1, 1, 4),
        (False, 1e9, 2, 2, 2),
    ],
)
def test_the_rule_depends_on_the_work_and_never_exceeds_torchs_limit(
    stacked, operations, clients, side_by_side, wanted, four_threads
):
    assert threads_per_operation(stacked, operations, clients, side_by_side) == wanted
    with torch_threads(1):
        assert threads_per_operation(stacked, operations, clients, 1) == 1


@pytest.mark.parametrize(
    ("network", "shape", "wanted"),
    [
        ("mlp", (64,), 3 * 2 * (64 * 32 + 32 * 10)),  # 32: the default of --hidden
        ("cnn", (1, 28, 28), 24.7e6),
        ("lstm", (32, 96), 3 * 2 * (32 * 4 * 128 * (96 + 128) + 128 * 10)),  # four gates of 128 units
        ("gru", (3, 32, 32), 3 * 2 * (32 * 3 * 128 * (96 + 128) + 128 * 10)),
        ("alexnet", (3, 32, 32), 417.2e6),  # both as torch counts them, without the first layer's gradient to its input
    ],
)
def test_the_estimate_of_operations_is_accurate_enough_for_the_rule(network, shape, wanted):
    net = build_net(Network(net=network), shape, 10, seed=0)
    assert operations_per_step(net, torch.zeros(1, *shape), 1) == pytest.approx(wanted, rel=0.05)
    assert operations_per_step(net, torch.zeros(1, *shape), 7) == pytest.approx(7 * wanted, rel=0.05)


def states(method, **settings):
    simulator = auto_simulator(method, **settings)
    state = simulator.start()
    list(simulator.run(state))
    return {**state.params.common, **state.params.own}


@pytest.mark.parametrize("settings", [{"backend": "stacked"}, {"backend": "loop"}, {"backend": "loop", "threads": 1}])
@pytest.mark.parametrize("hidden", [9, 900])
def test_results_with_one_thread_per_operation_do_not_depend_on_the_number_of_cores(hidden, settings):
    found = []
    for cores in (1, 2, 4):
        with torch_threads(cores):
            found.append(states(FedReMa(), hidden=hidden, **settings))
    for other in found[1:]:
        assert all(torch.equal(value, other[name]) for name, value in found[0].items())


def test_the_recorded_choice_is_used_on_a_machine_that_would_choose_otherwise(tmp_path, monkeypatch):
    options = {"rounds": 2, "hidden": 8, "device": "cpu", "epochs": 1}
    whole = fedrema.run("fedrema", out=tmp_path / "whole", **{**options, "rounds": 4})
    begun = fedrema.run("fedrema", out=tmp_path / "begun", **options)
    assert begun.config["ran_on"]["backend"] == "stacked"
    assert begun.config["ran_on"]["threads_per_operation"] == 1
    monkeypatch.setattr(backends, "SMALL_STEP", 0.0)
    monkeypatch.setattr(backends, "threads_per_operation", lambda *_: 3)
    fresh = build_simulator(parse_settings("fedrema", ["--device", "cpu"]), make_federation())
    assert isinstance(fresh.engine, LoopEngine)
    assert fresh.threads == 3
    assert isinstance(prepare_resumed(tmp_path / "begun").simulator.engine, StackedEngine)
    done = fedrema.resume(tmp_path / "begun", rounds=4)
    file = "checkpoint/state.safetensors"
    ours, theirs = (read_checkpoint(run.path / file)[1] for run in (done, whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


@pytest.mark.parametrize(("backend", "threads"), [("stacked", 4), ("loop", 1), ("loop", 9)])
def test_a_run_continues_with_the_backend_and_the_threads_that_it_recorded(tmp_path, backend, threads):
    run = fedrema.run("fedavg", out=tmp_path / "run", rounds=1, hidden=4, device="cpu", backend=backend)
    config = run.directory.config()
    config["ran_on"]["threads_per_operation"] = threads
    config["settings"] |= {"backend": "auto"}
    run.directory.write_json(run.directory.config_file, config)
    taken = prepare_resumed(run.path, {"rounds": 2}).simulator
    assert (taken.engine.name, taken.threads) == (backend, threads)
    assert prepare_resumed(run.path, {"rounds": 2, "threads": 2}).simulator.threads == 2


def test_demonstration_and_presets_set_their_number_of_threads(tmp_path, capsys):
    assert all(preset.common["threads"] == 1 for preset in PRESETS.values())
    options = ["--rounds", "1", "--hidden", "4", "--seeds", "1", "--epochs", "1", "--device", "cpu", "--quiet"]
    assert main(["run", *options, "--out", str(tmp_path / "demo")]) == 0
    runs = [fedrema.load(tmp_path / "demo" / name) for name in ("local", "fedavg", "fedrema")]
    assert [run.settings["threads"] for run in runs] == [1, 1, 1]


def test_threads_are_not_part_of_the_identity(tmp_path):
    one, three = (
        fedrema.run("fedavg", out=tmp_path / str(threads), rounds=1, hidden=4, device="cpu", threads=threads)
        for threads in (1, 3)
    )
    assert one.config["identity"] == three.config["identity"]


def test_a_negative_number_is_refused(capsys):
    assert main(["run", "fedavg", "--threads", "-1"]) == 2
    assert capsys.readouterr().err == "fedrema: --threads must be 0 or more, got -1.\n"


def test_a_deployed_node_follows_the_same_rule(four_threads):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(20, 6)).astype(np.float32)
    samples = Federation.from_arrays(x, np.arange(20) % 4, ["north"] * 20, classes=4)
    node = Node(parse_settings("fedavg", ["--device", "cpu", "--hidden", "5"], plain=True), samples)
    assert node.simulator.threads == 1
