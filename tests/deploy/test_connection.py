"""Why a node is not connected: from the log of Flower's SuperNode, and from a probe over real sockets with TLS."""

import shutil
import socket
import threading
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from fedrema.base.processes import free_port
from fedrema.cli import main
from fedrema.deploy import check_endpoint, connection, tls
from fedrema.deploy.audit import Event, verify
from fedrema.deploy.connection import (
    Cause,
    ConnectionWatch,
    Finding,
    classify,
    exempt_local_addresses,
    probe,
    proxy_for,
)
from fedrema.deploy.folder import NodeFolder, ServerFolder
from fedrema.deploy.node_connection import NodeConnection
from fedrema.deploy.rejected_keys import IN_USE, UNKNOWN, RejectedKeys, current_rejections
from fedrema.deploy.setup import new_key
from fedrema.deploy.tls import fingerprint, make_authority, make_server_certificate
from tests.deploy.tls_server import serving

LOGS = Path(__file__).parent / "supernode_logs"


@pytest.fixture
def made(tmp_path, capsys):
    folder = tmp_path / "federation"
    arguments = ["--deal", "--nodes", "north,south", "--host", "fl.example.org", "--rounds", "2"]
    assert main(["deploy", "init", str(folder), "fedavg", *arguments]) == 0
    capsys.readouterr()
    return folder


def probed(made, address, name="north", authority=None):
    node = made / "nodes" / name
    return probe(address, authority or node / "ca.crt", node / "node.key", name, seconds=1.0)


@pytest.mark.parametrize(
    ("log", "cause", "words"),
    [
        ("connected", Cause.CONNECTED, ""),
        ("foreign_ca", Cause.CERTIFICATE, "issued by another authority"),
        ("inuse", Cause.KEY_REFUSED, "does not accept this node's key"),
        ("unknown_key", Cause.KEY_REFUSED, "does not accept this node's key"),
        ("refused", Cause.UNREACHABLE, "cannot be reached"),
        ("noname", Cause.UNREACHABLE, "cannot be reached"),
        ("silent", Cause.STARTING, ""),
    ],
)
def test_real_logs_of_the_supernode_are_classified(log, cause, words):
    """tests/network/test_diagnostics.py produces such logs."""
    found = classify((LOGS / f"{log}.log").read_text().splitlines())
    assert found.cause is cause
    assert words in str(found)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: IP address mismatch, certificate", "is not for"),
        ("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired (_ssl.c:1)", "expired"),
        ("[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)", Cause.NO_TLS),
        ("SuperLink address (x) cannot be parsed.", Cause.ADDRESS),
        ("Exit Code: 302", Cause.KEY_FILE),
        ("SuperNode terminated gracefully.", Cause.CLOCK),
    ],
)
def test_other_lines(line, cause):
    found = classify(
        ["Starting Flower SuperNode", f"[SSL: CERTIFICATE_VERIFY_FAILED] {line}" if "mismatch" in line else line]
    )
    assert cause in str(found) if isinstance(cause, str) else found.cause is cause


def test_a_new_start_forgets_earlier_errors():
    lines = (LOGS / "foreign_ca.log").read_text().splitlines() + (LOGS / "connected.log").read_text().splitlines()
    assert classify(lines).cause is Cause.CONNECTED
    assert classify([*lines[-1:], *(LOGS / "refused.log").read_text().splitlines()]).cause is Cause.CONNECTED


def test_a_registered_key_is_accepted_and_nothing_is_joined(made):
    with serving(made / "server") as address:
        found = probed(made, address)
    assert found.cause is Cause.CONNECTED
    assert found.answer["name"] == "north"
    assert found.answer["config"]["method"] == "fedavg"
    assert found.answer["versions"]["fedrema"]
    assert abs(found.clock_lead) < 5
    assert 820 < found.certificate_days < 826


def test_keys_that_are_unknown_or_in_use(made):
    with serving(made / "server", {"south": "online"}) as address:
        assert probed(made, address, "south").cause is Cause.KEY_IN_USE
        new_key(made / "nodes" / "north")
        found = probed(made, address)
        assert found.cause is Cause.KEY
        assert str(found) == ("the server does not know this node's key: copy node.pub to the server as keys/north.pub")
        assert found.answer == {}  # an unknown key learns nothing about the federation
        (made / "nodes" / "north" / "node.key").write_text("nonsense")
        assert probed(made, address).cause is Cause.KEY_FILE


def test_foreign_expired_and_misnamed_certificates(made, tmp_path, monkeypatch):
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    make_authority(foreign, "another federation")
    node = made / "nodes" / "north"
    with serving(made / "server") as address:
        found = probed(made, address, authority=foreign / "ca.crt")
        assert (found.cause, found.sentence) == (
            Cause.CERTIFICATE,
            "the server's certificate was issued by another authority",
        )
        (tmp_path / "broken.crt").write_text("nonsense")
        assert probed(made, address, authority=tmp_path / "broken.crt").cause is Cause.CERTIFICATE
    monkeypatch.setattr(tls, "LOCAL_NAMES", ())
    other = tmp_path / "other"
    other.mkdir()
    make_server_certificate(made / "authority", other, ("fl.example.org",))
    with serving(made / "server", certificate=other) as address:
        found = probed(made, address)
        assert (found.cause, found.sentence) == (Cause.CERTIFICATE, "the server's certificate is not for 127.0.0.1")
    monkeypatch.setattr(tls, "SERVER_DAYS", 0.001)
    make_server_certificate(made / "authority", other, ("127.0.0.1",))
    with serving(made / "server", certificate=other) as address:
        assert "has expired" in probed(made, address, authority=node / "ca.crt").sentence


def test_addresses_without_a_server(made):
    refused = probed(made, f"127.0.0.1:{free_port()}")
    assert refused.cause is Cause.UNREACHABLE
    assert "no server listens at 127.0.0.1" in refused.sentence
    assert probed(made, "no-such-host.invalid:9092").cause is Cause.NAME
    for address in ("fl.example.org", "a:b", "a:99999", "http://a:1", "", "a b:1"):
        assert probed(made, address).cause is Cause.ADDRESS
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = probed(made, f"127.0.0.1:{silent.getsockname()[1]}")
        assert (found.cause, "does not answer" in found.sentence) == (Cause.UNREACHABLE, True)


@contextmanager
def answering(reply):
    """A server that answers every connection with the same bytes; yield its address and what it received."""
    received = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer():
            while True:
                try:
                    connected, _ = listening.accept()
                except OSError:
                    return
                with connected:
                    received.append(connected.recv(4096))
                    connected.sendall(reply)

        threading.Thread(target=answer, daemon=True).start()
        yield f"127.0.0.1:{listening.getsockname()[1]}", received
        listening.shutdown(socket.SHUT_RDWR)


def test_a_program_without_tls(made):
    with answering(b"HTTP/1.1 200 OK\r\n\r\n") as (address, _):
        assert probed(made, address).cause is Cause.NO_TLS


def test_a_server_without_the_check_is_another_program(made):
    with serving(made / "server", check=False) as address:
        found = probed(made, address)
    assert (found.cause, "HTTP status 404" in found.sentence) == (Cause.OTHER, True)


def test_the_clock_is_compared(made, monkeypatch):
    class Ahead(datetime):
        @classmethod
        def now(cls, zone=None):
            return datetime.now(zone) + timedelta(seconds=60)

    monkeypatch.setattr(connection, "datetime", Ahead)
    with serving(made / "server") as address:
        found = probed(made, address)
    assert found.cause is Cause.CLOCK
    assert "this machine's clock is 60 s ahead of the server's" in found.sentence


def test_a_signature_is_valid_for_the_check_only(made):
    state = type("State", (), {})()
    node = made / "nodes" / "north"
    now = datetime.now(UTC).isoformat()
    public, signed = tls.signature(node / "node.key", now.encode())  # what Flower signs
    import base64

    headers = {
        check_endpoint.KEY: base64.b64encode(public).decode(),
        check_endpoint.TIME: now,
        check_endpoint.SIGNATURE: base64.b64encode(signed).decode(),
    }
    assert check_endpoint._answer(headers, state, made / "server") == (401, {"reason": "signature"})
    assert check_endpoint._answer({**headers, check_endpoint.TIME: "x"}, state, made / "server")[0] == 400
    assert check_endpoint._answer({}, state, made / "server")[0] == 400
    naive = {**headers, check_endpoint.TIME: "2026-01-01T00:00:00"}
    assert check_endpoint._answer(naive, state, made / "server")[0] == 400


def test_a_proxy_is_used_and_its_refusal_reported(made, monkeypatch):
    with answering(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n") as (proxy, received):
        monkeypatch.setenv("https_proxy", f"http://{proxy}")
        assert proxy_for("fl.example.org") == f"http://{proxy}"
        found = probed(made, "fl.example.org:9092")  # the proxy resolves the name
        assert found.cause is Cause.PROXY
        assert received[0].startswith(b"CONNECT fl.example.org:9092 HTTP/1.1")
        monkeypatch.setenv("no_proxy", "fl.example.org")
        assert proxy_for("fl.example.org") == ""


@contextmanager
def tunnel():
    """An HTTPS proxy that connects to every address; yield its address and the requested ones."""
    requested, threads = [], []

    def copy(source, target):
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        with suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def join(client, target):
        with client, target:
            back = threading.Thread(target=copy, args=(target, client))
            back.start()
            copy(client, target)
            back.join(10)

    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            while True:
                try:
                    client, _ = listening.accept()
                except OSError:
                    return
                line = client.recv(4096).split()[1].decode()
                requested.append(line)
                target = socket.create_connection(("127.0.0.1", int(line.rpartition(":")[2])))
                client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                threads.append(threading.Thread(target=join, args=(client, target)))
                threads[-1].start()

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}", requested
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(10)


def test_the_check_works_through_a_proxy(made, monkeypatch):
    with serving(made / "server") as address, tunnel() as (proxy, requested):
        monkeypatch.setenv("https_proxy", f"http://{proxy}")
        monkeypatch.setenv("no_proxy", "")
        found = probed(made, f"fl.example.org:{address.rpartition(':')[2]}")
    assert found.cause is Cause.CONNECTED, found
    assert requested == [f"fl.example.org:{address.rpartition(':')[2]}"]
    assert found.certificate_days > 800


def test_local_addresses_never_use_a_proxy(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://proxy.example.org:3128")
    monkeypatch.setenv("https_proxy", "http://proxy.example.org:3128")
    monkeypatch.setenv("no_proxy", "intranet.example.org")
    monkeypatch.setenv("NO_PROXY", "intranet.example.org")
    exempt_local_addresses()
    for host in ("127.0.0.1", "localhost", "intranet.example.org"):
        assert proxy_for(host) == ""
    assert proxy_for("fl.example.org") == "http://proxy.example.org:3128"


def test_the_watch_reports_each_cause_once(tmp_path):
    log, findings = tmp_path / "supernode.log", [Finding(Cause.UNREACHABLE, "no server listens", "start it")]
    watch = ConnectionWatch(log, lambda: findings[-1])
    assert watch.news() == ["not connected: no server listens: start it"]
    assert watch.news() == []
    log.write_text((LOGS / "refused.log").read_text())
    assert watch.news() == []  # the same sentence
    exit_message = "Flower's SuperNode has exited (INFO: Finished server process [1]); it restarts in 2 s"
    assert watch.exit_message(exit_message) == "Flower's SuperNode has exited; it restarts in 2 s"
    findings.append(Finding(Cause.CONNECTED))
    with log.open("a") as stream:
        stream.write((LOGS / "unknown_key.log").read_text())
    (sentence,) = watch.news()
    assert sentence.startswith("not connected: the server does not accept this node's key: copy node.pub")
    with log.open("a") as stream:
        stream.write((LOGS / "connected.log").read_text())
    assert watch.news() == ["the node is connected to the server"]
    assert watch.joined
    assert watch.news() == []
    assert not watch.joined
    assert watch.exit_message(exit_message) == exit_message


def test_a_connection_is_recorded_in_the_nodes_log(made):
    folder = NodeFolder.open(made / "nodes" / "north").with_server("127.0.0.1:1")
    node = NodeConnection(folder)
    (sentence,) = node.news()
    assert "no server listens at 127.0.0.1:1" in sentence
    (folder.path / "state").mkdir()
    shutil.copy(LOGS / "connected.log", folder.path / "state" / "supernode.log")
    assert node.news() == ["the node is connected to the server"]
    ((line,), problems) = verify(folder.path)
    assert (line.entry.what, line.entry.key, problems) == (Event.JOINED, node.key, [])
    (folder.path / "node.key").write_text("x")
    assert main(["deploy", "client", str(folder.path)]) == 2


REFUSAL = (
    "\x1b[91mERROR \x1b[0m:     [/v1/fleet/activate-node][ApiError:2004] Attempted to register SuperNode with public"
    " key: {key!r}, exception: {why}\n"
)


def test_rejected_keys_are_reported_recorded_and_shown_until_resolved(made, capsys):
    folder = ServerFolder.open(made)
    folder.state.mkdir()
    keys = RejectedKeys(folder)
    unknown = made / "unknown"
    unknown.mkdir()
    new_key(unknown)
    stranger, north = tls.read_public_key(unknown / "node.pub"), tls.read_public_key(folder.keys / "north.pub")
    lines = [
        REFUSAL.format(key=stranger, why="No SuperNode found with the given public key."),
        REFUSAL.format(key=stranger, why="No SuperNode found with the given public key."),
        REFUSAL.format(key=north, why="SuperNode with node ID 499066629967684702 could not be activated."),
        "INFO: something else\n",
    ]
    (folder.state / "superlink.log").write_text("".join(lines))
    assert keys.news() == [
        f"rejected the key {fingerprint(stranger)}: {UNKNOWN}",
        f"rejected the key of node north {fingerprint(north)}: {IN_USE}",
    ]
    assert [(key.fingerprint, key.attempts) for key in current_rejections(folder)] == [
        (fingerprint(stranger), 2),
        (fingerprint(north), 1),
    ]
    recorded, problems = verify(folder.path)
    assert ([line.entry.what for line in recorded], problems) == ([Event.KEY_REJECTED] * 2, [])
    assert main(["deploy", "status", str(made)]) == 0
    assert f"rejected key {fingerprint(stranger)[:30]}" in capsys.readouterr().out
    shutil.copy(unknown / "node.pub", folder.keys / "east.pub")  # resolved
    assert [key.name for key in current_rejections(folder)] == ["north"]
    (folder.state / "rejected-keys.json").write_text("[3]")
    assert current_rejections(folder) == ()


def test_a_flood_of_new_keys_is_bounded(made):
    folder = ServerFolder.open(made)
    folder.state.mkdir()
    keys = RejectedKeys(folder)
    text = [REFUSAL.format(key=b"key %d" % number, why="No SuperNode found") for number in range(300)]
    (folder.state / "superlink.log").write_text("".join(text))
    assert len(keys.news()) == 50
    assert keys.news() == []
    north = tls.read_public_key(folder.keys / "north.pub")  # a node's key is shown nevertheless
    with (folder.state / "superlink.log").open("a") as log:
        log.write(REFUSAL.format(key=north, why="SuperNode with node ID 4 could not be activated."))
    assert keys.news() == [f"rejected the key of node north {fingerprint(north)}: {IN_USE}"]
    assert "north" in [key.name for key in current_rejections(folder)]


def test_fingerprints_are_those_of_ssh_keygen(made):
    if shutil.which("ssh-keygen") is None:
        pytest.skip("ssh-keygen is not installed")
    import subprocess

    public = made / "nodes" / "north" / "node.pub"
    shown = subprocess.run(["ssh-keygen", "-lf", str(public)], capture_output=True, text=True, check=True).stdout
    assert shown.split()[1] == fingerprint(public.read_bytes()) == fingerprint(tls.read_public_key(public))
