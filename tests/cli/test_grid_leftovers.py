"""What a killed grid leaves behind is tidied by the next call."""

from fedrema.cli import main
from fedrema.experiments.spec_file import read_experiment
from fedrema.experiments.store import key_of

GRID = """
format = 1
title = "Small"
seeds = 1

[settings]
clients = 2
samples = 10
epochs = 1
rounds = 1
threads = 1

[rows.local]
"""


def test_a_stored_run_that_was_left_in_unfinished_is_removed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(GRID)
    grid = ["grid", "small.toml", "--out", "out", "--quiet", "--device", "cpu"]
    assert main(grid) == 0, capsys.readouterr().err
    (cell,) = read_experiment(tmp_path / "small.toml", {"device": "cpu"}).cells
    left = tmp_path / "out" / "unfinished" / key_of(cell.settings(0))
    # Killed after the run was stored, before its folder was deleted.
    assert main(["run", "local", "--rounds", "1", "--clients", "2", "--quiet", "--out", str(left)]) == 0
    assert main(grid) == 0
    assert not (tmp_path / "out" / "unfinished").exists()
