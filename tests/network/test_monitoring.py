"""A real federation that is watched over TLS, whose certificate is renewed, and which forgets a node."""

import os
import signal
import socket
import ssl
import subprocess
from contextlib import contextmanager

import httpx
import pytest

pytest.importorskip("flwr")

from prometheus_client import parser

from fedrema.cli import main
from fedrema.deploy.tls import read_certificate
from tests.network.federation_of_processes import FEDREMA, Processes, command_lines

pytestmark = pytest.mark.network
TOKEN = "a-token-for-this-test"


@contextmanager
def watched(network, folder):
    """Run fedrema watch on all addresses, with the federation's certificate; yields its address."""
    command = [*FEDREMA, "watch", str(folder), "--host", "0.0.0.0", "--port", "0"]
    environment = {**os.environ, "FEDREMA_WATCH_TOKEN": TOKEN}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process.stdout.readline().split()[2].replace("0.0.0.0", "localhost")
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
        finally:
            process.kill()


def metrics(network, address):
    context = ssl.create_default_context(cafile=network.folder / "server" / "ca.crt")
    answer = httpx.get(f"{address}metrics", headers={"Authorization": f"Bearer {TOKEN}"}, verify=context, timeout=30)
    families = parser.text_string_to_metric_families(answer.raise_for_status().text)
    return {(each.name, each.labels.get("node", "")): each.value for family in families for each in family.samples}


def serial(network, address):
    """Return the serial number of the certificate that a new connection gets."""
    host, port = address.removeprefix("https://").rstrip("/").split(":")
    context = ssl.create_default_context(cafile=network.folder / "server" / "ca.crt")
    with context.wrap_socket(socket.create_connection((host, int(port))), server_hostname=host) as tls:
        return int(tls.getpeercert()["serialNumber"], 16)


def supernodes(network):
    """Return the process IDs of the nodes' connections."""
    return sorted(pid for pid, line in command_lines() if "flower_supernode" in line and str(network.folder) in line)


def test_metrics_renewal_and_a_forgotten_node(tmp_path):
    with Processes(tmp_path / "federation", "fedrema", nodes=3, rounds=400, least_clients=2) as network:
        server = network.folder / "server"
        network.start_all()
        network.wait(lambda: {0, 1, 2} <= {row for record in network.records() for row in record["participants"]})
        network.wait(lambda: network.rounds() >= 2)
        with watched(network, network.folder) as address:
            found = metrics(network, address)
            assert found[("fedrema_federation_nodes_online", "")] == 3
            assert found[("fedrema_federation_rounds_completed", "")] >= 1
            assert all(found[("fedrema_node_bytes_up_total", name)] > 0 for name in network.names)
            # A renewed certificate is used by new connections; those of the nodes continue.
            nodes, first = f"https://127.0.0.1:{network.port}", serial(network, address)
            assert serial(network, nodes) == first
            before, connected = network.rounds(), supernodes(network)
            assert len(connected) == 3
            assert main(["deploy", "renew", str(network.folder), "--host", "127.0.0.1"]) == 0
            renewed = read_certificate(server / "server.crt").serial_number
            assert renewed != first
            network.wait(lambda: serial(network, nodes) == renewed == serial(network, address), 10)
            network.wait(lambda: network.rounds() >= before + 2)
            assert supernodes(network) == connected
            assert metrics(network, address)[("fedrema_federation_nodes_online", "")] == 3
            # A node that is stopped and started again trusts the new certificate.
            network.kill_node("node-3")
            network.wait(lambda: metrics(network, address)[("fedrema_node_online", "node-3")] == 0, 120)
            network.start("node-3")
            network.wait(lambda: metrics(network, address)[("fedrema_node_online", "node-3")] == 1, 120)
        # The node leaves; the server stops, forgets it, and continues with the others, which were not restarted.
        leaving = network.processes.pop("node-3")
        leaving.terminate()
        leaving.wait(30)
        assert main(["deploy", "forget", str(network.folder), "node-3", "--remove-key"]) == 2  # it is running
        network.processes["server"].terminate()
        network.processes["server"].wait(60)
        completed = network.rounds()
        assert main(["deploy", "forget", str(network.folder), "node-3", "--remove-key"]) == 0
        names = [file.name for file in server.rglob("*") if file.is_file() and b"node-3" in file.read_bytes()]
        assert names == ["audit.jsonl"]
        network.start("server")
        network.wait(lambda: network.rounds() >= completed + 2, 300)
        assert [member["name"] for member in network.status()["members"]] == ["node-1", "node-2"]
        assert main(["deploy", "audit", str(network.folder)]) == 0


def test_the_authority_is_renewed_while_nodes_are_connected(tmp_path):
    with Processes(tmp_path / "federation", "fedavg", nodes=2, rounds=400, least_clients=2) as network:
        folder = network.folder

        def step(name):
            assert main(["deploy", "renew", str(folder), "--host", "127.0.0.1", "--authority", name]) == 0

        def more_rounds():
            before = network.rounds()
            network.wait(lambda: network.rounds() >= before + 2, 240)

        network.start_all()
        network.wait(lambda: network.rounds() >= 1)
        old = read_certificate(folder / "server" / "server.crt").issuer
        step("prepare")
        network.wait(lambda: all("ca.crt has changed" in network.output(name) for name in network.names), 30)
        network.processes["server"].terminate()
        network.processes["server"].wait(60)
        network.start("server")
        more_rounds()
        step("switch")
        renewed = read_certificate(folder / "server" / "server.crt")
        assert renewed.issuer != old
        network.wait(lambda: serial(network, f"https://127.0.0.1:{network.port}") == renewed.serial_number, 10)
        more_rounds()
        step("retire")
        more_rounds()
        network.kill_node("node-1")  # it connects again, and trusts the new authority only
        network.start("node-1")
        more_rounds()
