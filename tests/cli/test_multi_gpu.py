"""Runs distributed over several devices; in these tests the devices are processes on one CPU."""

import os
import signal
import threading
import time

import pytest

from fedrema.cli import main
from fedrema.cli import run as run_command
from fedrema.cli.arguments import parse_settings
from fedrema.cli.multi_gpu import decoded, devices_for, encoded, run_on_gpus
from fedrema.runs.execute_many import split_groups
from fedrema.runs.run import Run

pytestmark = pytest.mark.usefixtures("subprocesses_are_forked")

SMALL = ["--rounds", "2", "--clients", "4", "--samples", "40", "--hidden", "4", "--epochs", "1"]


def group(tmp_path, method="fedavg", seeds=2, *arguments):
    base = parse_settings(method, [*SMALL, "--seeds", str(seeds), *arguments])
    return [base.seeded(seed).placed(tmp_path / method / f"seed-{seed}") for seed in range(seeds)]


def test_groups_of_runs_are_split_so_that_every_device_has_some(tmp_path):
    groups = [group(tmp_path, "fedavg", 5), group(tmp_path, "fedper", 2)]
    assert [len(part) for part in split_groups(groups, 2)] == [5, 2]
    assert [len(part) for part in split_groups(groups, 4)] == [2, 1, 2, 2]
    assert [len(part) for part in split_groups(groups, 20)] == [1] * 7
    seeds = [settings.simulation.seed for part in split_groups(groups, 4) for settings in part]
    assert seeds == [0, 1, 2, 3, 4, 0, 1]


def test_runs_on_two_devices_equal_those_on_one(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run_command, "devices_for", lambda settings: ["", ""])
    together = tmp_path / "distributed"
    assert main(["run", "fedavg,fedper", *SMALL, "--seeds", "2", "--out", str(together)]) == 0
    assert "FedPer" in capsys.readouterr().out
    assert (together / "curves.png").is_file()
    monkeypatch.setattr(run_command, "devices_for", lambda settings: [])
    assert main(["run", "fedavg,fedper", *SMALL, "--seeds", "2", "--quiet", "--out", str(tmp_path / "one")]) == 0
    for method in ("fedavg", "fedper"):
        for seed in (0, 1):
            one, other = (Run(folder / method / f"seed-{seed}") for folder in (together, tmp_path / "one"))
            assert one.curve()[1].tolist() == other.curve()[1].tolist()
            assert one.config["identity"] == other.config["identity"]


def test_errors_of_processes_are_reported(tmp_path, capfd):
    fine, wrong = group(tmp_path, "fedavg", 1), group(tmp_path, "fedper", 1, "--lr", "1e30", "--clip", "0")
    done, complaints, stopped = run_on_gpus([fine, wrong], ["", ""])
    assert [run.method for run in done] == ["fedavg"]
    assert len(complaints) == 1
    assert "diverged" in complaints[0]
    assert not stopped
    assert "diverged" in capfd.readouterr().err


def test_runs_are_saved_on_sigterm(tmp_path):
    groups = [group(tmp_path, method, 1, "--rounds", "100000") for method in ("fedavg", "fedper")]

    def stop():
        while not all((tmp_path / method / "seed-0" / "rounds.jsonl").is_file() for method in ("fedavg", "fedper")):
            time.sleep(0.1)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    done, complaints, stopped = run_on_gpus(groups, ["", ""])
    assert (done, complaints, stopped) == ([], [], True)
    for method in ("fedavg", "fedper"):
        run = Run(tmp_path / method / "seed-0")
        assert run.state().round == len(run.rounds) > 0


def test_encoded_settings_decode_to_the_same_settings(tmp_path):
    settings = group(tmp_path, "fedrema", 3, "--delta", "0.25")
    assert decoded(encoded(settings)) == settings
    assert "\n" not in encoded(settings)


def test_a_cpu_is_not_split_and_all_visible_gpus_are_used(monkeypatch, tmp_path):
    assert devices_for(group(tmp_path)[0]) == []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices_for(group(tmp_path)[0]) == ["0", "1", "2"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert devices_for(group(tmp_path)[0]) == ["2", "5"]
    assert devices_for(group(tmp_path, "fedavg", 1, "--device", "cpu")[0]) == []


@pytest.mark.parametrize("arguments", [["run", "fedavg", *SMALL]])
def test_a_single_run_is_not_distributed(arguments, monkeypatch, tmp_path):
    monkeypatch.setattr(run_command, "devices_for", lambda settings: ["", ""])
    monkeypatch.setattr(run_command, "run_on_gpus", lambda *_: pytest.fail("one run needs one device"))
    assert main([*arguments, "--quiet", "--out", str(tmp_path / "run")]) == 0
