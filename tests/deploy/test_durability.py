"""Crashes of server and nodes at every point: completed rounds and the privacy account survive them."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("flwr")

from fedrema.deploy.messages import Reply
from fedrema.deploy.privacy import PrivacyGuard, PrivacySettings
from fedrema.deploy.run_state import RunState
from fedrema.runs.checkpoint import read_checkpoint, required_rounds
from fedrema.runs.directory import RunDirectory
from fedrema.runs.run import Run
from tests.crashes import Crashes, rebuild
from tests.deploy.test_flower import Federated

QUICK = ["--samples", "20", "--hidden", "4", "--rounds", "3"]


@pytest.mark.parametrize("noise", [0.0, 4.0])
def test_no_release_is_forgotten(noise, tmp_path, monkeypatch):
    begun = {"weight": torch.zeros(3)}
    protection = PrivacySettings(privacy_clip=1.0, privacy_noise=noise)
    (tmp_path / "disk").mkdir()
    with Crashes(tmp_path / "disk", monkeypatch) as crashes:
        for release in range(1, 4):
            guard = PrivacyGuard(protection, tmp_path / "disk" / "privacy.json")
            guard.protect(Reply(release, 5, {"weight": torch.ones(3)}), begun)
            crashes.promise(release)
    for tree, promise in crashes.states():
        rebuild(tree, tmp_path / "rebuilt")
        known = len(PrivacyGuard(protection, tmp_path / "rebuilt" / "privacy.json").account.releases)
        assert known in ((promise or 0), (promise or 0) + 1)


class Recorded:
    """A finished federation, with the disk's state after a crash at every point."""

    def __init__(self, tmp_path, monkeypatch):
        (tmp_path / "disk").mkdir()
        self.crashes = Crashes(tmp_path / "disk", monkeypatch)
        save = RunState.save_round

        def save_round(run, record):
            save(run, record)
            self.crashes.promise(record.round)

        with self.crashes:
            monkeypatch.setattr(RunState, "save_round", save_round)
            # Heads are private: a node that loses its own cannot resume.
            conductor = Federated(tmp_path / "disk", "fedper", QUICK).conductor()
            conductor.conduct()
        self.common = conductor.central.state.params.common
        self.rounds = without_times(tmp_path / "disk" / "server")


def without_times(folder):
    return [replace(record, seconds={}, bytes_down=0) for record in Run(folder).rounds]


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    return Recorded(tmp_path, monkeypatch)


def test_no_crash_loses_a_completed_round(recorded, tmp_path):
    states = list(recorded.crashes.states())
    assert {promise for _, promise in states} == {None, 1, 2, 3}
    for tree, promise in states:
        rebuild(tree, tmp_path / "rebuilt")
        if promise:
            directory = RunDirectory(tmp_path / "rebuilt" / "server")
            facts, _ = read_checkpoint(directory.checkpoint_file)
            assert facts["round"] >= promise
            directory.check_rounds(required_rounds(facts).rounds)


def resume_after(recorded, states, tmp_path):
    for tree, promise in states:
        if promise is None:  # no round was completed: it starts again
            continue
        rebuild(tree, tmp_path / "rebuilt")
        conductor = Federated(tmp_path / "rebuilt", "fedper", QUICK).conductor()
        conductor.conduct()
        assert without_times(tmp_path / "rebuilt" / "server") == recorded.rounds
        for name, value in recorded.common.items():
            assert torch.equal(conductor.central.state.params.common[name], value)


def test_after_some_crashes_a_federation_gets_the_same_result(recorded, tmp_path):
    states = [pair for pair in recorded.crashes.states() if pair[1]]
    resume_after(recorded, states[:: max(1, len(states) // 12)], tmp_path)


@pytest.mark.matrix
def test_after_every_crash_a_federation_gets_the_same_result(recorded, tmp_path):
    resume_after(recorded, recorded.crashes.states(), tmp_path)
