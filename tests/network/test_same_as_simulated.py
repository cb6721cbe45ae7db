"""Real processes, TLS and keys: the models are those of the simulator, and nothing is left behind."""

import pytest
import torch

from fedrema.data import build_federation
from fedrema.runs.checkpoint import load_world
from fedrema.runs.execute import prepare
from fedrema.runs.run import Run
from tests.network.federation_of_processes import Processes, command_lines

pytestmark = pytest.mark.network


@pytest.mark.parametrize("method", ["fedrema", "fedavg"])
def test_personal_models_are_those_of_the_simulator(method, tmp_path):
    with Processes(tmp_path / "federation", method, least_clients=3) as network:
        network.start_all()
        assert network.finish() == 0, network.said("server")
        assert network.status()["state"] == "finished"
    simulator = prepare(network.settings, build_federation(network.settings.data))
    world = simulator.start()
    records = [played.record for played in simulator.play(world)]
    run = Run(network.folder / "server" / "run")
    there = load_world(run.path / "checkpoint" / "world.safetensors", None).params
    assert there.common.keys() == world.params.common.keys()
    assert there.own.keys() == world.params.own.keys()
    for name, value in world.params.common.items():
        torch.testing.assert_close(there.common[name], value, rtol=0, atol=1e-6)
    for name, value in world.params.own.items():
        torch.testing.assert_close(there.own[name][: len(value)], value, rtol=0, atol=1e-6)
    assert [record["accuracy"] for record in run.rounds] == [record["accuracy"] for record in records]
    assert all(record["participants"] == [0, 1, 2] for record in run.rounds)
    assert not [line for _, line in command_lines() if str(tmp_path) in line]
