"""Real processes whose nodes have one table each: the models equal those of the simulator."""

import subprocess

import pytest
import torch

pytest.importorskip("flwr")

from fedrema.base.processes import free_port
from fedrema.runs.checkpoint import load_state
from fedrema.runs.run import Run
from tests.deploy.tables import NAMES, Tables
from tests.deploy.test_tables import simulated
from tests.network.federation_of_processes import FEDREMA, Processes

pytestmark = pytest.mark.network


class TableProcesses(Processes):
    """Processes of a federation that `fedrema deploy init` created for tables."""

    def __init__(self, folder, task, **made):
        self.port = free_port()
        place = ("--host", "127.0.0.1", "--port", str(self.port), "--round-seconds", "60")
        self.made = Tables(folder, task, more=place, wait=120, **made)
        self.folder, self.names, self.processes = folder, NAMES, {}
        self.approve_all()


@pytest.mark.parametrize("task", ["regression", "binary"])
def test_models_equal_those_of_the_simulator(task, tmp_path):
    with TableProcesses(tmp_path / "federation", task) as network:
        network.start_all()
        assert network.finish() == 0, network.output("server")
        status = network.status()
    _, state, records = simulated(network.made)
    run = Run(network.folder / "server" / "run")
    there = load_state(run.path / "checkpoint" / "state.safetensors", None).params
    assert there.common.keys() == state.params.common.keys()
    for name, value in state.params.common.items():
        torch.testing.assert_close(there.common[name], value, rtol=0, atol=1e-6)
    primary = records[-1].primary.value
    assert run.rounds[-1].primary.value == pytest.approx(primary, rel=1e-9)
    assert status["metric"] == {"regression": "rmse", "binary": "accuracy"}[task]
    assert status["value"] == run.rounds[-1].primary.value
    assert all(record.participants == [0, 1, 2] for record in run.rounds)
    for name in network.names:
        subprocess.run([*FEDREMA, "deploy", "model", str(network.node(name))], check=True, capture_output=True)


def test_a_node_with_another_column_is_shown_in_the_status(tmp_path):
    change = {"south": lambda row: {**row, "name": "somebody"}}
    with TableProcesses(tmp_path / "federation", "regression", least=2, change=change) as network:
        network.start_all()
        assert network.finish() == 0, network.output("server")
        members = {member["name"]: member for member in network.status()["members"]}
    assert "its table has a column that the federation does not have" in members["south"]["problem"]
    assert members["south"]["last_round"] == 0
    assert members["north"]["last_round"] == 3
    log = (network.folder / "server" / "run.log").read_text()
    assert "before round 1: no usable statistics from node south: " in log
