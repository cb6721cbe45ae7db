"""Damaged runs: every file × every kind of damage × every command that reads runs."""

import shutil

import numpy as np
import pytest

import fedrema
from fedrema.data import Federation

from ..conftest import make_federation
from .damaged import COMMANDS, NOT_READ, SETTINGS, Killed, command, contents, damages, killed_in

# Each command reads some files of a run only; what others hold cannot change its result.
KINDS = ("finished", "stopped", "given")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A finished run with matrices and models; one that was killed after its checkpoint; one on data from Python."""
    folder = tmp_path_factory.mktemp("runs")
    fedrema.run("fedrema", out=folder / "finished", rounds=5, record="relations", **SETTINGS)
    assert command("export", folder / "finished")[0] == 0
    with pytest.raises(Killed):
        fedrema.run("fedrema", out=folder / "stopped", rounds=5, record="relations", watch=killed_in(3), **SETTINGS)
    settings = {name: value for name, value in SETTINGS.items() if name not in ("clients", "samples")}
    with pytest.raises(Killed):
        fedrema.run(
            "fedavg", federation=make_federation(), out=folder / "given", rounds=4, watch=killed_in(3), **settings
        )
    digits = fedrema.make_federation(clients=1, samples=20, partition="iid", data_seed=7)
    np.savez(folder / "new.npz", x=digits.x, y=digits.y)
    assert isinstance(make_federation(), Federation)
    np.savez(folder / "blobs.npz", x=make_federation().x[:20], y=make_federation().y[:20])
    return folder


class Bench:
    """Runs commands on damaged copies of a run and compares with what they do on the run itself."""

    def __init__(self, runs, kind, tmp_path):
        self.original, self.folder, self.out = runs / kind, tmp_path / "run", tmp_path / "out"
        shutil.copy(runs / ("blobs.npz" if kind == "given" else "new.npz"), tmp_path / "new.npz")
        self.files = [name for name, content in contents(self.original).items() if content is not None]
        self.expected = {}
        for name, act in COMMANDS.items():
            self.restore()
            code, result, complaint = act(self.folder, self.out)
            assert (code, complaint) == (0, ""), name
            self.expected[name] = result

    def restore(self):
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.original, self.folder)

    def failures(self, many):
        """Yield every combination that does not end as it should, with the reason."""
        for file in self.files:
            content = (self.original / file).read_bytes()
            for damage, do in damages(content, many):
                for name in COMMANDS:
                    self.restore()
                    do(self.folder / file)
                    reason = self.fault(name, file)
                    if reason:
                        yield f"{file} {damage} × {name}: {reason}"

    def fault(self, name, file):
        before = contents(self.folder)
        code, result, complaint = COMMANDS[name](self.folder, self.out)
        if code == 0:
            if complaint:
                return f"succeeds with a complaint: {complaint}"
            return "" if result == self.expected[name] else "succeeds with another result"
        if code != 2:
            return f"exit code {code}: {complaint.splitlines()[-1:]}"
        lines = complaint.splitlines()
        if len(lines) != 1 or not lines[0].startswith("fedrema: ") or "Traceback" in complaint:
            return f"not one sentence: {complaint!r}"
        if file in NOT_READ:
            return f"refused for a file that is not read: {complaint!r}"
        if file.rpartition("/")[2] not in complaint and "models" not in file:
            return f"does not name the file: {complaint!r}"
        if name != "export_again" and contents(self.folder) != before:
            return "refuses, but has changed the folder"
        return ""


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_one_sentence_or_changes_nothing(runs, kind, tmp_path):
    failures = list(Bench(runs, kind, tmp_path).failures(many=False))
    assert not failures, "\n".join(failures)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_damage_anywhere_is_one_sentence_or_changes_nothing(runs, kind, tmp_path):
    failures = list(Bench(runs, kind, tmp_path).failures(many=True))
    assert not failures, "\n".join(failures)
