"""Processes that are kept going, who is present, and the gate: the parts that need no Flower process to be tried."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

pytest.importorskip("flwr")

from fedrema.cli import main
from fedrema.deploy.children import Child, Stopped, Told, environment, free_port, keeping
from fedrema.deploy.places import ServerPlace
from fedrema.deploy.presence import beside, present, reason, somebody_is_there
from fedrema.deploy.serving import Serving
from fedrema.deploy.superlink import gated
from fedrema.errors import BadInput


def child(tmp_path, code):
    return Child("it", [sys.executable, "-c", code], tmp_path / "it.log", dict(os.environ))


def until(what, seconds=20.0):
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found


def test_a_process_that_ends_is_started_again_after_a_pause(tmp_path):
    one = child(tmp_path, "print('it hurts')")
    with keeping(one):
        assert one.keep() == ""
        sentence = until(one.keep)
        first = one.process.pid
        assert sentence == "it has ended (it hurts); it is started again in 1 s"
        assert one.keep() == ""
        assert one.process.pid == first  # not at once
        until(lambda: one.keep() or one.process.pid != first)
        assert until(one.keep).endswith("in 2 s")


def test_whatever_a_process_has_started_ends_with_it(tmp_path):
    code = (
        "import subprocess, sys, time\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'])\n"
        "print(other.pid, flush=True)\ntime.sleep(99)\n"
    )
    one = child(tmp_path, code)
    with keeping(one):
        one.keep()
        grandchild = int(until(lambda: one.log.read_text().strip()))
        os.kill(grandchild, 0)
    until(lambda: not _alive(grandchild))
    assert one.process.poll() is not None


def test_being_stopped_ends_the_processes(tmp_path):
    one = child(tmp_path, "import time; time.sleep(99)")
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped), keeping(one):  # noqa: PT012
        one.keep()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert one.process.poll() is not None
    assert signal.getsignal(signal.SIGTERM) is before


def test_lines_are_told_once_and_whole(tmp_path):
    file = tmp_path / "log"
    file.write_text("long ago\n")
    told = Told(file)
    assert told.lines() == []
    with file.open("a") as stream:
        stream.write("one\ntwo\nthr")
    assert told.lines() == ["one", "two"]
    with file.open("a") as stream:
        stream.write("ee\n")
    assert told.lines() == ["three"]
    file.write_text("anew\n")
    assert told.lines() == ["anew"]
    assert Told(tmp_path / "none").lines() == []


def test_warnings_are_no_errors_of_flowers(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    assert "PYTHONWARNINGS" not in environment(tmp_path / "home", tmp_path)


def test_a_server_whose_flower_cannot_start_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("fedrema.deploy.children.LONGEST_PAUSE", 0.0)
    monkeypatch.setattr("fedrema.deploy.serving.SECONDS_BETWEEN_LOOKS", 0.01)
    said = []
    arguments = ["--deal", "--nodes", "north,south", "--host", "localhost", "--port", str(free_port())]
    assert main(["deploy", "init", str(tmp_path / "federation"), "fedavg", *arguments]) == 0
    serving = Serving(ServerPlace.open(tmp_path / "federation" / "server"), said.append)
    broken = [child(tmp_path, "print('no room')"), child(tmp_path, "import time; time.sleep(99)")]
    serving.children = tuple(broken)
    assert serving.serve() == 1
    assert said[-1] == f"it was started 5 times and never answered; {tmp_path / 'it.log'} tells why"
    assert all(one.process.poll() is not None for one in broken)


def test_nothing_calls_home(tmp_path):
    own = environment(tmp_path / "home", tmp_path)
    assert own["FLWR_TELEMETRY_ENABLED"] == "0"
    assert own["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert own["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert own["FLWR_HOME"] == str(tmp_path / "home")
    assert own["PYTHONPATH"].split(os.pathsep)[0] == str(tmp_path)
    assert own["PATH"].split(os.pathsep)[0] == os.path.dirname(sys.executable)  # noqa: PTH120


def test_one_server_at_a_time(tmp_path):
    folder = tmp_path / "server" / "run"
    assert not somebody_is_there(tmp_path / "run")
    code = (
        "import sys, pathlib\nfrom fedrema.deploy.presence import present\n"
        "with present(pathlib.Path(sys.argv[1])):\n    print('in', flush=True)\n    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"in\n"
        assert somebody_is_there(folder)
        with pytest.raises(BadInput, match=rf"is in use by process {other.pid} on "), present(folder):
            raise AssertionError
        other.kill()
    assert not somebody_is_there(folder)  # a killed one leaves no trace


def test_why_it_ended_is_left_beside_the_folder(tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(BadInput), present(folder):
        raise BadInput("too few")
    assert reason(folder) == "too few"
    assert "too few" in beside(folder, "log").read_text()
    with pytest.raises(ZeroDivisionError), present(folder):
        print(1 / 0)
    assert reason(folder) == ""  # a bug is not a reason to give up; it is in the log
    assert "ZeroDivisionError" in beside(folder, "log").read_text()


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
def test_the_gate(path, port, reached):
    heard, said = [], []

    async def app(scope, receive, send):
        heard.append(scope["path"])

    async def send(message):
        said.append(message)

    asyncio.run(gated(app, 9093)({"type": "http", "path": path, "server": ("10.0.0.7", port)}, None, send))
    assert heard == ([path] if reached else [])
    assert (said[0]["status"] if said else None) == (None if reached else 404)


def _alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().split()[2] != "Z"
    except FileNotFoundError:
        return False
