"""The services without Flower's processes: supervision, the run's lock and log, and the SuperLink's restricted port."""

import asyncio
import contextlib
import gc
import os
import sqlite3
import subprocess
import sys
import weakref

import pytest

pytest.importorskip("flwr")

from flwr.supercore import sql_mixin
from flwr.supercore.protobuf.translation import ProtobufTranslationMiddleware
from flwr.superlink.main import create_app
from flwr.superlink.routers.control.middlewares import ControlAuthenticationMiddleware
from flwr.superlink.routers.fleet.node_auth import NodeAuthMiddleware

from fedrema.base.processes import free_port
from fedrema.cli import main
from fedrema.deploy.flower_database import limit_memory
from fedrema.deploy.flower_superlink import bounded, restricted, without_layers
from fedrema.deploy.flower_supernode import Pauses
from fedrema.deploy.folder import ServerFolder
from fedrema.deploy.node_service import flower_environment
from fedrema.deploy.run_state import locked_run, log_file, stop_reason
from fedrema.deploy.services import ServerService
from fedrema.errors import BadInput
from fedrema.runs.lock import RunLock
from tests.fixtures import supervised_python


def test_warnings_are_not_errors_in_flowers_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    assert "PYTHONWARNINGS" not in flower_environment(tmp_path / "home", tmp_path)


def test_a_server_exits_if_flower_cannot_start(tmp_path, monkeypatch):
    monkeypatch.setattr("fedrema.base.processes.LONGEST_DELAY", 0.0)
    monkeypatch.setattr("fedrema.deploy.services.SECONDS_BETWEEN_CHECKS", 0.01)
    reported = []
    arguments = ["--deal", "--nodes", "north,south", "--host", "localhost", "--port", str(free_port())]
    assert main(["deploy", "init", str(tmp_path / "federation"), "fedavg", *arguments]) == 0
    service = ServerService(ServerFolder.open(tmp_path / "federation" / "server"), reported.append)
    broken = [
        supervised_python(tmp_path, "print('no room')"),
        supervised_python(tmp_path, "import time; time.sleep(99)"),
    ]
    service.superlink, service.superexec = broken
    assert service.serve() == 1
    assert reported[-1] == f"it was started 5 times and never responded; see {tmp_path / 'it.log'}"
    assert all(one.process.poll() is not None for one in broken)


def test_flower_sends_no_telemetry_and_installs_nothing(tmp_path):
    own = flower_environment(tmp_path / "home", tmp_path)
    assert own["FLWR_TELEMETRY_ENABLED"] == "0"
    assert own["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert own["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert own["FLWR_HOME"] == str(tmp_path / "home")
    assert own["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path)
    assert own["PATH"].split(os.pathsep)[0] == os.path.dirname(sys.executable)  # noqa: PTH120


def test_one_server_at_a_time(tmp_path):
    folder = tmp_path / "server" / "run"
    assert not RunLock(tmp_path / "run").is_held()
    code = (
        "import sys, pathlib\nfrom fedrema.deploy.run_state import locked_run\n"
        "with locked_run(pathlib.Path(sys.argv[1])):\n    print('in', flush=True)\n    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"in\n"
        assert RunLock(folder).is_held()
        with pytest.raises(BadInput, match=rf"is in use by process {other.pid} on "), locked_run(folder):
            raise AssertionError
        other.kill()
    assert not RunLock(folder).is_held()  # a killed process holds no lock


def test_the_reason_of_a_failure_is_written_next_to_the_folder(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(BadInput), locked_run(folder):
        raise BadInput("too few")
    assert stop_reason(folder) == "too few"
    assert "too few" in log_file(folder).read_text()
    with pytest.raises(ZeroDivisionError), locked_run(folder):
        print(1 / 0)
    assert stop_reason(folder) == ""  # an unexpected error is only in the log
    assert "ZeroDivisionError" in log_file(folder).read_text()


@pytest.mark.parametrize(
    ("path", "port", "reached"),
    [
        ("/v1/fleet/pull-messages", 9092, True),
        ("/v1/control/start-run", 9092, False),
        ("/v1/runtime/acquire-task", 9092, False),
        ("/docs", 9092, False),
        ("/v1/fleet", 9092, False),
        ("/v1/control/start-run", 9093, True),
    ],
)
def test_other_machines_reach_only_the_interface_for_nodes(path, port, reached):
    served, sent = [], []

    async def app(scope, receive, send):
        served.append(scope["path"])

    async def send(message):
        sent.append(message)

    asyncio.run(
        restricted(app, 9093)({"type": "http", "path": path, "server": ("10.0.0.7", port)}, received(b""), send)
    )
    assert served == ([path] if reached else [])
    assert (sent[0]["status"] if sent else None) == (None if reached else 404)


def received(*parts):
    """Return ASGI's function for the parts of a request's body, followed by the end of the connection."""
    events = [
        {"type": "http.request", "body": part, "more_body": number < len(parts)} for number, part in enumerate(parts, 1)
    ]

    async def receive():
        return events.pop(0) if events else {"type": "http.disconnect"}

    return receive


@pytest.mark.parametrize(("size", "port", "accepted"), [(10, 9092, True), (17, 9092, False), (17, 9093, True)])
def test_a_request_of_a_node_has_a_limited_size(size, port, accepted, monkeypatch):
    monkeypatch.setattr("fedrema.deploy.flower_superlink.LARGEST_BODY", 16)
    bodies, sent = [], []

    async def app(scope, receive, send):
        body, more = b"", True
        while more:
            event = await receive()
            body, more = body + event["body"], event["more_body"]
        bodies.append(body)
        assert (await receive())["type"] == "http.disconnect"

    async def send(message):
        sent.append(message)

    parts = [b"x" * min(8, size - start) for start in range(0, size, 8)]
    scope = {"type": "http", "path": "/v1/fleet/push-object", "server": ("10.0.0.7", port)}
    asyncio.run(restricted(app, 9093)(scope, received(*parts), send))
    assert bodies == ([b"x" * size] if accepted else [])
    assert [message["status"] for message in sent if "status" in message] == ([] if accepted else [413])


@pytest.mark.parametrize("way", ["received", "sent"])
def test_the_memory_of_answered_messages_is_bounded(way, monkeypatch):
    monkeypatch.setattr("fedrema.deploy.flower_superlink.MOST_GARBAGE", 30)
    remaining = weakref.WeakSet()

    async def app(scope, receive, send):
        cycle = Cycle((await receive())["body"])
        remaining.add(cycle)
        if way == "sent":
            await send({"type": "http.response.body", "body": b"x" * 10})

    async def send(message):
        pass

    async def serve(server):
        for _ in range(20):
            await server({"type": "http"}, received(b"x" * 10 if way == "received" else b""), send)

    gc.disable()  # only the collections that the app asks for
    try:
        asyncio.run(serve(bounded(app)))
        assert len(remaining) <= 4
        asyncio.run(serve(app))
        assert len(remaining) >= 20
    finally:
        gc.enable()


class Cycle:
    """An object that refers to itself, as requests do."""

    def __init__(self, body):
        self.body, self.itself = body, self


def test_messages_pass_through_the_layers_that_authenticate_and_translate_them():
    app = create_app()
    lean = without_layers(app)
    before, after = ([layer.cls for layer in each.user_middleware] for each in (app, lean))
    assert [layer for layer in before if layer in after] == after
    assert {NodeAuthMiddleware, ProtobufTranslationMiddleware} < set(after)
    assert ControlAuthenticationMiddleware in before
    assert ControlAuthenticationMiddleware not in after
    assert lean.state is app.state


def test_control_is_never_served_without_its_layers():
    served = []

    async def app(scope, receive, send):
        served.append("all layers")

    async def lean(scope, receive, send):
        served.append("messages")

    paths = ["/v1/control/start-run", "/docs", "/v1/fleet/pull-messages", "/v1/runtime/pull-messages"]
    for path in paths:
        scope = {"type": "http", "path": path, "server": ("127.0.0.1", 9093)}
        asyncio.run(restricted(app, 9093, messages=lean)(scope, received(b""), None))
    assert served == ["all layers", "all layers", "all layers", "messages"]


def test_a_slow_server_is_asked_less_often(monkeypatch):
    now, slept = [100.0], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr("fedrema.deploy.flower_supernode.time.monotonic", lambda: now[0])
    monkeypatch.setattr("fedrema.deploy.flower_supernode.time.sleep", sleep)
    pauses = Pauses()
    for asking in (0.0, 0.01, 0.2, 1.0):
        now[0] += asking
        pauses.sleep(3)
    pauses.sleep(0.5)  # a message has arrived
    now[0] += 61.0
    pauses.sleep(3)
    assert slept == pytest.approx([1.0, 1.0, 1.8, 3.0, 0.3, 3.0])


def test_connections_to_the_database_use_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(sql_mixin, "SQLITE_PRAGMAS", sql_mixin.SQLITE_PRAGMAS)  # is restored at the end
    limit_memory()
    with contextlib.closing(sqlite3.connect(tmp_path / "objects.db")) as connection:
        sql_mixin._set_sqlite_pragmas(connection, None)  # as for every connection of Flower
        names = ("cache_size", "mmap_size", "journal_mode")
        found = [connection.execute(f"PRAGMA {name}").fetchone()[0] for name in names]
    assert found == [-8000, 16_777_216, "wal"]
