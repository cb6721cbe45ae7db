"""A node that cannot connect says why, and what to do, on its console within ten seconds of its start."""

import shutil
import time

import pytest

pytest.importorskip("flwr")

from fedrema.base.processes import free_port
from fedrema.cli import main
from fedrema.deploy.connection import Cause, classify
from fedrema.deploy.setup import new_key
from fedrema.deploy.tls import fingerprint, make_authority
from tests.network.federation_of_processes import Processes

pytestmark = pytest.mark.network
SECONDS = 10.0


def seconds_until(network, name, words):
    """Return after how many seconds the console of a node that was just started contains words."""
    start = time.monotonic()
    network.wait(lambda: words in network.output(name), 60)
    return time.monotonic() - start


def test_causes_are_named_within_seconds_and_the_log_of_the_supernode_agrees(tmp_path):
    waiting = {"least_clients": 5, "wait_seconds": 900.0}  # the server waits longer than this test takes
    with Processes(tmp_path / "federation", "fedavg", nodes=5, rounds=99, **waiting) as network:
        unknown, foreign, twice, wrong, good = network.names
        network.start("server")
        network.wait(lambda: "may participate" in network.output("server"))
        time.sleep(3)
        new_key(network.node(unknown))
        (tmp_path / "other").mkdir()
        make_authority(tmp_path / "other", "another federation")
        shutil.copy(tmp_path / "other" / "ca.crt", network.node(foreign) / "ca.crt")
        network.start(twice)
        assert seconds_until(network, twice, "the node is connected to the server") < 60
        shutil.copytree(network.node(twice), network.node("copy"), ignore=shutil.ignore_patterns("state", "audit.*"))
        cases = {
            unknown: ("the server does not know this node's key: copy node.pub", [], Cause.KEY_REFUSED),
            foreign: ("certificate was issued by another authority: copy ca.crt", [], Cause.CERTIFICATE),
            "copy": ("already has a connection with this node's key: stop the other", [], Cause.KEY_REFUSED),
            wrong: ("no server listens at", ["--server", f"127.0.0.1:{free_port()}"], Cause.UNREACHABLE),
        }
        for name, (words, options, cause) in cases.items():
            network.start(name, *options)
            assert seconds_until(network, name, f"not connected: {words}" if name == wrong else words) < SECONDS, name
            log = network.node(name) / "state" / "supernode.log"
            network.wait(lambda log=log: log.exists(), 30)
            network.wait(
                lambda log=log, cause=cause: classify(log.read_text().splitlines()).cause is cause, 40
            )  # a real log
            network.processes[name].terminate()
        assert "Finished server process" not in "".join(network.output(name) for name in cases)
        key = fingerprint((network.node(unknown) / "node.pub").read_bytes())
        network.wait(lambda: f"rejected the key {key}: it is not registered" in network.output("server"), 10)
        rejected = {each["fingerprint"]: each["reason"] for each in network.status()["rejected_keys"]}
        assert rejected[key] == "it is not registered"
        assert "it is in use by a connected node" in rejected.values()
        # The check agrees, and does not disturb the connected node.
        assert main(["deploy", "check", str(network.node(twice))]) == 0
        assert main(["deploy", "check", str(network.node(unknown))]) == 2
        assert main(["deploy", "check", str(network.folder)]) == 0
        shutil.copy(network.node(unknown) / "node.pub", network.folder / "server" / "keys" / f"{unknown}.pub")
        network.wait(lambda: key not in str(network.status()["rejected_keys"]), 10)
        assert main(["deploy", "audit", str(network.folder)]) == 0
        assert good in {member["name"] for member in network.status()["members"]}
