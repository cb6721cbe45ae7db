"""Nodes behind a real HTTPS proxy and a real TCP load balancer: one port, and TLS ends at the server."""

import contextlib
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedrema.base.processes import free_port
from tests.network.federation_of_processes import Processes, assert_same_as_simulated

pytestmark = pytest.mark.network
SERVER = "127.0.0.2"
"""Also an address of this machine; no proxy is used for 127.0.0.1."""
SQUID = """
http_port 127.0.0.1:{port}
acl server dst {server}
acl server_port port {server_port}
acl tunnel method CONNECT
http_access allow tunnel server server_port
http_access deny all
cache deny all
access_log stdio:{folder}/access.log
cache_log {folder}/cache.log
pid_filename none
coredump_dir {folder}
netdb_filename none
shutdown_lifetime 1 seconds
"""
HAPROXY = """
global
    log stdout format raw local0
defaults
    mode tcp
    log global
    option tcplog
    timeout connect 5s
    timeout client 60s
    timeout server 60s
listen federation
    bind 127.0.0.1:{port}
    server main {server}:{server_port}
"""


@contextlib.contextmanager
def program(name, configuration, folder, port, *options):
    """Run a program that listens on a port of this machine; skips the test if it is not installed."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
    if found is None:
        pytest.skip(f"{name} is not installed: make test-network installs it where apt-get can")
    file = folder / f"{name}.conf"
    file.write_text(configuration)
    output = folder / f"{name}.output.log"
    with output.open("wb") as log:
        process = subprocess.Popen([found, *options, "-f", str(file)], stdout=log, stderr=log)
        try:
            for _ in range(100):
                assert process.poll() is None, output.read_text()
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
                    break
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.2)
            yield
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture
def anyones_folder():
    """Yield a folder in which every user may write: squid gives up the rights of root."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def test_nodes_behind_a_proxy_and_a_load_balancer_train_as_in_the_simulator(tmp_path, anyones_folder):
    hosts = ("127.0.0.1", SERVER)
    with Processes(tmp_path / "federation", "fedrema", least_clients=3, hosts=hosts) as network:
        squid_port, haproxy_port, nobody = free_port(), free_port(), free_port()
        where = {"server": SERVER, "server_port": network.port}
        squid = SQUID.format(port=squid_port, folder=anyones_folder, **where)
        haproxy = HAPROXY.format(port=haproxy_port, **where)
        with (
            # Its own name, so that it shares no memory with another squid on this machine.
            program("squid", squid, anyones_folder, squid_port, "-N", "-n", f"test{squid_port}"),
            program("haproxy", haproxy, tmp_path, haproxy_port, "-db"),
        ):
            direct, address = f"http://127.0.0.1:{nobody}", f"{SERVER}:{network.port}"
            network.start("server")
            network.start("node-1", "--server", address, https_proxy=f"http://127.0.0.1:{squid_port}", no_proxy="")
            network.start("node-2", "--server", f"127.0.0.1:{haproxy_port}")
            # A proxy that does not exist: only `no_proxy` makes the connection possible.
            network.start("node-3", "--server", address, https_proxy=direct, no_proxy=SERVER)
            assert network.finish() == 0, network.output("server")
            for name in network.names:  # so that the logs of the connections are complete
                network.processes[name].terminate()
                network.processes[name].wait(60)
        tunnels = [line for line in (anyones_folder / "access.log").read_text().splitlines() if "CONNECT" in line]
        connections = (tmp_path / "haproxy.output.log").read_text()
    assert_same_as_simulated(network)
    assert tunnels
    assert all(f"CONNECT {SERVER}:{network.port} " in line for line in tunnels), tunnels
    assert any("TCP_TUNNEL/200" in line for line in tunnels)  # the first may be earlier than the server
    assert "federation federation/main" in connections
    for name in network.names:
        assert "the node is connected to the server" in network.output(name)
