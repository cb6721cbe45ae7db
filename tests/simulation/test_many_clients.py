"""More clients than fit into memory: trained in groups and stored on disk, with results equal to the bit."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedrema.core import LocalTraining, Simulation
from fedrema.errors import BadInput
from fedrema.methods.fedavg import FedAvg
from fedrema.methods.fedrema import FedReMa
from fedrema.simulation.simulator import Simulator
from fedrema.simulation.state import Rows, RowStorage, assign
from tests import fixtures
from tests.contract.test_methods import METHODS
from tests.fixtures import label, make_federation, network, run_all, snapshot

LOCAL = LocalTraining(epochs=1, batch=5, lr=0.05)
CLIENTS = 40
"""More than one group of 32, also when a tenth of them is absent."""
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def many():
    counts = np.random.default_rng(0).integers(4, 12, CLIENTS).tolist()
    return make_federation(counts=counts)


def run_simulation(method, federation, **settings):
    chosen = {"rounds": 2, "precision": "float32", "backend": "auto", **settings}
    simulator = fixtures.make_simulator(method, federation, LOCAL, **chosen)
    return simulator, *run_all(simulator)


def without_time(records):
    return [replace(record, seconds={}) for record in records]


@pytest.mark.parametrize("method", METHODS, ids=label)
@pytest.mark.parametrize("backend", ["loop", "stacked"])
def test_results_in_groups_and_on_disk_are_bit_identical(method, backend, many):
    settings = {"backend": backend, "participation": 0.9, "record": "none"}
    whole, state, records = run_simulation(method, many, chunk=1000, **settings)
    assert not whole.storage.on_disk
    cut, chunked, chunked_records = run_simulation(method, many, chunk=20, memory=1e-6, **settings)
    assert cut.chunk == 32
    assert cut.storage.on_disk == bool(chunked.params.own or chunked.velocity or chunked.memory)
    expected, found = snapshot(state), snapshot(chunked)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name
    assert without_time(records) == without_time(chunked_records)


def test_relations_are_the_same_in_groups(many):
    for method in (FedAvg(), FedReMa()):
        net = network(many)
        found = []
        for chunk in (0, 32):
            settings = Simulation(rounds=2, seed=3, device="cpu", record="relations", chunk=chunk)
            simulator = Simulator(method, net, many, LOCAL, settings)
            found.append([result.relations for result in simulator.run(simulator.start())])
        for one, other in zip(*found, strict=True):
            assert one.keys() == other.keys()
            assert all(np.array_equal(one[name], other[name]) for name in one)


def test_a_run_on_disk_can_be_resumed(many, tmp_path):
    from fedrema.runs.checkpoint import load_state, save_state

    settings = {"memory": 1e-6, "chunk": 32, "scratch": tmp_path}
    simulator, state, _ = run_simulation(FedReMa(), many, rounds=1, **settings)
    save_state(state, tmp_path / "state.safetensors", "test")
    _, expected, _ = run_simulation(FedReMa(), many, rounds=3, **settings)
    later = Simulator(FedReMa(), simulator.net, many, LOCAL, Simulation(rounds=3, seed=3, device="cpu", **settings))
    state = later.adopt(load_state(tmp_path / "state.safetensors", "test"))
    assert later.storage.on_disk
    list(later.run(state))
    wanted, found = snapshot(expected), snapshot(state)
    assert all(torch.equal(value, found[name]) for name, value in wanted.items())
    assert [file.name for file in tmp_path.iterdir()] == ["state.safetensors"]  # scratch files have no names


def test_a_failed_round_does_not_change_the_state_on_disk(many):
    from fedrema.errors import Diverged

    simulator, state, _ = run_simulation(FedReMa(), many, rounds=1, memory=1e-6, chunk=32)
    before = snapshot(state)
    simulator.local = LocalTraining(epochs=3, batch=5, lr=1e30, clip=0)
    with pytest.raises(Diverged):
        simulator.run_round(state)
    after = snapshot(state)
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_as_many_clients_as_memory_allows_are_trained_at_once(many):
    sizes = [
        run_simulation(FedAvg(), many, rounds=1, memory=memory, backend="stacked")[0].chunk
        for memory in (1e-6, 1.0, 10.0)
    ]
    assert sizes[0] == 32
    assert sizes[0] < sizes[1] < sizes[2]
    assert all(size % 32 == 0 for size in sizes)


def test_files_are_ordinary_tensors_and_survive_a_release(tmp_path):
    storage = RowStorage(CPU, on_disk=True, folder=tmp_path)
    rows = storage.zeros(1000, torch.zeros(300, dtype=torch.float32))
    rows[:] = torch.arange(1000.0)[:, None]
    storage.release()
    assert torch.equal(rows[:, 7], torch.arange(1000.0))
    kept = storage.keep(rows[10:20])
    rows[15] = -1
    storage.release()
    assert kept[:, 0].tolist() == list(range(10, 20))
    assert list(tmp_path.iterdir()) == []
    assert storage.zeros(0, torch.zeros(3)).shape == (0, 3)


def test_rows_with_an_entry_per_sample_may_differ_in_length():
    for on_disk in (False, True):
        rows = Rows(5, RowStorage(CPU, on_disk))
        rows.put(0, {"loss": torch.ones(2, 3)})
        rows.put(2, {"loss": 2 * torch.ones(2, 4)})
        rows.put(4, {"loss": 3 * torch.ones(1, 2)})
        assert rows.tensors["loss"].tolist() == [[1, 1, 1, 0]] * 2 + [[2] * 4] * 2 + [[3, 3, 0, 0]]
    everyone = torch.ones(3, 4)
    assign(everyone, torch.tensor([2]), torch.full((1, 2), 5.0))
    assert everyone.tolist() == [[1] * 4] * 2 + [[5, 5, 0, 0]]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"chunk": -1}, "--chunk must be 0 or more, got -1"),
        ({"memory": 0.0}, "--memory must be above 0, got 0.0"),
        ({"scratch": Path("nowhere")}, "--scratch nowhere is not a folder"),
    ],
)
def test_invalid_settings_are_refused(settings, sentence):
    with pytest.raises(BadInput, match=sentence):
        Simulation(**settings)


def test_a_scratch_folder_that_cannot_be_written_is_named(tmp_path):
    storage = RowStorage(CPU, on_disk=True, folder=tmp_path / "gone")
    with pytest.raises(BadInput, match=r"--scratch .*gone cannot hold"):
        storage.zeros(2, torch.zeros(3))
