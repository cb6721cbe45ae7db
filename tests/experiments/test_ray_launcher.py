"""Tasks on a real Ray cluster with two worker processes: the stored results equal those of this process alone."""

import contextlib
import os
import queue
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from fedrema import __version__
from fedrema.cli import main
from fedrema.errors import BadInput
from fedrema.experiments import ray_launcher
from fedrema.experiments.launchers import Event, InProcess
from fedrema.experiments.ray_launcher import OnRay, Slot, run_there
from fedrema.experiments.spec_file import read_experiment
from fedrema.experiments.store import Store, key_of
from fedrema.experiments.tasks import missing_tasks
from fedrema.runs.execute import Interrupted
from tests.fixtures import accept_all

# Versions of Ray before 2.60 leave /dev/null open and do not wait for their processes on exit.
pytestmark = [
    pytest.mark.xdist_group("ray"),
    pytest.mark.filterwarnings("ignore:unclosed file.*/dev/null:ResourceWarning"),
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
]

SMALL = "[settings]\nrounds = 3\nclients = 4\nsamples = 40\nhidden = 4\nepochs = 1\n"
FILE = f"{SMALL}[columns.small]\nlr = 0.01\n[columns.large]\nlr = 0.1\n[rows.fedavg]\n[rows.fedrema]\n"


@pytest.fixture(scope="module", autouse=True)
def no_ray_is_left():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        yield
        ray.shutdown()


@pytest.fixture
def two_processes():
    """A Ray cluster that the tests share, because it takes seconds to start."""
    if not ray.is_initialized():
        # Shared memory may be small on test machines; 80 MB is the minimum of Ray.
        ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=80 * 2**20)


def written(tmp_path, text):
    path = tmp_path / "some.toml"
    path.write_text(text)
    return path


def tasks_of(tmp_path, text, store, seeds=1):
    return missing_tasks(read_experiment(written(tmp_path, text)).cells, seeds, store)


def ignore(event):
    pass


def working_folder(launcher):
    return Path(tempfile.gettempdir()) / launcher.folder


@pytest.fixture(autouse=True)
def no_temporary_files_are_left(monkeypatch):
    made, begin = [], OnRay.__init__
    monkeypatch.setattr(OnRay, "__init__", lambda launcher, *given: (begin(launcher, *given), made.append(launcher))[0])
    yield
    for launcher in made:
        with contextlib.suppress(FileNotFoundError):
            working_folder(launcher).rmdir()  # fails unless the folder is empty


@pytest.mark.slow
def test_the_command_starts_and_stops_its_own_ray(tmp_path, capsys):
    ray.shutdown()  # started by other tests
    file, out = written(tmp_path, FILE), tmp_path / "out"
    arguments = ["--launcher", "ray", "--seeds", "1", "--only", "small", "--out", str(out)]
    assert main(["grid", str(file), *arguments]) == 0
    assert not ray.is_initialized()
    assert "2 of 2 runs finished" in capsys.readouterr().err
    assert len(Store(out / "runs").keys()) == 2
    assert (out / "some.md").read_text().count("| 1 |") == 2


@pytest.mark.slow
@pytest.mark.usefixtures("two_processes")
def test_two_processes_compute_the_same_results_as_one(tmp_path):
    alone, store = Store(tmp_path / "alone"), Store(tmp_path / "runs")
    tasks = tasks_of(tmp_path, FILE, store, seeds=2)
    list(InProcess(alone, tmp_path / "work").run(tasks, accept_all, ignore))
    began = time.time()
    launcher, heard = OnRay(store, 2, "auto"), []
    assert launcher.at_once == 2
    last = list(launcher.run(tasks, accept_all, heard.append))
    assert ray.is_initialized()  # a cluster that was already running is kept
    assert sorted(map(id, tasks)) == sorted(id(event.task) for event in last)
    assert {(event.kind, event.failed) for event in last} == {("finished", ())}
    assert [event.task for event in heard if event.kind == "started"] == tasks
    assert {event.seed for event in heard if event.kind == "round"} == {0, 1}
    assert store.keys() == alone.keys()
    assert len(store.keys()) == 8
    for one, other in zip(store, alone, strict=True):
        assert replace(one.summary, seconds={}) == replace(other.summary, seconds={})  # everything else is equal
        assert one.curves | {"seconds": None} == other.curves | {"seconds": None}
        assert (one.settings, one.clients) == (other.settings, other.clients)
        assert (one.ran_on.beside, one.ran_on.threads) == (1, 1)
    assert list(working_folder(launcher).iterdir()) == []
    # With a delay, Ray's timeline shows which process ran which task.
    processes, patience = set(), time.monotonic() + 15
    while len(processes) < 2 and time.monotonic() < patience:
        events = [event for event in ray.timeline() if event["cat"] == "task::run_there" and event["ts"] > 1e6 * began]
        processes = {event["tid"] for event in events}
        time.sleep(0.2)
    assert len(processes) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("two_processes")
def test_a_task_starts_when_a_worker_is_free_and_only_if_it_fits(tmp_path):
    store = Store(tmp_path / "runs")
    tasks = tasks_of(tmp_path, FILE, store)
    happened = []

    def fits(task):
        happened.append(("asked", tasks.index(task)))
        return tasks.index(task) in (1, 3)

    def report(event):
        happened.append((event.kind, tasks.index(event.task)))

    for event in OnRay(store, 1, "auto").run(tasks, fits, lambda event: event.kind == "started" and report(event)):
        report(event)
    assert happened == [
        ("asked", 0), ("asked", 1), ("started", 1), ("finished", 1),
        ("asked", 2), ("asked", 3), ("started", 3), ("finished", 3),
    ]  # fmt: skip
    assert len(store.keys()) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("two_processes")
def test_divergence_and_missing_data_are_reported_and_other_tasks_run(tmp_path):
    text = SMALL + (
        "[rows.wild]\nmethod = 'fedavg'\nlr = 1e30\nclip = 0\n"
        "[rows.absent]\nmethod = 'fedavg'\nfederation = '/nowhere/mine.npz'\n[rows.fedavg]\n"
    )
    store = Store(tmp_path / "runs")
    tasks = tasks_of(tmp_path, text, store)
    found = {event.task.cell.title: event for event in OnRay(store, 2, "auto").run(tasks, accept_all, ignore)}
    assert {title: event.kind for title, event in found.items()} == {
        "wild": "finished", "absent": "failed", "fedavg": "finished"
    }  # fmt: skip
    assert found["wild"].failed[0].startswith("wild, seed 0: Training diverged")
    assert found["absent"].failed[0].startswith("absent: ")
    assert "/nowhere/mine.npz" in found["absent"].failed[0]
    assert [bool(run.failed) for run in store] == [key == key_of(tasks[0].runs[0]) for key in store.keys()]  # noqa: SIM118
    assert len(store.keys()) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("two_processes")
def test_a_lost_process_is_replaced_once(tmp_path, monkeypatch):
    def unlucky(order, number, *more):
        if number == 0 and not (tmp_path / "died").exists():
            (tmp_path / "died").touch()
            os._exit(1)
        if number == 1:
            os._exit(1)
        if number == 2:
            raise RuntimeError("out of luck\nand more of it")
        return run_there(order, number, *more)

    monkeypatch.setattr(ray_launcher, "run_there", unlucky)
    store, heard = Store(tmp_path / "runs"), []
    tasks = tasks_of(tmp_path, FILE, store)
    found = {tasks.index(event.task): event for event in OnRay(store, 2, "cpu").run(tasks, accept_all, heard.append)}
    assert [found[number].kind for number in range(4)] == ["finished", "failed", "failed", "finished"]
    lost = "fedavg, large: its process was lost twice (WorkerCrashedError); its last checkpoint is kept."
    assert found[1].failed == (lost,)
    assert found[2].failed == ("fedrema, small: RuntimeError: out of luck",)
    assert [event.task for event in heard if event.kind == "started"] == tasks
    assert len(store.keys()) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("two_processes")
def test_a_stopped_grid_keeps_finished_runs_and_continues(tmp_path):
    text = FILE.replace("rounds = 3", "rounds = 300")
    store, heard = Store(tmp_path / "runs"), []
    tasks = tasks_of(tmp_path, text, store, seeds=2)[:1]
    launcher = OnRay(store, 2, "auto")

    def stop(event):
        heard.append(event.kind)
        if event.kind == "round" and event.seed == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        list(launcher.run(tasks, accept_all, stop))
    assert heard[-1] == "stopped"
    assert store.keys() == [key_of(tasks[0].runs[0])]  # the first seed
    assert [folder.name for folder in working_folder(launcher).iterdir()] == [key_of(tasks[0].runs[1])]
    rounds = []
    tasks = tasks_of(tmp_path, text, store, seeds=2)[:1]
    assert tasks[0].seeds == (1,)
    assert [event.kind for event in launcher.run(tasks, accept_all, rounds.append)] == ["finished"]
    assert next(event for event in rounds if event.kind == "round").round > 1
    assert len(store.keys()) == 2
    assert store.at(key_of(tasks[0].runs[0])).curves["round"] == list(range(1, 301))


def test_a_machine_with_another_version_refuses(tmp_path):
    (task,) = tasks_of(tmp_path, f"{SMALL}[rows.fedavg]", Store(tmp_path / "runs"))
    line, cells = run_there(task.encoded(), 0, "0.0", str(tmp_path), 1, 0, queue.SimpleQueue())
    event = Event.decoded(line, task)
    assert event.kind == "failed"
    assert f"has fedrema {__version__}, not 0.0" in event.failed[0]
    assert cells == {}


def test_a_worker_machine_returns_files_and_keeps_none(tmp_path):
    store, rounds = Store(tmp_path / "runs"), queue.SimpleQueue()
    (task,) = tasks_of(tmp_path, f"{SMALL}[rows.fedavg]", store)
    line, cells = run_there(task.encoded(), 7, __version__, str(tmp_path / "work"), 1, 3, rounds)
    assert Event.decoded(line, task) == Event("finished", task)
    assert list(cells) == [key_of(task.runs[0])]
    assert '"beside":3' in cells[key_of(task.runs[0])]
    assert rounds.get()[0] == 7
    assert list((tmp_path / "work").iterdir()) == []


NODES = [
    {"NodeID": "head", "Alive": True, "Resources": {"memory": 1e9}},
    {"NodeID": "gone", "Alive": False, "Resources": {"CPU": 99.0}},
    {"NodeID": "large", "Alive": True, "Resources": {"CPU": 16.0, "GPU": 2.0}},
    {"NodeID": "small", "Alive": True, "Resources": {"CPU": 2.0}},
]


@pytest.mark.parametrize(
    ("workers", "device", "places"),
    [
        (1, "auto", {Slot("large", 0, 1, 8): 2}),
        (3, "cuda", {Slot("large", 0, 0.3333, 2): 6}),
        (1, "cpu", {Slot("large", 16, 0, 16): 1, Slot("small", 2, 0, 2): 1}),
        (3, "cpu", {Slot("large", 5.3333, 0, 5): 3, Slot("small", 0.6666, 0, 1): 3}),
    ],
)
def test_resources_of_machines_are_divided_among_workers(workers, device, places, monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "nodes", lambda: NODES)
    launcher = OnRay(Store(Path("none")), workers, device)
    assert launcher.slots() == places
    assert launcher.at_once == sum(places.values())
    monkeypatch.setattr(ray, "nodes", lambda: NODES[:2])
    with pytest.raises(BadInput, match="neither CPUs nor GPUs"):
        OnRay(Store(Path("none")), workers, device)


def test_without_ray_one_sentence_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "fedrema.experiments.ray_launcher")
    assert main(["grid", str(written(tmp_path, FILE)), "--launcher", "ray", "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.endswith("fedrema: --launcher ray needs Ray: pip install 'fedrema[ray]'.\n")
    assert not (tmp_path / "out" / "runs").exists()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "nothing"])
def test_an_unreachable_cluster_is_named(address, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(BadInput, match=f"RAY_ADDRESS={address} cannot be joined: "):
        OnRay(Store(Path("none")), 1, "auto")
