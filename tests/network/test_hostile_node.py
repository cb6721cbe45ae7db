"""A node with a real key that lies over the real network: every lie is rejected, and the others train on."""

import re
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedrema.base.processes import stopped_on_exit
from fedrema.cli import main
from fedrema.deploy.folder import NodeFolder
from fedrema.deploy.node_service import node_processes
from tests.network.federation_of_processes import Processes, command_lines

pytestmark = pytest.mark.network
HOSTILE = "node-2"
ROUNDS, SECONDS = 10, 45
SENTENCES = {
    2: "not finite",
    3: "has shape",
    4: "is missing",
    5: "times",
    6: "samples",
    7: "round 1",
    8: "it has more than",
    9: f"no reply within {SECONDS} s",
}
"""Words of the reason for which the reply of a round is rejected."""
MOST_GROWTH = {"SuperLink": 200_000_000, "app": 50_000_000}
"""Bytes by which the server's memory may grow while replies of 500 MB arrive."""


def peak_memory(network):
    """Return the largest memory so far, in bytes, of the SuperLink and of the server's app."""
    peaks = {}
    for pid, line in command_lines():
        for name, words in {
            "SuperLink": ("flower_superlink", str(network.folder)),
            "app": ("flwr-serverapp", f":{network.port + 1}"),
        }.items():
            if all(word in line for word in words):
                status = Path(f"/proc/{pid}/status").read_text()
                peaks[name] = int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024
    return peaks


def test_every_lie_of_a_node_is_rejected_and_the_others_complete_the_run(tmp_path, capsys):
    settings = {"rounds": ROUNDS, "least_clients": 2, "round_seconds": float(SECONDS)}
    with Processes(tmp_path / "federation", "fedavg", **settings) as network:
        folder = NodeFolder.open(network.node(HOSTILE))
        folder.kept.mkdir(mode=0o700, exist_ok=True)
        supernode, executor = node_processes(folder)
        executor.arguments[1:3] = [str(Path(__file__).with_name("hostile_executor.py"))]
        with stopped_on_exit(supernode, executor):
            network.start("server")
            network.wait(lambda: f"{HOSTILE} may participate" in network.output("server"))
            supernode.start()
            executor.start()
            # It is connected before the first round: its honest reply of round 1 is replayed later.
            network.wait(lambda: is_online(network))
            network.start("node-1")
            network.start("node-3")
            network.wait(lambda: network.rounds() >= 7)
            before = peak_memory(network)
            network.wait(lambda: network.rounds() >= 9)
            after = peak_memory(network)
            members = {member["name"]: member for member in network.status()["members"]}
            assert network.finish() == 0, network.output("server")
    records = {record["round"]: record for record in network.records()}
    assert set(records) == set(range(1, ROUNDS + 1))
    assert all({"node-1", "node-3"}.isdisjoint(record["rejected"]) for record in records.values())
    log = (network.folder / "server" / "run.log").read_text()
    # The replayed reply also carries an old line of the node's audit log, which counts as damage.
    assert main(["deploy", "audit", str(network.folder / "server"), "--site", HOSTILE]) == 2
    printed = capsys.readouterr()
    audit = printed.out
    assert f"records earlier damage of {HOSTILE}'s log" in printed.err
    for number, words in SENTENCES.items():
        reason = records[number]["rejected"].get(HOSTILE, "")
        assert words in reason, (number, records[number]["rejected"])
        assert f"round {number}: no usable reply from node {HOSTILE}: {reason}" in log
        assert reason in " ".join(audit.split()), number
    assert HOSTILE not in records[1]["rejected"]
    assert members[HOSTILE]["problem"]
    assert before.keys() == after.keys() == {"SuperLink", "app"}
    growth = {name: after[name] - before[name] for name in before}
    print("growth of the server's memory in MB:", {name: round(size / 1e6) for name, size in growth.items()})
    assert all(growth[name] < MOST_GROWTH[name] for name in growth), growth


def is_online(network):
    """Return whether the hostile node is connected."""
    log = network.node(HOSTILE) / "state" / "supernode.log"
    return log.exists() and "SuperNode ID" in log.read_text()
