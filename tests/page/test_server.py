"""fedrema watch: what it serves, to whom, and what it says of runs that go on, stop and fail."""

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
from fedrema.page.live_runs import Followed
from fedrema.page.reading import ThinnedRun
from fedrema.page.server import LOOPBACK, _events, names_of, watching_app
from fedrema.page.status import status_of
from fedrema.runs.lock import WRITER_FILE, RunLock, Writer
from fedrema.simulation.records import NodeReports
from tests.reporting.folders import round_record, write_run


def ask(folder, path, method="GET", **more):
    """Send one request to the application, without a network."""

    async def answer():
        transport = httpx.ASGITransport(watching_app(folder))
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
    assert ask(tmp_path, "/parts/people").json()["runs"][0]["rounds"] == [1, 2, 3]
    assert ask(tmp_path, "/parts/relations").json() == {"runs": [None]}


@pytest.mark.parametrize(
    "path",
    [
        "/config.json", "/parts/config.json", "/parts/../config.json", "/parts/%2e%2e/%2e%2e/etc/passwd",
        "/../secret.txt", "/..%2fsecret.txt",
        "/parts/..%5c..%5csecret.txt", "//etc/passwd", "/run/config.json", "/static/../secret.txt",
    ],
)  # fmt: skip
def test_no_path_leads_to_a_file(tmp_path, path):
    (tmp_path / "secret.txt").write_text("a secret")
    write_run(tmp_path / "folder" / "run")
    answer = ask(tmp_path / "folder", path)
    assert answer.status_code == 404
    assert "secret" not in answer.text
    assert "fingerprint" not in answer.text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_it_only_reads(tmp_path, method):
    write_run(tmp_path / "run")
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    assert ask(tmp_path, "/parts/main", method, content=b"{}").status_code == 405
    assert ask(tmp_path, "/parts/people").status_code == 200
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == before


@pytest.mark.parametrize(
    ("host", "code"),
    [("evil.example", 400), ("192.0.2.1", 400), ("127.0.0.1:8384", 200), ("localhost:1", 200), ("[::1]:1", 200)],
)
def test_other_names_for_this_machine_are_refused(tmp_path, host, code):
    write_run(tmp_path / "run")
    assert ask(tmp_path, "/parts/main", headers={"Host": host}).status_code == code


def test_who_listens_for_others_may_be_called_by_its_own_names():
    assert names_of("127.0.0.1") == names_of("::1") == LOOPBACK
    assert {"0.0.0.0", socket.gethostname(), "127.0.0.1"} <= set(names_of("0.0.0.0"))
    assert "evil.example" not in names_of("0.0.0.0")


def test_a_folder_without_runs_waits_for_one(tmp_path):
    (tmp_path / "config.json").write_text('{"another": "program\'s"}')
    followed = Followed(tmp_path)
    followed.look()
    assert followed.part("main")["runs"] == []
    write_run(tmp_path / "run", ended=False, rounds=10)
    followed.searched -= 1  # as if a second had gone by
    followed.look()
    assert [run["status"]["done"] for run in followed.part("main")["runs"]] == [3]


def test_new_rounds_matrices_and_ends_are_noticed(tmp_path):
    run = write_run(tmp_path / "run", ended=False, rounds=10)
    followed = Followed(tmp_path)
    followed.look()
    before = dict(followed.versions)
    followed.look()
    assert followed.versions == before
    run.directory.append(round_record(4, 0.85, [0.8, 0.9]))
    followed.look()
    assert followed.versions == {
        "main": before["main"] + 1,
        "people": before["people"] + 1,
        "relations": before["relations"],
    }
    assert followed.part("people")["runs"][0]["rounds"] == [1, 2, 3, 4]
    run.directory.write_relations({4: {"S": np.eye(2, dtype=np.float32)}})
    followed.look()
    assert followed.versions["relations"] == before["relations"] + 1
    assert followed.part("relations")["runs"][0]["rounds"] == [4]
    for file in (tmp_path / "run").iterdir():
        file.unlink()
    followed.look()
    assert followed.part("main")["runs"] == []


def test_parts_that_take_long_are_made_less_often(tmp_path):
    run = write_run(tmp_path / "run", ended=False, rounds=10)
    followed = Followed(tmp_path)
    followed.look()
    followed.cost["people"] = 100.0
    run.directory.append(round_record(4))
    followed.look()
    assert (followed.versions["main"], followed.versions["people"]) == (2, 1)
    followed.cost["people"] = 0.0
    followed.look()
    assert followed.versions["people"] == 2


def test_events_say_what_has_changed(tmp_path):
    run = write_run(tmp_path / "run", ended=False, rounds=10)
    followed = Followed(tmp_path)

    async def listen():
        looks = 0

        async def gone():
            nonlocal looks
            looks += 1
            if looks == 3:
                run.directory.append(round_record(4, 0.9))
            return looks > 3

        return [line async for line in _events(followed, gone)]

    first, second, third = asyncio.run(listen())
    assert json.loads(first.removeprefix("data: "))["status"][0]["done"] == 3
    assert second == ": nothing new\n\n"
    news = json.loads(third.removeprefix("data: "))
    assert (news["versions"]["main"], news["status"][0]["done"]) == (2, 4)


def test_a_run_is_running_as_long_as_its_process_is_there(tmp_path):
    run = write_run(tmp_path / "run", ended=False, rounds=10)
    watched = ThinnedRun(run.path)
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
        assert status_of(ThinnedRun(run.path))["state"] == "running"
        process.kill()
        process.wait()
    assert status_of(ThinnedRun(run.path))["state"] == "stopped"
    assert (run.path / WRITER_FILE).is_file()


def test_another_process_with_the_same_number_is_not_the_writer():
    me = psutil.Process()
    assert Writer("here", me.pid, me.create_time(), 0).is_alive()
    assert not Writer("here", me.pid, me.create_time() - 100, 0).is_alive()


def test_on_another_machine_news_tell_whether_it_goes_on(tmp_path):
    run = write_run(tmp_path / "run", ended=False, rounds=10)
    note = {"host": "elsewhere", "process": 1, "process_began": 0, "since": time.time() - 300, "first": 0}
    (run.path / WRITER_FILE).write_text(json.dumps(note))
    assert status_of(ThinnedRun(run.path))["state"] == "running"
    old = time.time() - 100
    os.utime(run.directory.rounds_file, (old, old))
    assert status_of(ThinnedRun(run.path))["state"] == "silent"


def test_time_left_and_who_is_missing(tmp_path):
    run = write_run(tmp_path / "run", ended=False, rounds=7)
    run.directory.append(round_record(4, dropped=[0], nodes=NodeReports({"south": "it is late"})))
    me = psutil.Process()
    written = run.directory.rounds_file.stat().st_mtime
    note = {"host": socket.gethostname(), "process": me.pid, "process_began": me.create_time()}
    (run.path / WRITER_FILE).write_text(json.dumps({**note, "since": written - 8, "first": 2}))
    found = status_of(ThinnedRun(run.path))
    assert found["seconds_left"] == pytest.approx(12, abs=0.01)  # 2 rounds in 8 s, 3 more to come
    assert found["failed"] == ["north", "south (it is late)"]
    assert found["absent_count"] == 0


def test_bad_addresses_are_one_sentence(tmp_path, capsys):
    assert main(["watch", str(tmp_path / "nowhere")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert main(["watch", str(tmp_path), "--port", "70000"]) == 2
    assert "--port must lie in 0 to 65535, got 70000." in capsys.readouterr().err
    assert main(["watch", str(tmp_path), "--host", "203.0.113.7", "--port", "0"]) == 2
    assert "--host 203.0.113.7 --port 0 cannot be used" in capsys.readouterr().err


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
