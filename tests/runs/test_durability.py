"""Crashes and power failures at every point of a run: saved rounds survive, and the resumed run has the same result."""

import pytest

from fedrema.cli.arguments import parse_settings
from fedrema.data import build_federation
from fedrema.runs.checkpoint import read_checkpoint
from fedrema.runs.directory import RunDirectory
from fedrema.runs.execute import PreparedRun, prepare_new, resume
from fedrema.runs.run import Run
from tests.crashes import Crashes, rebuild
from tests.runs.damaged import command, timeless

QUICK = [
    *("--rounds", "3", "--clients", "3", "--samples", "20", "--epochs", "1", "--hidden", "4", "--device", "cpu"),
    *("--checkpoint-every", "1", "--record", "relations", "--quiet"),
]
FINISHED = "finished"


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """Execute a run; return its recorded crashes and its result."""
    (tmp_path / "disk").mkdir()
    crashes = Crashes(tmp_path / "disk", monkeypatch)
    save = PreparedRun._save

    def saved(prepared, *arguments):
        save(prepared, *arguments)
        crashes.promise(prepared.state.round)

    with crashes:
        monkeypatch.setattr(PreparedRun, "_save", saved)
        settings = parse_settings("fedrema", [*QUICK, "--out", str(tmp_path / "disk" / "run")])
        prepared = prepare_new(settings, build_federation(settings.data))
        crashes.promise(0)
        prepared.train()
        crashes.promise(FINISHED)
    return crashes, timeless(tmp_path / "disk" / "run")


def check(folder, promise):
    """Assert that everything that was promised is on the disk."""
    directory = RunDirectory.open(folder)
    if promise == FINISHED:
        assert Run(folder).finished
        assert len(Run(folder).rounds) == 3
        promise = 3
    if promise:
        facts, _ = read_checkpoint(directory.checkpoint_file)
        assert facts["round"] >= promise
        directory.check_rounds(facts["round"])
        assert len(directory.relations(facts["round"])) == facts["round"]


def test_no_crash_loses_a_saved_round(recorded, tmp_path):
    crashes, _ = recorded
    states = list(crashes.states())
    assert {promise for _, promise in states} == {None, 0, 1, 2, 3, FINISHED}
    for tree, promise in states:
        rebuild(tree, tmp_path / "rebuilt")
        if promise is not None:
            check(tmp_path / "rebuilt" / "run", promise)


def resume_after(states, expected, tmp_path):
    folder = tmp_path / "rebuilt" / "run"
    for tree, promise in states:
        rebuild(tree, tmp_path / "rebuilt")
        if promise is None:  # killed before the first saved round: there may be no run
            code, _, complaint = command("resume", folder, "--quiet")
            assert code in (0, 2), complaint
            assert len(complaint.splitlines()) == (1 if code else 0)
        else:
            resume(folder)
            assert timeless(folder) == expected
            assert not list(folder.rglob("*.part"))


def test_after_some_crashes_a_resumed_run_has_the_same_result(recorded, tmp_path):
    crashes, expected = recorded
    resume_after(list(crashes.states())[::15], expected, tmp_path)


@pytest.mark.matrix
def test_after_every_crash_a_resumed_run_has_the_same_result(recorded, tmp_path):
    crashes, expected = recorded
    resume_after(crashes.states(), expected, tmp_path)
