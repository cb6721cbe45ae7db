"""Nodes without a registered key, without TLS or with another authority never take part."""

import shutil
import socket
import ssl
import sys
import urllib.error
import urllib.request

import pytest

pytest.importorskip("flwr")

from fedrema.base.processes import SupervisedProcess, free_port, stopped_on_exit
from fedrema.deploy.node_service import flower_environment
from fedrema.deploy.setup import new_key
from fedrema.deploy.tls import make_authority
from tests.network.federation_of_processes import Processes

pytestmark = pytest.mark.network


def supernode(network, *arguments):
    """Return a SuperNode that is not part of the federation."""
    own = flower_environment(network.folder / "stranger", network.folder)
    command = [sys.executable, "-m", "fedrema.deploy.flower_supernode", "--superlink", f"127.0.0.1:{network.port}"]
    command += ["--port", str(free_port()), *arguments]
    log = network.folder / f"stranger{len(arguments)}{arguments[-1].replace('/', '-')}.log"
    return SupervisedProcess("a stranger", command, own, log)


def test_strangers_never_take_part(tmp_path):
    with Processes(tmp_path / "federation", "fedavg", rounds=4, least_clients=3) as network:
        network.start_all()
        network.wait(lambda: network.rounds() >= 1)
        authority = str(network.folder / "server" / "ca.crt")
        foreign = tmp_path / "foreign"
        foreign.mkdir()
        make_authority(foreign, "another federation")
        unknown = tmp_path / "unknown"
        shutil.copytree(network.node("node-1"), unknown)
        new_key(unknown)  # a key that the server does not know
        node_1 = str(network.node("node-1") / "node.key")
        strangers = {
            "a key that is not registered": supernode(
                network, "--root-certificates", authority, "--auth-supernode-private-key", str(unknown / "node.key")
            ),
            "no key": supernode(network, "--root-certificates", authority),
            "no TLS": supernode(network, "--insecure"),
            "another authority": supernode(
                network, "--root-certificates", str(foreign / "ca.crt"), "--auth-supernode-private-key", node_1
            ),
        }
        with stopped_on_exit(*strangers.values()):
            for stranger in strangers.values():
                stranger.supervise()
            network.wait(lambda: network.rounds() >= 3)
            members = {member["name"] for member in network.status()["members"]}
        logs = {why: stranger.log.read_text() for why, stranger in strangers.items()}
        assert members == set(network.names), logs
        assert network.finish() == 0
    assert all(record["participants"] == [0, 1, 2] for record in network.records())
    assert not any("SuperNode ID" in words for words in logs.values()), logs
    assert all(logs.values())


def test_only_the_interface_for_nodes_is_open(tmp_path):
    with Processes(tmp_path / "federation", "fedavg") as network:
        network.start("server")
        context = ssl.create_default_context(cafile=network.folder / "server" / "ca.crt")
        base = f"https://127.0.0.1:{network.port}"
        network.wait(lambda: "may participate" in network.output("server"))
        for path in ("/v1/control/register-node", "/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/"):
            for method in ("POST", "GET"):
                request = urllib.request.Request(base + path, data=b"" if method == "POST" else None, method=method)
                with pytest.raises(urllib.error.HTTPError) as refused:
                    urllib.request.urlopen(request, context=context)
                assert refused.value.code == 404, path
                refused.value.close()
        # The same paths exist where only this machine can reach them.
        request = urllib.request.Request(f"https://127.0.0.1:{network.port + 1}/v1/control/start-run", data=b"")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, context=context)
        assert refused.value.code != 404
        refused.value.close()
        # Clients that do not trust the federation's authority refuse the connection.
        with pytest.raises(ssl.SSLCertVerificationError):
            ssl.create_default_context().wrap_socket(
                socket.create_connection(("127.0.0.1", network.port)), server_hostname="127.0.0.1"
            )
