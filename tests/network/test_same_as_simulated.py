"""Real processes, TLS and keys: the models equal those of the simulator, and no process is left."""

import json
import subprocess

import pytest

from fedrema.data import build_federation
from fedrema.runs.execute import build_simulator
from tests.deploy.test_models import loaded
from tests.fixtures import RANDOM_NETWORKS
from tests.network.federation_of_processes import FEDREMA, Processes, assert_same_as_simulated, command_lines

pytestmark = pytest.mark.network


@pytest.mark.parametrize("method", ["fedrema", "fedavg", *(f"fedavg --net {net}" for net in RANDOM_NETWORKS)])
def test_personal_models_equal_those_of_the_simulator(method, tmp_path):
    method, *more = method.split()
    with Processes(tmp_path / "federation", method, more=more, least_clients=3) as network:
        network.start_all()
        assert network.finish() == 0, network.output("server")
        assert network.status()["state"] == "finished"
    assert_same_as_simulated(network)
    assert not [line for _, line in command_lines() if str(tmp_path) in line]


@pytest.mark.parametrize("method", ["ditto", "fedrema"])
def test_a_node_writes_a_model_with_the_accuracy_that_the_server_recorded(method, tmp_path):
    with Processes(tmp_path / "federation", method, rounds=2, least_clients=3) as network:
        network.start_all()
        assert network.finish() == 0, network.output("server")
    records, federation = network.records(), build_federation(network.settings.data)
    test = build_simulator(network.settings, federation).test
    for row, name in enumerate(network.names):
        command = [*FEDREMA, "deploy", "model", str(network.node(name))]
        subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)
        folder = network.node(name) / "model"
        index = json.loads((folder / "index.json").read_text())
        assert (index["round"], index["clients"][0]["accuracy"]) == (2, records[-1]["client_accuracy"][row])
        batch = test.of(row)
        assert float((loaded(folder, batch.x) == batch.y).double().mean()) == records[-1]["client_accuracy"][row]
    exported = subprocess.run(
        [*FEDREMA, "export", str(network.folder / "server" / "run")], check=True, capture_output=True, text=True
    )
    assert ("fedrema deploy model NODE_FOLDER" in exported.stdout) == (method == "ditto")
