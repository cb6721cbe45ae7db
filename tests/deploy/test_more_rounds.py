"""A finished federation continues when its number of rounds is raised, and otherwise exits at once."""

import re
import sys
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("flwr")

from fedrema.base.processes import SupervisedProcess
from fedrema.cli import main
from fedrema.deploy import services
from fedrema.deploy.flower_conductor import Conductor
from fedrema.deploy.folder import NodeFolder, ServerFolder
from fedrema.deploy.run_config import read_run_config
from fedrema.deploy.run_state import locked_run
from fedrema.deploy.status import read_status
from fedrema.errors import BadInput
from fedrema.runs.run import Run
from tests.deploy.flower_in_process import InProcessGrid

NAMES = ("north", "south", "west")


def created(folder, *more):
    words = ["--epochs", "1", "--samples", "40", "--hidden", "6", "--device", "cpu", "--precision", "float64", *more]
    assert main(["deploy", "init", str(folder), "fedrema", "--deal", "--nodes", ",".join(NAMES), *words]) == 0
    return ServerFolder.open(folder)


def set_rounds(place, rounds):
    file = place.app / "pyproject.toml"
    text, found = re.subn(r"(?m)^rounds = .*$", f"rounds = {rounds}", file.read_text())
    assert found == 1
    file.write_text(text)


class Control:
    """Replaces Flower: conducts a started run in this process, with the real folders of the nodes."""

    def __init__(self, place):
        self.place, self.starts = place, 0

    def admit(self, keys):
        return []

    def stop_all(self):
        pass

    def start(self, app, config):
        self.starts += 1
        nodes = [NodeFolder.open(self.place.path.parent / "nodes" / name) for name in NAMES]
        for node in nodes:
            node.kept.mkdir(exist_ok=True)
        known = dict(zip((7, 8, 9), NAMES, strict=True))
        everything = {**self.place.run_config(), **config}
        grid = InProcessGrid(everything, [node.node_config() for node in nodes], known)
        with locked_run(self.place.run) as lock:
            Conductor(grid, *read_run_config(everything), pause=lambda seconds: None).conduct(lock)


@pytest.fixture
def served(monkeypatch):
    """Return a function that serves a federation and returns the exit code and the number of started runs."""
    monkeypatch.setattr(services, "SECONDS_BETWEEN_CHECKS", 0.0)

    def serve(place):
        control = Control(place)

        @contextmanager
        def controlling(address, authority):
            yield control

        monkeypatch.setattr(services, "connected_control", controlling)
        server = services.ServerService(place, lambda sentence: None)
        waiting = [sys.executable, "-c", "import time; time.sleep(99)"]
        server.superlink, server.superexec = (
            SupervisedProcess("it", waiting, {}, place.state / f"{number}.log") for number in (1, 2)
        )
        return server.serve(), control.starts

    return serve


def test_raising_the_rounds_continues_training(tmp_path, served):
    place = created(tmp_path / "stopped", "--rounds", "2")
    assert served(place) == (0, 1)
    ended = Run(place.run).rounds
    set_rounds(place, 4)
    assert read_status(place).state == "stopped"
    assert served(place) == (0, 1)
    assert read_status(place).state == "finished"
    whole = created(tmp_path / "whole", "--rounds", "4")
    assert served(whole) == (0, 1)
    run, expected = Run(place.run), Run(whole.run)
    assert [record["round"] for record in run.rounds] == [1, 2, 3, 4]
    assert run.rounds[:2] == ended
    assert [record["client_accuracy"] for record in run.rounds] == [
        record["client_accuracy"] for record in expected.rounds
    ]
    assert run.summary["rounds"] == 4
    for name, value in expected.state().params.own.items():
        torch.testing.assert_close(run.state().params.own[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("rounds", [1, 2])
def test_without_more_rounds_the_server_exits_at_once(rounds, tmp_path, served):
    place = created(tmp_path / "federation", "--rounds", "2")
    assert served(place) == (0, 1)
    files = {file: file.read_bytes() for file in place.run.rglob("*") if file.is_file()}
    set_rounds(place, rounds)
    assert served(place) == (0, 0)
    assert {file: file.read_bytes() for file in place.run.rglob("*") if file.is_file()} == files


@pytest.mark.parametrize("rounds", ['"many"', "0", "true"])
def test_an_invalid_number_of_rounds_is_refused(rounds, tmp_path, served):
    place = created(tmp_path / "federation", "--rounds", "2")
    set_rounds(place, rounds)
    with pytest.raises(BadInput, match=r"pyproject.toml: rounds must be a whole number of at least 1, got"):
        place.run_config()
