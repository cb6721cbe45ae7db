"""fedrema watch: the served pages, access control, and the status of running, stopped and failed runs."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import numpy as np
import psutil
import pytest

from fedrema.cli import main
from fedrema.page.live_runs import LiveRuns
from fedrema.page.reading import DownsampledRun
from fedrema.page.server import LOOPBACK, _events, host_names, watch_app
from fedrema.page.status import status_of
from fedrema.runs.lock import WRITER_FILE, RunLock, Writer
from fedrema.simulation.records import NodeReports
from tests.reporting.folders import round_record, write_run


def ask(folder, path, method="GET", **more):
    """Send one request to the application, without a network."""

    async def answer():
        transport = httpx.ASGITransport(watch_app(folder))
        address = httpx.URL("http://127.0.0.1:8384").copy_with(raw_path=path.encode())
        async with httpx.AsyncClient(transport=transport) as client:
            return await client.request(method, address, **more)

    return asyncio.run(answer())


def test_the_page_and_its_parts(tmp_path):
    write_run(tmp_path / "run")
    page = ask(tmp_path, "/")
    assert page.status_code == 200
    assert '"live":true' in page.text
    assert page.headers["x-content-type-options"] == "nosniff"
    assert ask(tmp_path, "/parts/main").json()["groups"][0]["label"] == "FedAvg"
    assert ask(tmp_path, "/parts/clients").json()["runs"][0]["rounds"] == [1, 2, 3]
    assert ask(tmp_path, "/parts/relations").json() == {"runs": [None]}


@pytest.mark.parametrize(
    "path",
    [
        "/config.json", "/parts/config.json", "/parts/../config.json", "/parts/%2e%2e/%2e%2e/etc/passwd",
        "/../secret.txt", "/..%2fsecret.txt",
        "/parts/..%5c..%5csecret.txt", "//etc/passwd", "/run/config.json", "/static/../secret.txt",
    ],
)  # fmt: skip
def test_no_path_serves_a_file(tmp_path, path):
    (tmp_path / "secret.txt").write_text("a secret")
    write_run(tmp_path / "folder" / "run")
    answer = ask(tmp_path / "folder", path)
    assert answer.status_code == 404
    assert "secret" not in answer.text
    assert "fingerprint" not in answer.text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_requests_that_write_are_refused(tmp_path, method):
    write_run(tmp_path / "run")
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    assert ask(tmp_path, "/parts/main", method, content=b"{}").status_code == 405
    assert ask(tmp_path, "/parts/clients").status_code == 200
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(
    ("host", "code"),
    [("evil.example", 400), ("192.0.2.1", 400), ("127.0.0.1:8384", 200), ("localhost:1", 200), ("[::1]:1", 200)],
)
def test_requests_for_other_host_names_are_refused(tmp_path, host, code):
    write_run(tmp_path / "run")
    assert ask(tmp_path, "/parts/main", headers={"Host": host}).status_code == code


def test_a_server_on_all_addresses_accepts_the_names_of_its_machine():
    assert host_names("127.0.0.1") == host_names("::1") == LOOPBACK
    assert {"0.0.0.0", socket.gethostname(), "127.0.0.1"} <= set(host_names("0.0.0.0"))
    assert "evil.example" not in host_names("0.0.0.0")


def test_a_folder_without_runs_waits_for_one(tmp_path):
    (tmp_path / "config.json").write_text('{"another": "program\'s"}')
    live = LiveRuns(tmp_path)
    live.refresh()
    assert live.part("main")["runs"] == []
    write_run(tmp_path / "run", ended=False, rounds=10)
    live.searched -= 1  # as if a second had passed
    live.refresh()
    assert [run["status"]["done"] for run in live.part("main")["runs"]] == [3]


def test_new_rounds_and_matrices_make_new_versions(tmp_path):
    run = write_run(tmp_path / "run", ended=False, rounds=10)
    live = LiveRuns(tmp_path)
    live.refresh()
    before = dict(live.versions)
    live.refresh()
    assert live.versions == before
    run.directory.append(round_record(4, 0.85, [0.8, 0.9]))
    live.refresh()
    assert live.versions == {
        "main": before["main"] + 1,
        "clients": before["clients"] + 1,
        "relations": before["relations"],
        "verdict": before["verdict"] + 1,
    }
    assert live.part("clients")["runs"][0]["rounds"] == [1, 2, 3, 4]
    run.directory.write_relations({4: {"S": np.eye(2, dtype=np.float32)}}, 4)
    live.refresh()
    assert live.versions["relations"] == before["relations"] + 1
    assert live.part("relations")["runs"][0]["rounds"] == [4]
    for file in (tmp_path / "run").iterdir():
        file.unlink()
    live.refresh()
    assert live.part("main")["runs"] == []


def test_expensive_parts_are_updated_less_often(tmp_path):
    run = write_run(tmp_path / "run", ended=False, rounds=10)
    live = LiveRuns(tmp_path)
    live.refresh()
    live.cost["clients"] = 100.0
    run.directory.append(round_record(4))
    live.refresh()
    assert (live.versions["main"], live.versions["clients"]) == (2, 1)
    live.cost["clients"] = 0.0
    live.refresh()
    assert live.versions["clients"] == 2


def test_events_announce_changes(tmp_path):
    run = write_run(tmp_path / "run", ended=False, rounds=10)
    live = LiveRuns(tmp_path)

    async def listen():
        looks = 0

        async def gone():
            nonlocal looks
            looks += 1
            if looks == 3:
                run.directory.append(round_record(4, 0.9))
            return looks > 3

        return [line async for line in _events(live, gone)]

    first, second, third = asyncio.run(listen())
    assert json.loads(first.removeprefix("data: "))["status"][0]["done"] == 3
    assert second == ": no change\n\n"
    news = json.loads(third.removeprefix("data: "))
    assert (news["versions"]["main"], news["status"][0]["done"]) == (2, 4)


def test_a_run_is_shown_as_running_while_its_process_exists(tmp_path):
    run = write_run(tmp_path / "run", ended=False, rounds=10)
    watched = DownsampledRun(run.path)
    assert status_of(watched)["state"] == "stopped"
    with RunLock(run.path) as lock:
        assert status_of(watched)["state"] == "stopped"  # an export writes, but does not train
        lock.training_from(1)
        now = status_of(watched)
        assert now["state"] == "running"
        assert (now["done"], now["rounds"]) == (3, 10)
    assert status_of(watched)["state"] == "stopped"
    run.directory.write_json(run.directory.summary_file, {"rounds": 3})
    assert status_of(watched)["state"] == "finished"


def test_a_killed_run_is_shown_as_stopped(tmp_path):
    run = write_run(tmp_path / "run", ended=False, rounds=10)
    code = (
        "import pathlib, time\nfrom fedrema.runs.lock import RunLock\n"
        f"with RunLock(pathlib.Path({str(run.path)!r})) as lock:\n"
        "    lock.training_from(0)\n    print('training', flush=True)\n    time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        assert status_of(DownsampledRun(run.path))["state"] == "running"
        process.kill()
        process.wait()
    assert status_of(DownsampledRun(run.path))["state"] == "stopped"
    assert (run.path / WRITER_FILE).is_file()


def test_another_process_with_the_same_id_is_not_the_writer():
    me = psutil.Process()
    assert Writer("here", me.pid, me.create_time(), 0).is_alive()
    assert not Writer("here", me.pid, me.create_time() - 100, 0).is_alive()


def test_on_another_machine_new_records_show_that_it_is_running(tmp_path):
    run = write_run(tmp_path / "run", ended=False, rounds=10)
    note = {"host": "elsewhere", "process": 1, "process_began": 0, "since": time.time() - 300, "first": 0}
    (run.path / WRITER_FILE).write_text(json.dumps(note))
    assert status_of(DownsampledRun(run.path))["state"] == "running"
    old = time.time() - 100
    os.utime(run.directory.rounds_file, (old, old))
    assert status_of(DownsampledRun(run.path))["state"] == "silent"


def test_time_left_and_missing_clients(tmp_path):
    run = write_run(tmp_path / "run", ended=False, rounds=7)
    run.directory.append(round_record(4, dropped=[0], nodes=NodeReports({"south": "it is late"})))
    me = psutil.Process()
    written = run.directory.rounds_file.stat().st_mtime
    note = {"host": socket.gethostname(), "process": me.pid, "process_began": me.create_time()}
    (run.path / WRITER_FILE).write_text(json.dumps({**note, "since": written - 8, "first": 2}))
    found = status_of(DownsampledRun(run.path))
    assert found["seconds_left"] == pytest.approx(12, abs=0.01)  # 2 rounds in 8 s, 3 more to come
    assert found["failed"] == ["north", "south (it is late)"]
    assert found["absent_count"] == 0


def test_invalid_addresses_are_refused_in_one_sentence(tmp_path, capsys):
    assert main(["watch", str(tmp_path / "nowhere")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert main(["watch", str(tmp_path), "--port", "70000"]) == 2
    assert "--port must be between 0 and 65535, got 70000." in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["watch", str(tmp_path), "--port", port]) == 2
    assert f"--host 127.0.0.1 --port {port} cannot be used" in capsys.readouterr().err


def test_the_command_serves_live_rounds_and_ends_quietly(tmp_path):
    run = write_run(tmp_path / "run", ended=False, rounds=10)
    command = [sys.executable, "-m", "fedrema", "watch", str(tmp_path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        address = server.stdout.readline().split()[2]
        assert address.startswith("http://127.0.0.1:")
        with httpx.stream("GET", f"{address}events", timeout=30) as events:
            lines = (line for line in events.iter_lines() if line.startswith("data:"))
            assert json.loads(next(lines)[5:])["status"][0]["done"] == 3
            run.directory.append(round_record(4, 0.9))
            assert json.loads(next(lines)[5:])["status"][0]["done"] == 4
        server.send_signal(signal.SIGINT)
        assert server.wait(30) == 0
        assert server.stdout.read() == ""
