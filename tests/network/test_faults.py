"""Faults of processes: each affects one round at most, and no state is lost."""

import os
import signal
import time

import pytest

from fedrema.cli import main
from fedrema.runs.checkpoint import load_state
from tests.network.federation_of_processes import Processes, command_lines

pytestmark = pytest.mark.network
MANY = 60
"""More rounds than any of these tests waits for."""


def participants(network, since):
    """Return the rows of the clients whose replies were used after a round."""
    return {row for record in network.records() if record["round"] > since for row in record["participants"]}


def heads(network, row):
    """Return the round of the server's checkpoint, and a client's personal parameters in it."""
    state = load_state(network.folder / "server" / "run" / "checkpoint" / "state.safetensors", None)
    return state.round, {name: value[row].tolist() for name, value in state.params.own.items()}


def test_a_node_that_is_killed_resumes_with_its_own_head(tmp_path):
    with Processes(tmp_path / "federation", rounds=MANY, round_seconds=30.0) as network:
        network.start_all()
        network.wait(lambda: {0, 1, 2} <= participants(network, 0))
        log = network.node("node-2") / "state" / "supernode.log"
        before = log.read_text().count("Receiving: train message")
        network.wait(lambda: log.read_text().count("Receiving: train message") > before)  # during a round
        network.kill_node("node-2")
        gone = network.rounds() + 1
        network.wait(lambda: network.rounds() >= gone)
        row = network.names.index("node-2")
        then, kept = heads(network, row)
        network.wait(lambda: network.rounds() >= gone + 1)
        later, still = heads(network, row)
        network.start("node-2")
        network.wait(lambda: row in participants(network, later))
        members = {member["name"]: member for member in network.status()["members"]}
    assert later > then
    assert kept
    assert still == kept  # its personal parameters did not change in its absence
    assert members["node-2"]["state"] == "online"
    records = network.records()
    without = [record for record in records if then <= record["round"] <= later]
    assert any("node-2" in record["rejected"] for record in without)
    assert all(row not in record["participants"] for record in without if record["round"] > then)
    assert "is lost" not in (network.node("node-2") / "node.log").read_text()


def test_no_process_of_a_killed_node_survives(tmp_path):
    with Processes(tmp_path / "federation", "fedavg", rounds=MANY) as network:
        network.start_all()
        network.wait(lambda: network.rounds() >= 1)
        name = str(network.node("node-2"))
        before = [line for _, line in command_lines() if name in line]
        executor, since = process_of(network, "node-2", "flower_executor"), network.rounds()
        network.wait(lambda: network.rounds() >= since + 2)
        assert process_of(network, "node-2", "flower_executor") == executor  # one process for all rounds
        os.kill(network.processes["node-2"].pid, signal.SIGKILL)  # the command only
        network.processes.pop("node-2").wait()
        network.wait(lambda: not [line for _, line in command_lines() if name in line], seconds=30.0)
    assert len(before) == 3
    assert not any("flwr-clientapp" in line or "flower-superexec" in line for line in before)


def process_of(network, node, word):
    """Return the ID of a node's process whose command line contains a word."""
    (found,) = [pid for pid, line in command_lines() if str(network.node(node)) in line and word in line]
    return found


def test_a_killed_executor_is_started_again(tmp_path):
    with Processes(tmp_path / "federation", "ditto", rounds=MANY, round_seconds=30.0) as network:
        network.start_all()
        network.wait(lambda: {0, 1, 2} <= participants(network, 0))
        os.kill(process_of(network, "node-2", "flower_executor"), signal.SIGKILL)
        since = network.rounds() + 1
        network.wait(lambda: 1 in participants(network, since))
    assert "The node's executor has exited" in network.output("node-2")
    assert "is lost" not in (network.node("node-2") / "node.log").read_text()


def test_a_node_that_never_answers_does_not_delay_the_others(tmp_path):
    with Processes(tmp_path / "federation", "fedavg", rounds=MANY, round_seconds=30.0, least_clients=2) as network:
        network.start_all()
        network.wait(lambda: {0, 1, 2} <= participants(network, 0))
        paused = [pid for pid, line in command_lines() if str(network.node("node-3")) in line and "supernode" in line]
        for pid in paused:
            os.kill(pid, signal.SIGSTOP)
        begun = network.rounds()
        network.wait(lambda: network.rounds() >= begun + 3)
        late = [record for record in network.records() if record["round"] > begun + 1]
        for pid in paused:
            os.kill(pid, signal.SIGCONT)
        again = network.rounds()
        network.wait(lambda: 2 in participants(network, again))
    assert paused
    assert late
    assert all(record["participants"] == [0, 1] for record in late)
    reasons = {record["rejected"].get("node-3", "") for record in network.records() if begun < record["round"] <= again}
    assert reasons - {""} <= {"no reply within 30 s", "it is disconnected"}
    assert reasons - {""}
    # Its late replies to completed rounds were never used: there is one record per round, in order.
    numbers = [record["round"] for record in network.records()]
    assert numbers == list(range(1, len(numbers) + 1))


def test_a_killed_server_resumes_with_the_next_round(tmp_path):
    with Processes(tmp_path / "federation", rounds=6) as network:
        network.start_all()
        network.wait(lambda: network.rounds() >= 2)
        assert network.kill("deploy", "server", str(network.folder / "server")) >= 1
        network.processes.pop("server").wait()
        closed = network.rounds()
        time.sleep(3)
        network.start("server")
        assert network.finish() == 0, network.output("server")
    assert f"the run resumes after round {closed} of 6" in (network.folder / "server" / "run.log").read_text()
    assert [record["round"] for record in network.records()] == [1, 2, 3, 4, 5, 6]
    assert all(record["participants"] for record in network.records())


def test_the_app_of_the_server_is_killed_and_started_again(tmp_path):
    with Processes(tmp_path / "federation", rounds=5) as network:
        network.start_all()
        network.wait(lambda: network.rounds() >= 2)
        assert network.kill("flwr-serverapp", f":{network.port + 1}") >= 1
        assert network.finish() == 0, network.output("server")
    assert [record["round"] for record in network.records()] == [1, 2, 3, 4, 5]


def test_an_outage_of_the_superlink_is_survived(tmp_path):
    with Processes(tmp_path / "federation", rounds=5) as network:
        network.start_all()
        network.wait(lambda: network.rounds() >= 2)
        end = time.monotonic() + 10
        while time.monotonic() < end:  # what restarts within ten seconds is killed again
            network.kill("fedrema.deploy.flower_superlink", f" {network.port} ")
            time.sleep(0.5)
        assert network.finish() == 0, network.output("server")
    assert "Flower's SuperLink has exited" in network.output("server")
    assert [record["round"] for record in network.records()] == [1, 2, 3, 4, 5]


def test_a_round_ends_in_time_while_the_superlink_is_gone(tmp_path):
    with Processes(tmp_path / "federation", "fedavg", rounds=3) as network:
        network.start_all()
        network.wait(lambda: network.rounds() >= 1, seconds=600.0)
        log = network.folder / "server" / "run.log"
        (keeper,) = [pid for pid, line in command_lines() if f"deploy server {network.folder}" in line]
        os.kill(keeper, signal.SIGSTOP)  # so that it is not restarted
        assert network.kill("fedrema.deploy.flower_superlink", f" {network.port} ") >= 1
        before = len(log.read_text())
        # Requests that were sent before the outage, or could not be sent, end with their round.
        network.wait(lambda: "no reply within 60 s" in log.read_text()[before:], seconds=180.0)
        gone = [
            line
            for _, line in command_lines()
            if "fedrema.deploy.flower_superlink" in line and str(network.port) in line
        ]
        os.kill(keeper, signal.SIGCONT)
        assert network.finish(600.0) == 0, network.output("server")
    assert gone == []
    assert [record["round"] for record in network.records()] == [1, 2, 3]


def test_raising_the_rounds_continues_after_the_last_one(tmp_path):
    with Processes(tmp_path / "federation", rounds=2) as network:
        network.start_all()
        assert network.finish(600.0) == 0, network.output("server")
        ended = network.records()
        settings = network.folder / "server" / "app" / "pyproject.toml"
        settings.write_text(settings.read_text().replace("rounds = 2\n", "rounds = 4\n"))
        for name in network.names:  # the owners approve more rounds, while their nodes are running
            plan = network.node(name) / "plan.toml"
            plan.write_text(plan.read_text().replace("rounds = 2\n", "rounds = 4\n"))
            network.approve(name)
        network.start("server")
        assert network.finish(600.0) == 0, network.output("server")
    assert "the run resumes after round 2 of 4" in (network.folder / "server" / "run.log").read_text()
    assert network.records()[:2] == ended
    assert [record["round"] for record in network.records()] == [1, 2, 3, 4]


def test_a_client_joins_late(tmp_path, capsys):
    with Processes(tmp_path / "federation", "fedrema", rounds=MANY) as network:
        network.start_all()
        network.wait(lambda: network.rounds() >= 2)
        assert main(["deploy", "add", str(network.folder), "late"]) == 0
        (network.node("late") / "data.npz").write_bytes((network.node("node-1") / "data.npz").read_bytes())
        network.approve("late")
        network.start("late")
        network.wait(lambda: "late may participate" in network.output("server"))
        network.wait(lambda: any(3 in record["participants"] for record in network.records()))
        assert {member["name"] for member in network.status()["members"]} == {*network.names, "late"}
        # Without its key it no longer takes part.
        (network.folder / "server" / "keys" / "late.pub").unlink()
        network.wait(lambda: "late can no longer participate" in network.output("server"))
        since = network.rounds() + 1
        network.wait(lambda: network.records()[-1]["round"] > since + 1)
        last = network.records()[-1]
    capsys.readouterr()
    assert last["participants"] == [0, 1, 2]


def test_the_server_waits_for_too_few_nodes_and_then_stops(tmp_path):
    with Processes(tmp_path / "federation", "fedavg", least_clients=3, wait_seconds=20.0) as network:
        for name in ("server", "node-1", "node-2"):
            network.start(name)
        assert network.finish() == 2
    printed = network.output("server")
    assert "the server waits for nodes; connected: " in printed
    assert "Only 2 of at least 3 nodes were connected after 20 s (node-1, node-2)" in printed
