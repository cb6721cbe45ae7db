"""Several runs of one command: stopped together, resumed together."""

import json
import os
import signal

import pytest
import torch
from torch import nn

import fedrema
from fedrema.cli import main
from fedrema.runs import execute
from fedrema.runs.checksums import with_checksum
from tests.fixtures import make_federation
from tests.runs.test_execute import assert_same_result

SMALL = ("--rounds", "3", "--clients", "4", "--samples", "20", "--epochs", "1")
METHODS = ("fedavg", "fedrema", "local")


@pytest.fixture
def stop_in(monkeypatch):
    """Return a function that sends SIGINT, like Ctrl-C, after a number of rounds of the whole command."""

    def install(number):
        count, append = 0, execute.RunDirectory.append

        def counting(self, record):
            nonlocal count
            append(self, record)
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGINT)

        monkeypatch.setattr(execute.RunDirectory, "append", counting)

    return install


@pytest.mark.parametrize("rounds", [1, 5, 10])
def test_several_runs_resumed_after_ctrl_c_equal_an_uninterrupted_command(
    tmp_path, stop_in, monkeypatch, capsys, rounds
):
    command = ["run", "local,fedavg,fedrema", *SMALL, "--seeds", "2", "--quiet", "--out"]
    assert main([*command, str(tmp_path / "whole")]) == 0
    assert not (tmp_path / "whole" / "runs.json").exists()
    with monkeypatch.context():
        stop_in(rounds)
        assert main([*command, str(tmp_path / "multi")]) == 130
        assert f"fedrema resume {tmp_path / 'multi'}\n" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(["resume", str(tmp_path / "multi"), "--quiet"]) == 0
    for method in METHODS:
        for seed in (0, 1):
            one, other = (tmp_path / name / method / f"seed-{seed}" for name in ("whole", "multi"))
            assert_same_result(one, other)
            assert fedrema.load(other).finished
    assert not (tmp_path / "multi" / "runs.json").exists()


def test_a_folder_of_finished_runs_can_be_extended(tmp_path, capsys):
    assert main(["run", "fedavg", *SMALL, "--seeds", "2", "--quiet", "--out", str(tmp_path / "two")]) == 0
    assert main(["resume", str(tmp_path / "two"), "--rounds", "4"]) == 0
    assert "FedAvg" in capsys.readouterr().out
    assert [len(fedrema.load(tmp_path / "two" / f"seed-{seed}").rounds) for seed in (0, 1)] == [4, 4]
    assert main(["resume", str(tmp_path / "two"), "--rounds", "3"]) == 2
    assert "--rounds 3 is below 4, the number of rounds that" in capsys.readouterr().err


def test_a_folder_without_runs_cannot_be_resumed(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text("{}")
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "runs.json").write_text(json.dumps(with_checksum({"runs": [{"folder": "a"}]})))
    assert main(["resume", str(tmp_path / "empty")]) == 2
    assert "holds no run" in capsys.readouterr().err
    assert main(["resume", str(tmp_path / "nothing")]) == 2
    assert main(["resume", str(tmp_path / "list")]) == 2
    assert "runs.json does not list runs: remove it" in capsys.readouterr().err
    (tmp_path / "list" / "runs.json").write_text('{"runs": []}')
    assert main(["resume", str(tmp_path / "list")]) == 2
    assert "runs.json was altered or damaged" in capsys.readouterr().err
    outside = {"folder": "../outside", "method": "fedavg", "settings": {}}
    (tmp_path / "list" / "runs.json").write_text(json.dumps(with_checksum({"runs": [outside]})))
    assert main(["resume", str(tmp_path / "list")]) == 2
    assert not (tmp_path / "outside").exists()


def test_seeds_in_python_give_a_list_of_runs(tmp_path):
    seen = []
    runs = fedrema.run(
        "fedavg", seeds=2, seed=5, rounds=2, clients=4, out=tmp_path / "runs",
        on_round=lambda result: seen.append(result.record["round"]),
    )  # fmt: skip
    assert [run.settings["seed"] for run in runs] == [5, 6]
    assert [run.path.name for run in runs] == ["seed-5", "seed-6"]
    assert seen == [1, 2, 1, 2]
    single = fedrema.run("fedavg", seed=6, rounds=2, clients=4, out=tmp_path / "single")
    assert runs[1].curve()[1].tolist() == single.curve()[1].tolist()
    assert [run.path.name for run in fedrema.run("fedavg", seeds=1, rounds=1, clients=4, out=tmp_path / "one")] == [
        "one"
    ]


def test_seeds_in_python_can_be_resumed_with_data_and_network_given_there(tmp_path, stop_in, monkeypatch):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    given = {"federation": make_federation(), "net": module, "head": "2", "rounds": 3, "seeds": 2}
    fedrema.run("fedrema", out=tmp_path / "whole", **given)
    stop_in(2)
    with pytest.raises(execute.Interrupted):
        fedrema.run("fedrema", out=tmp_path / "multi", **given)
    monkeypatch.undo()
    assert not (tmp_path / "multi" / "seed-1").exists()
    resumed = fedrema.resume_all(tmp_path / "multi", net=module)
    assert [run.finished for run in resumed] == [True, True]
    for seed in (0, 1):
        assert_same_result(tmp_path / "whole" / f"seed-{seed}", tmp_path / "multi" / f"seed-{seed}")
    assert sorted(file.name for file in (tmp_path / "multi").iterdir()) == ["seed-0", "seed-1"]


def test_a_command_does_not_replace_the_lists_of_other_commands(tmp_path, stop_in, monkeypatch, capsys):
    stop_in(2)
    inside, beside = tmp_path / "runs" / "multi", tmp_path / "runs"
    assert main(["run", "fedavg", *SMALL, "--seeds", "2", "--quiet", "--out", str(inside)]) == 130
    monkeypatch.undo()
    kept = (inside / "runs.json").read_bytes()
    assert main(["run", "fedavg,local", *SMALL, "--quiet", "--out", str(beside)]) == 0
    assert (inside / "runs.json").read_bytes() == kept
    assert not (beside / "runs.json").exists()
    capsys.readouterr()
    # Other runs in the same folder would replace the list; the same ones, given again, may.
    assert main(["run", "fedavg", *SMALL, "--seed", "7", "--seeds", "2", "--quiet", "--out", str(inside)]) == 2
    assert f"resume them with fedrema resume {inside}" in capsys.readouterr().err
    assert (inside / "runs.json").read_bytes() == kept
    assert main(["run", "fedavg", *SMALL, "--seeds", "2", "--overwrite", "--quiet", "--out", str(inside)]) == 0
    assert not (inside / "runs.json").exists()
