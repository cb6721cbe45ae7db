"""fedrema deploy check, over real sockets and certificates on the loopback interface."""

import socket
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flwr")

from fedrema.base.processes import free_port
from fedrema.cli import main
from fedrema.deploy import check, tls
from fedrema.deploy.audit import AuditLog, Entry, Event
from fedrema.deploy.check import check_node, check_server
from fedrema.deploy.folder import NodeFolder, ServerFolder
from fedrema.deploy.setup import new_key
from tests.deploy.tls_server import serving


@pytest.fixture
def made(tmp_path, capsys):
    folder = tmp_path / "federation"
    arguments = ["--deal", "--nodes", "north,south", "--host", "localhost", "--port", str(free_port())]
    assert main(["deploy", "init", str(folder), "fedavg", *arguments]) == 0
    capsys.readouterr()
    return folder


def failures(results):
    return {result.test: str(result) for result in results if not result.passed}


def on_node(made, address, name="north"):
    return failures(check_node(NodeFolder.open(made / "nodes" / name).with_server(address)))


def test_a_new_server_passes(made, capsys):
    assert main(["deploy", "check", str(made)]) == 0
    printed = capsys.readouterr().out
    assert "All tests passed." in printed
    for test in ("versions", "settings", "certificate: valid for 824 days", "authority", "port", "keys", "disk"):
        assert f"ok     {test}" in printed


def test_a_node_passes_and_does_not_join(made, capsys):
    with serving(made / "server") as address:
        assert main(["deploy", "check", str(made / "nodes" / "north"), "--server", address]) == 0
        printed = capsys.readouterr().out
        assert "and knows this node's key" in printed
        assert "ok     clock: " in printed
        assert "samples of shape 1x8x8, task multiclass" in printed
    with serving(made / "server", {"north": "online"}) as address:
        assert on_node(made, address) == {}  # the node itself may be running


def test_a_node_without_a_server_fails_with_a_remedy(made, capsys):
    assert main(["deploy", "check", str(made / "nodes" / "north"), "--server", f"127.0.0.1:{free_port()}"]) == 2
    printed = capsys.readouterr().out
    assert "FAILED server: no server listens at" in printed
    assert "start the server" in printed
    assert "2 of the tests failed." in printed  # the data cannot be compared with the plan either
    assert "cannot be resolved" in on_node(made, "no-such-host.invalid:1")["name"]
    assert "is not an address" in on_node(made, "nonsense")["address"]


def test_keys_of_a_node(made):
    node = made / "nodes" / "north"
    with serving(made / "server") as address:
        (node / "node.key").chmod(0o644)
        assert "readable by other users; run chmod 600" in on_node(made, address)["key"]
        toml = (node / "node.toml").read_text()
        (node / "node.toml").write_text(toml.replace('"north"', '"nord"'))
        assert "the key is registered for 'north', not 'nord'" in on_node(made, address)["server"]
        (node / "node.toml").write_text(toml)
        new_key(node)
        assert "copy node.pub to the server as keys/north.pub" in on_node(made, address)["server"]
        (node / "node.key").write_text("x")
        (node / "ca.crt").write_text("x")
        found = on_node(made, address)
        assert "holds no private key" in found["key"]
        assert "holds no certificate" in found["authority"]


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.zeros((30, 1, 9, 9), "float32"), "y": np.arange(30) % 10}, "samples are of shape 1x9x9, not 1x8x8"),
        ({"x": np.zeros((30, 1, 8, 8), "float32"), "y": np.arange(30)}, "correct data in node.toml"),
        ({"z": np.zeros(3)}, "correct data in node.toml"),
    ],
)
def test_data_that_does_not_fit_the_plan(made, arrays, words):
    np.savez(made / "nodes" / "north" / "data.npz", **arrays)
    with serving(made / "server") as address:
        assert words in on_node(made, address)["data"]


def test_tables_are_compared_with_the_plan(tmp_path, capsys):
    folder = tmp_path / "clinics"
    arguments = ["--columns", "age,ward", "--target", "died", "--task", "binary", "--nodes", "north,south"]
    assert main(["deploy", "init", str(folder), "fedavg", *arguments]) == 0
    node = folder / "nodes" / "north"
    (node / "node.toml").write_text((node / "node.toml").read_text().replace("data.npz", "patients.csv"))
    rows = "".join(f"{20 + row},{'AB'[row % 2]},{row % 2}\n" for row in range(40))
    (node / "patients.csv").write_text(f"age,ward,died\n{rows}")
    with serving(folder / "server") as address:
        assert on_node(folder, address) == {}
        (node / "patients.csv").write_text(f"age,station,died\n{rows}")
        assert "Column 'ward' is missing" in on_node(folder, address)["data"]
        (node / "patients.csv").unlink()
        assert "does not exist" in on_node(folder, address)["data"]


def test_versions_are_compared(made, monkeypatch):
    own = check.versions()
    with serving(made / "server") as address:
        monkeypatch.setattr(check, "versions", lambda: {**own, "torch": "1.0.0"})
        found = on_node(made, address)["versions"]
        assert "this machine has torch 1.0.0, but the server has" in found
    monkeypatch.setattr(check, "versions", lambda: {**own, "flwr": "1.2.0"})
    assert (
        "flwr 1.2.0, but the app in this federation has" in failures(check_server(ServerFolder.open(made)))["versions"]
    )


def test_a_server_with_problems(made, monkeypatch):
    server = ServerFolder.open(made)
    with socket.create_server(("0.0.0.0", server.config.port)):
        assert "stop the program that uses it, or change server.toml" in failures(check_server(server))["port"]
    monkeypatch.setattr(tls, "SERVER_DAYS", 10)
    tls.make_server_certificate(made / "authority", server.path, ("no-such-host.invalid",))
    found = failures(check_server(server))
    assert "valid for 9 days; renew it with fedrema deploy renew" in found["certificate"]
    assert "no-such-host.invalid cannot be resolved" in found["name"]
    (server.keys / "twin.pub").write_bytes((server.keys / "north.pub").read_bytes())
    assert "north and twin have the same key" in failures(check_server(server))["keys"]
    (server.keys / "twin.pub").write_text("x")
    assert "twin.pub holds no public key" in failures(check_server(server))["keys"]
    (server.path / "server.key").write_text("x")
    assert "renew" in failures(check_server(server))["certificate"]
    (server.path / "server.crt").write_text("x")
    assert "server.crt holds no certificate" in failures(check_server(server))["certificate"]
    (server.app / "pyproject.toml").write_text("[tool]")
    assert "has no [tool.flwr.app.config]" in failures(check_server(server))["settings"]


def test_disk_memory_and_audit_log(made, monkeypatch):
    server = ServerFolder.open(made)
    monkeypatch.setattr(check, "LEAST_DISK", 10**18)
    monkeypatch.setattr(check, "LEAST_MEMORY", 10**18)
    log = AuditLog(server.path, "server")
    log.append(Entry(Event.STARTED))
    log.append(Entry(Event.STOPPED))
    assert failures(check_server(server)).keys() == {"disk", "memory"}
    log.file.write_bytes(log.file.read_bytes().splitlines(keepends=True)[0])
    assert "The log ends at line 1" in failures(check_server(server))["audit log"]


def test_a_folder_of_neither(tmp_path, capsys):
    assert main(["deploy", "check", str(tmp_path)]) == 2
    assert "has no server.toml" in capsys.readouterr().err


def test_results_show_remedies_of_failures_only():
    result = check.Result("disk", True, "1 GB free", "free some")
    assert str(result) == "disk: 1 GB free"
    assert str(replace(result, passed=False)) == "disk: 1 GB free; free some"
