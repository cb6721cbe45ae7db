"""Secure aggregation with real processes: nodes that are killed between its stages, and equality with the simulator."""

import pytest
import torch

pytest.importorskip("flwr")

from fedrema.data import build_federation
from fedrema.deploy.flower_records import MASK, UNMASK
from fedrema.runs.checkpoint import load_state
from fedrema.runs.execute import build_simulator
from tests.network.federation_of_processes import Processes

pytestmark = pytest.mark.network
SECURE = ("--secure-aggregation",)


def common(network):
    """Return the round of the server's checkpoint, and the shared parameters in it."""
    state = load_state(network.folder / "server" / "run" / "checkpoint" / "state.safetensors", None)
    return state.round, state.params.common


def simulated(network, missing):
    """Return the shared parameters after all rounds of the simulator; `missing` are rows without uploads, by round."""
    simulator = build_simulator(network.settings, build_federation(network.settings.data))
    everyone = list(range(len(network.names)))

    def choose(number):
        absent = missing.get(number, set())
        return [row for row in everyone if row not in absent], sorted(absent)

    simulator.participation.choose = choose
    state = simulator.start()
    for _ in simulator.run(state):
        pass
    return state.params.common


def test_the_result_is_bit_identical_to_the_simulators(tmp_path):
    with Processes(tmp_path / "federation", "fedavg", rounds=3, more=SECURE) as network:
        network.start_all()
        assert network.finish() == 0, network.output("server")
    number, found = common(network)
    assert number == 3
    for name, value in simulated(network, {}).items():
        assert torch.equal(found[name], value), name


DIES = """
import os, signal, sys

if any("flower_executor" in word for word in sys.orig_argv):
    from fedrema.deploy.flower_secure_node import SecureNode

    answer = SecureNode.answer

    def dies(self, message):
        if (message.metadata.message_type, self.session and self.session.number) == ({stage!r}, {number}):
            os.kill(os.getpid(), signal.SIGKILL)
        return answer(self, message)

    SecureNode.answer = dies
"""
"""Placed in a node's folder, it kills the node's real executor when a stage is asked for; Python imports it first."""


def test_nodes_that_are_killed_between_stages_do_not_stop_the_round(tmp_path):
    # In round 3, two of three nodes have to be enough, if the first one is not back by then.
    more = {"nodes": 4, "rounds": 3, "more": SECURE, "round_seconds": 25.0, "secure_threshold": 0.5}
    with Processes(tmp_path / "federation", "fedavg", **more) as network:
        # One dies after its shares were distributed, the other after its masked parameters were sent.
        for name, stage, number in (("node-2", MASK, 2), ("node-3", UNMASK, 3)):
            (network.node(name) / "sitecustomize.py").write_text(DIES.format(stage=stage, number=number))
        network.start_all()
        assert network.finish() == 0, network.output("server")
    records = network.records()
    missing = {record["round"]: {0, 1, 2, 3} - set(record["participants"]) for record in records}
    assert (missing[1], missing[2]) == (set(), {1})
    assert missing[3] <= {1}  # it may need more time to come back
    assert "node-2" in records[1]["rejected"]
    assert all(record.nodes.attempts == [] for record in records)  # no round was repeated
    for name in ("node-2", "node-3"):
        assert "The node's executor has exited" in network.output(name)
    assert [record.secure_sum.samples for record in records] == [20 * len(record["participants"]) for record in records]
    number, found = common(network)
    assert number == 3
    for name, value in simulated(network, missing).items():
        assert torch.equal(found[name], value), name
    assert "node node-3 did not help to unmask the sum" in (network.folder / "server" / "run.log").read_text()
