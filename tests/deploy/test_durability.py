"""A crash of server and nodes at every point: closed rounds and the account of releases survive it."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("flwr")

from fedrema.deploy.ledger import Ledger
from fedrema.deploy.letters import Reply
from fedrema.deploy.privacy import Guard
from fedrema.deploy.protection import Protection
from fedrema.runs.checkpoint import counted_on, read_checkpoint
from fedrema.runs.directory import RunDirectory
from fedrema.runs.run import Run
from tests.crashes import Crashes, rebuild
from tests.deploy.test_flower import Federated

QUICK = ["--samples", "20", "--hidden", "4", "--rounds", "3"]


@pytest.mark.parametrize("noise", [0.0, 4.0])
def test_no_release_is_forgotten(noise, tmp_path, monkeypatch):
    begun = {"weight": torch.zeros(3)}
    protection = Protection(privacy_clip=1.0, privacy_noise=noise)
    (tmp_path / "disk").mkdir()
    with Crashes(tmp_path / "disk", monkeypatch) as crashes:
        for release in range(1, 4):
            guard = Guard(protection, tmp_path / "disk" / "privacy.json")
            guard.cover(Reply(release, 5, {"weight": torch.ones(3)}), begun)
            crashes.promise(release)
    for tree, promise in crashes.states():
        rebuild(tree, tmp_path / "rebuilt")
        known = len(Guard(protection, tmp_path / "rebuilt" / "privacy.json").releases)
        assert known in ((promise or 0), (promise or 0) + 1)


class Recorded:
    """A federation that was conducted to its end, with every crash on the way."""

    def __init__(self, tmp_path, monkeypatch):
        (tmp_path / "disk").mkdir()
        self.crashes = Crashes(tmp_path / "disk", monkeypatch)
        close = Ledger.closed

        def closed(ledger, record):
            close(ledger, record)
            self.crashes.promise(record["round"])

        with self.crashes:
            monkeypatch.setattr(Ledger, "closed", closed)
            # Heads are private: a node that forgets its own cannot go on.
            conductor = Federated(tmp_path / "disk", "fedper", QUICK).conductor()
            conductor.conduct()
        self.common = conductor.central.state.params.common
        self.rounds = timeless(tmp_path / "disk" / "server")


def timeless(folder):
    return [replace(record, seconds={}, bytes_down=0) for record in Run(folder).rounds]


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    return Recorded(tmp_path, monkeypatch)


def test_no_crash_undoes_a_round_that_was_closed(recorded, tmp_path):
    states = list(recorded.crashes.states())
    assert {promise for _, promise in states} == {None, 1, 2, 3}
    for tree, promise in states:
        rebuild(tree, tmp_path / "rebuilt")
        if promise:
            directory = RunDirectory(tmp_path / "rebuilt" / "server")
            facts, _ = read_checkpoint(directory.checkpoint_file)
            assert facts["round"] >= promise
            directory.check_rounds(counted_on(facts).rounds)


def go_on_everywhere(recorded, states, tmp_path):
    for tree, promise in states:
        if promise is None:  # it had not yet closed a round, and begins anew
            continue
        rebuild(tree, tmp_path / "rebuilt")
        conductor = Federated(tmp_path / "rebuilt", "fedper", QUICK).conductor()
        conductor.conduct()
        assert timeless(tmp_path / "rebuilt" / "server") == recorded.rounds
        for name, value in recorded.common.items():
            assert torch.equal(conductor.central.state.params.common[name], value)


def test_after_some_crashes_a_federation_ends_as_if_unhurt(recorded, tmp_path):
    states = [pair for pair in recorded.crashes.states() if pair[1]]
    go_on_everywhere(recorded, states[:: max(1, len(states) // 12)], tmp_path)


@pytest.mark.matrix
def test_after_every_crash_a_federation_ends_as_if_unhurt(recorded, tmp_path):
    go_on_everywhere(recorded, recorded.crashes.states(), tmp_path)
