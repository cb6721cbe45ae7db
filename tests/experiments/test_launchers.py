"""Launchers: tasks run in this process or in worker processes, which may be stopped or killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedrema.errors import BadInput
from fedrema.experiments.launchers import Event, InProcess, Workers
from fedrema.experiments.spec_file import read_experiment
from fedrema.experiments.store import Store, key_of
from fedrema.experiments.tasks import Task, missing_tasks, split_tasks
from fedrema.runs import execute_many
from fedrema.runs.execute import Interrupted
from tests.fixtures import accept_all

pytestmark = [pytest.mark.usefixtures("subprocesses_are_forked"), pytest.mark.xdist_group("launch")]

FILE = """
seeds = 2
[settings]
rounds = 3
clients = 4
samples = 40
hidden = 4
epochs = 1
record = "relations"
[rows.fedavg]
[rows.mine]
title = "FedReMa, patient"
method = "fedrema"
delta = 0.25
[rows.fedper]
"""

GATED = """
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedrema.methods.fedavg import FedAvg


@dataclass(frozen=True)
class Gated(FedAvg):
    "FedAvg that logs each round and waits in it until the file `go` holds its number."

    name: ClassVar[str] = "gated"
    mark: int = 0
    "Distinguishes rows."

    def aggregate(self, net, state, uploads, moment):
        with Path("begun").open("a") as stream:
            stream.write(f"{os.getpid()} {self.mark} {moment.round}\\n")
        while moment.round > int(Path("go").read_text() or 0):
            time.sleep(0.02)
        return super().aggregate(net, state, uploads, moment)
"""
ROUNDS, GATE = 40, 3
"""The number of rounds of a gated run, and the first round that waits."""
PATIENCE = 120.0
"""Seconds after which a test that waits has failed."""


def tasks_of(folder, text, store, seeds=1):
    (folder / "some.toml").write_text(text)
    return missing_tasks(read_experiment(folder / "some.toml", {"device": "cpu"}).cells, seeds, store)


def test_a_stop_requested_before_a_run_begins_takes_effect_in_its_first_round(tmp_path):
    store, work = Store(tmp_path / "runs"), tmp_path / "unfinished"
    tasks = tasks_of(tmp_path, FILE, store)
    ended, before = [], signal.getsignal(signal.SIGTERM)

    def stop_at_the_second(event):
        if event.kind == "started" and event.task is tasks[1]:
            signal.raise_signal(signal.SIGTERM)  # before its data is loaded

    with pytest.raises(Interrupted):
        ended += InProcess(store, work).run(tasks, accept_all, stop_at_the_second)
    assert len(store.keys()) == 1
    rounds = [file.read_text().count("\n") for file in work.rglob("rounds.jsonl")]
    assert rounds == [1]
    assert signal.getsignal(signal.SIGTERM) is before
    for event in InProcess(store, work).run(missing_again(tmp_path, store), accept_all, lambda event: None):
        assert not event.failed
    assert len(store.keys()) == 3


def missing_again(folder, store):
    return missing_tasks(read_experiment(folder / "some.toml", {"device": "cpu"}).cells, 1, store)


def kept(folder):
    """Return the results of stored runs, without devices and times."""
    found = {}
    for key, run in zip(Store(folder).keys(), Store(folder), strict=True):
        assert sum(run.summary["seconds"].values()) > 0
        timeless = [{name: each[name] for name in each if name != "seconds"} for each in (run.summary, run.curves)]
        found[key] = (*timeless, run.clients, run.matrices, run.matching)
    return found


def two_processes(store, folder):
    return Workers(store, folder / "work", [""], 2)


def test_worker_processes_give_the_same_results_as_this_process(tmp_path):
    here, there = Store(tmp_path / "here"), Store(tmp_path / "there")
    tasks = tasks_of(tmp_path, FILE, here, 2)
    heard = []
    one = list(InProcess(here, tmp_path / "work").run(tasks, accept_all, heard.append))
    assert [(event.kind, event.task, event.failed) for event in one] == [("finished", task, ()) for task in tasks]
    assert [event.task for event in heard if event.kind == "started"] == tasks
    assert {event.kind for event in heard} == {"started", "round"}
    heard.clear()
    other = list(two_processes(there, tmp_path).run(tasks, accept_all, heard.append))
    assert sorted(tasks.index(event.task) for event in other) == [0, 1, 2]
    assert {(event.kind, event.failed) for event in other} == {("finished", ())}
    assert sorted(tasks.index(event.task) for event in heard if event.kind == "started") == [0, 1, 2]
    for task in tasks:  # at least the first round of every run is reported
        told = [event for event in heard if event.task == task and event.kind == "round"]
        assert {(event.seed, event.round) for event in told} >= {(0, 1), (1, 1)}
        assert all(0 <= event.score <= 1 for event in told)
    assert len(kept(there.folder)) == 6
    assert kept(there.folder) == kept(here.folder)
    assert all(one.matrices["S"] for one in there)
    assert {one.ran_on.beside for one in there} == {1}
    assert {one.ran_on.beside for one in here} == {0}
    assert not list((tmp_path / "work").iterdir())


def test_divergence_is_reported_and_recorded_and_other_tasks_run(tmp_path):
    store = Store(tmp_path / "runs")
    wild = FILE.replace("[rows.mine]", "[rows.wild]\nmethod = 'fedavg'\nlr = 1e30\nclip = 0\n[rows.mine]")
    tasks = tasks_of(tmp_path, wild, store)
    ended = list(two_processes(store, tmp_path).run(tasks, accept_all, lambda event: None))
    failed = {event.task.cell.title: event.failed for event in ended}
    assert {event.kind for event in ended} == {"finished"}
    assert set(failed) == {"fedavg", "wild", "FedReMa, patient", "fedper"}
    assert [title for title, sentences in failed.items() if sentences] == ["wild"]
    (sentence,) = failed["wild"]
    assert sentence.startswith("wild, seed 0: Training diverged")
    assert [one.failed for one in store if one.failed] == [sentence.removeprefix("wild, seed 0: ")]
    assert tasks_of(tmp_path, wild, store) == []


@pytest.mark.parametrize("launcher", ["here", "workers"])
def test_a_refused_task_is_reported_in_one_sentence_and_other_tasks_run(launcher, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    for name, value in {
        "FEDREMA_DATA": tmp_path / "empty",
        "XDG_CACHE_HOME": tmp_path / "cache",
        "FEDREMA_MIRROR": "http://127.0.0.1:9",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, str(value))
    store = Store(tmp_path / "runs")
    text = FILE.replace("[rows.mine]", "[rows.absent]\nmethod = 'fedavg'\ndataset = 'mnist'\n[rows.mine]")
    tasks = tasks_of(tmp_path, text, store)
    made = InProcess(store, tmp_path / "work") if launcher == "here" else two_processes(store, tmp_path)
    ended = list(made.run(tasks, accept_all, lambda event: None))
    assert sorted(event.kind for event in ended) == ["failed", "finished", "finished", "finished"]
    (sentence,) = [sentence for event in ended for sentence in event.failed]
    assert sentence.startswith("absent: cannot download train-images-idx3-ubyte.gz from http://127.0.0.1:9/mnist/")
    assert "\n" not in sentence
    assert [task.cell.title for task in tasks_of(tmp_path, text, store)] == ["absent"]  # it counts as missing


@pytest.mark.parametrize("launcher", ["here", "workers"])
def test_tasks_that_do_not_fit_are_not_started(launcher, tmp_path):
    store = Store(tmp_path / "runs")
    tasks = tasks_of(tmp_path, FILE, store)
    asked, heard = [], []

    def fits(task):
        asked.append(task)
        return task.cell.method == "fedper"

    made = InProcess(store, tmp_path / "work") if launcher == "here" else two_processes(store, tmp_path)
    assert [event.task for event in made.run(tasks, fits, heard.append)] == [tasks[2]]
    assert asked == tasks
    assert [event.task for event in heard if event.kind == "started"] == [tasks[2]]
    assert store.keys() == [key_of(tasks[2].runs[0])]


SHAPES = """
[settings]
rounds = 3
clients = 4
samples = 40
hidden = 4
epochs = 1
backend = "stacked"
[columns.strong]
s = 0.2
[columns.weak]
s = 0.6
[columns.fast]
lr = 0.2
[rows.fedavg]
[rows.fedper]
"""


@pytest.fixture
def together(monkeypatch):
    """Count the runs that are executed together; also on a CPU, where the computation is the same as on a GPU."""
    counts = []
    monkeypatch.setattr(execute_many, "TOGETHER_ON", ("cpu", "cuda"))
    original = execute_many._train
    monkeypatch.setattr(execute_many, "_train", lambda runs, *rest: counts.append(len(runs)) or original(runs, *rest))
    return counts


def test_neighbouring_cells_of_one_shape_are_executed_together_with_the_same_results(tmp_path, together):
    store, alone = Store(tmp_path / "together"), Store(tmp_path / "alone")
    tasks, heard = tasks_of(tmp_path, SHAPES, store), []
    ended = list(InProcess(store, tmp_path / "work", runs_together=5).run(tasks, accept_all, heard.append))
    assert together == [2, 1, 2, 1]  # another learning rate or method is another shape
    assert [(event.kind, event.task) for event in ended] == [("finished", task) for task in tasks]
    assert [event.task for event in heard if event.kind == "started"] == tasks
    assert all(any(event.task is task for event in heard if event.kind == "round") for task in tasks)
    assert not list((tmp_path / "work").iterdir())
    for _ in InProcess(alone, tmp_path / "work").run(tasks, accept_all, heard.append):
        pass
    assert together[4:] == [1] * 6
    assert len(kept(store.folder)) == 6
    scores = [[(run.summary.metrics, run.curves["accuracy"], run.clients) for run in each] for each in (store, alone)]
    assert scores[0] == scores[1]


def test_cells_are_executed_together_up_to_a_number_of_runs_and_as_far_as_time_is_left(tmp_path, together):
    store, asked = Store(tmp_path / "runs"), []
    tasks = tasks_of(tmp_path, SHAPES, store, seeds=2)

    def fits(*chosen):
        asked.append(tuple(tasks.index(task) for task in chosen))
        return asked[-1] != (3, 4)

    list(InProcess(store, tmp_path / "work", runs_together=4).run(tasks, fits, lambda event: None))
    assert together == [4, 2, 2, 2, 2]
    assert asked == [(0,), (0, 1), (2,), (3,), (3, 4), (4,), (5,)]
    few = Store(tmp_path / "few")
    list(InProcess(few, tmp_path / "work", runs_together=3).run(tasks, accept_all, lambda event: None))
    assert together[5:] == [2] * 6


def test_of_cells_that_are_executed_together_only_the_refused_one_fails(tmp_path, together, monkeypatch):
    store = Store(tmp_path / "runs")
    tasks = tasks_of(tmp_path, SHAPES, store)[:2]
    original = execute_many.build_federation

    def refusing(data):
        if data.s == 0.6:
            raise BadInput("there are too few images.")
        return original(data)

    monkeypatch.setattr(execute_many, "build_federation", refusing)
    ended = list(InProcess(store, tmp_path / "work", 5).run(tasks, accept_all, lambda event: None))
    assert [(event.kind, event.failed) for event in ended] == [
        ("finished", ()), ("failed", ("fedavg, weak: there are too few images.",)),
    ]  # fmt: skip
    assert store.keys() == tasks[0].keys


class GridProcess:
    """`fedrema grid --workers 2` in its own folder, with rows whose rounds wait for the test."""

    def __init__(self, folder, rows, module=GATED):
        self.folder = folder
        (folder / "gated.py").write_text(module)
        settings = FILE.partition("[rows.")[0].replace("rounds = 3", f"rounds = {ROUNDS}").replace("seeds = 2", "")
        settings += "record_every = 10\ncheckpoint_every = 1\n"
        lines = [f"[rows.r{mark}]\nmethod = 'gated:Gated'\nmark = {mark}\n" for mark in range(rows)]
        (folder / "table.toml").write_text("\n".join([settings, *lines]))
        self.allow(GATE - 1)

    def allow(self, last):
        (self.folder / "go").write_text(str(last))

    def start(self, *arguments, python=None):
        command = [
            python or sys.executable,
            "-m",
            "fedrema",
            "grid",
            "table.toml",
            "--device",
            "cpu",
            "--out",
            "out",
            *arguments,
        ]
        # Files instead of pipes: a pipe stays open until the last process that inherited it exits.
        with (self.folder / "stderr").open("w") as errors, (self.folder / "stdout").open("w") as output:
            return subprocess.Popen(command, cwd=self.folder, stderr=errors, stdout=output)

    def errors(self):
        return (self.folder / "stderr").read_text()

    def finish(self):
        """Run the missing rounds without waiting, and return the results."""
        self.allow(ROUNDS)
        assert self.start("--workers", "2").wait(PATIENCE) == 0, self.errors()
        return kept(self.folder / "out" / "runs")

    def begun_rounds(self):
        """Return (process, row, round) of each round that has begun."""
        file = self.folder / "begun"
        lines = file.read_text().splitlines() if file.is_file() else []
        return [tuple(map(int, line.split())) for line in lines if line.count(" ") == 2]

    def at_the_gate(self, *marks):
        """Wait until rows have reached the first waiting round; return the processes that run them."""
        found = {}
        for _ in polling():
            found = {mark: process for process, mark, number in self.begun_rounds() if number == GATE and mark in marks}
            if set(found) == set(marks):
                return [found[mark] for mark in marks]
        return pytest.fail(f"only {found} of {marks} have begun")

    def advance_until(self, ended):
        """Let all processes run one round at a time until a condition is true."""
        for number, _ in enumerate(polling(), start=GATE):
            if ended():
                return
            self.allow(number)

    def saved(self):
        """Return the last saved round of each unfinished row."""
        folders = [file.parent for file in (self.folder / "out" / "unfinished").glob("*/config.json")]
        marks = [json.loads((folder / "config.json").read_text())["settings"]["mark"] for folder in folders]
        assert all((folder / "checkpoint" / "state.safetensors").is_file() for folder in folders)
        return {
            mark: len((folder / "rounds.jsonl").read_text().splitlines())
            for mark, folder in zip(marks, folders, strict=True)
        }


def polling():
    """Yield every 0.1 seconds; fail after PATIENCE seconds."""
    begun = time.monotonic()
    while time.monotonic() - begun < PATIENCE:
        yield
        time.sleep(0.1)
    pytest.fail("this has taken too long")


def is_gone(process):
    """Return whether a process that is not our child has exited; a zombie counts as exited."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, programs):
    """The results of three rows that ran without interruption, sequentially in one process."""
    grid = GridProcess(tmp_path_factory.mktemp("undisturbed"), 3)
    grid.allow(ROUNDS)
    assert grid.start("--quiet", python=programs / "python").wait(PATIENCE) == 0, grid.errors()
    assert grid.errors() == (grid.folder / "stdout").read_text() == ""
    assert sorted((mark, number) for _, mark, number in grid.begun_rounds()) == [
        (mark, number) for mark in range(3) for number in range(1, ROUNDS + 1)
    ]
    return kept(grid.folder / "out" / "runs")


def test_on_sigterm_all_workers_save_and_the_same_command_continues(undisturbed, tmp_path):
    grid = GridProcess(tmp_path, 3)
    process = grid.start("--workers", "2")
    grid.at_the_gate(0, 1)
    process.send_signal(signal.SIGTERM)
    grid.advance_until(lambda: process.poll() is not None)
    assert process.returncode == 130
    assert grid.errors().endswith("fedrema: stopped; the same command continues from here.\n")
    assert "Traceback" not in grid.errors()
    saved = grid.saved()
    assert set(saved) == {0, 1}  # the third had not started
    assert all(GATE <= number < ROUNDS for number in saved.values())
    assert not (grid.folder / "out" / "runs").exists()
    assert (grid.folder / "out" / "table.md").is_file()
    (grid.folder / "begun").unlink()
    assert grid.finish() == undisturbed
    begun = {mark: min(number for _, other, number in grid.begun_rounds() if other == mark) for mark in range(3)}
    assert begun == {**{mark: number + 1 for mark, number in saved.items()}, 2: 1}
    assert not (grid.folder / "out" / "unfinished").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 130)])
def test_a_killed_worker_is_reported_and_replaced(number, code, undisturbed, tmp_path):
    grid = GridProcess(tmp_path, 3)
    process = grid.start("--workers", "2")
    victim, _ = grid.at_the_gate(0, 1)
    os.kill(victim, number)
    grid.advance_until(lambda: is_gone(victim))
    grid.allow(ROUNDS)
    assert process.wait(PATIENCE) == 2
    sentence = f"fedrema: r0: its process ended with code {code}; its last checkpoint is kept."
    assert grid.errors().splitlines()[-1] == sentence
    assert "Traceback" not in grid.errors()
    (third,) = {process for process, mark, _ in grid.begun_rounds() if mark == 2}
    assert third != victim
    assert len(kept(grid.folder / "out" / "runs")) == 2
    (last,) = grid.saved().values()
    (grid.folder / "begun").unlink()
    assert grid.finish() == undisturbed
    assert {mark for _, mark, _ in grid.begun_rounds()} == {0}
    assert min(number for _, _, number in grid.begun_rounds()) == last + 1 >= GATE


def test_a_worker_saves_and_exits_when_its_parent_is_killed(undisturbed, tmp_path):
    grid = GridProcess(tmp_path, 3)
    process = grid.start("--workers", "2")
    workers = grid.at_the_gate(0, 1)
    process.kill()
    process.wait()
    grid.advance_until(lambda: all(map(is_gone, workers)))
    saved = grid.saved()
    assert set(saved) == {0, 1}
    assert all(GATE <= number < ROUNDS for number in saved.values())
    assert {mark: max(number for _, other, number in grid.begun_rounds() if other == mark) for mark in saved} == saved
    (grid.folder / "begun").unlink()
    assert grid.finish() == undisturbed
    assert min(number for _, mark, number in grid.begun_rounds() if mark == 0) == saved[0] + 1


def test_output_of_a_method_does_not_disturb_the_workers_protocol(undisturbed, tmp_path):
    grid = GridProcess(tmp_path, 3, GATED.replace("        while", "        print('hello')\n        while"))
    found = grid.finish()
    assert not found.keys() & undisturbed.keys()  # the method's file differs, and with it the keys
    assert sorted(map(repr, found.values())) == sorted(map(repr, undisturbed.values()))
    assert "Traceback" not in grid.errors()


def test_the_largest_tasks_are_halved_until_every_worker_has_one(tmp_path):
    store = Store(tmp_path / "runs")
    one, *_ = tasks_of(tmp_path, FILE, store, 5)
    other = Task(one.cell, (0, 1))
    assert split_tasks([one, other], 2) == [one, other]
    assert [task.seeds for task in split_tasks([one, other], 4)] == [(0, 1), (2,), (3, 4), (0, 1)]
    assert [task.seeds for task in split_tasks([one, other], 20)] == [(0,), (1,), (2,), (3,), (4,), (0,), (1,)]
    assert split_tasks([], 3) == []
    assert all(task.cell is one.cell for task in split_tasks([one, other], 20))


@pytest.mark.parametrize("vary", ["training", "both"])
def test_an_encoded_task_decodes_to_the_same_task(vary, tmp_path):
    store = Store(tmp_path / "runs")
    tasks = tasks_of(tmp_path, f"vary = '{vary}'\n{FILE}", store, 3)
    assert [task.seeds for task in tasks] == [(0, 1, 2)] * 3
    for task in tasks:
        again = Task.decoded(task.encoded())
        assert again.runs == task.runs
        assert [key_of(settings) for settings in again.runs] == [key_of(settings) for settings in task.runs]
        assert (again.cell.title, again.seeds, again.rounds) == (task.cell.title, task.seeds, 3 * len(task.seeds))
        for seed, settings in zip(again.seeds, again.runs, strict=True):
            assert settings.simulation.seed == seed
            assert settings.data.data_seed == (seed if vary == "both" else 0)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("round", {"seed": 0, "round": 1, "score": 0.0}),
        ("round", {"seed": 3, "round": 20, "score": 0.5}),
        ("round", {"seed": 3, "round": 20}),
        ("finished", {"failed": ("one: ü", "two")}),
        ("stopped", {}),
    ],
)
def test_encoded_events_decode_to_the_same_events(kind, values, tmp_path):
    task, *_ = tasks_of(tmp_path, FILE, Store(tmp_path / "runs"))
    event = Event(kind, task, **values)
    heard = Event.decoded(event.encoded(), task)
    assert heard.task is task
    assert (heard.kind, heard.seed, heard.round, heard.score, heard.metric, heard.failed) == (
        event.kind, event.seed, event.round, event.score, event.metric, event.failed,
    )  # fmt: skip
    assert "\n" not in event.encoded()
