"""Runs that are stopped, killed, resumed, replaced, or fail."""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedrema
from fedrema.cli.arguments import parse_settings
from fedrema.errors import BadInput, Diverged
from fedrema.runs.checkpoint import read_checkpoint
from fedrema.runs.directory import RunDirectory
from fedrema.runs.execute import Interrupted, execute, resume
from tests.fixtures import BACKENDS, RANDOM_NETWORKS, make_federation
from tests.runs.damaged import Killed

QUICK = ("--rounds", "6", "--clients", "4", "--samples", "20", "--epochs", "1", "--quiet")


def quick_run(out: Path, *arguments: str, method: str = "fedrema", **options) -> fedrema.Run:
    return execute(parse_settings(method, [*QUICK, "--out", str(out), *arguments]), **options)


def saved(path: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(path / "checkpoint" / "state.safetensors")[1]


def assert_same_result(first: Path, second: Path) -> None:
    """Assert bit-identical models, momentum and server state, and equal records except for times."""
    one, other = saved(first), saved(second)
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name
    timeless = [
        [dataclasses.replace(record, seconds={}) for record in fedrema.load(path).rounds] for path in (first, second)
    ]
    assert timeless[0] == timeless[1]


def stop_after(number: int, what: Exception | None = None):
    """Return a watcher that stops a run after a round: by an exception, or like Ctrl-C."""

    def watch(result) -> None:
        if result.record["round"] == number:
            if what is not None:
                raise what
            os.kill(os.getpid(), signal.SIGINT)

    return watch


@pytest.mark.parametrize("method", ["fedrema", "fedavg", "local"])
def test_a_run_resumed_after_an_exception_is_bit_identical(tmp_path, method):
    quick_run(tmp_path / "whole", "--record", "relations", method=method)
    with pytest.raises(Killed):
        quick_run(
            tmp_path / "broken", "--record", "relations", "--checkpoint-every", "2",
            method=method, watch=stop_after(5, Killed()),
        )  # fmt: skip
    assert len(fedrema.load(tmp_path / "broken").rounds) == 5  # one more than in the checkpoint
    done = resume(tmp_path / "broken")
    assert done.finished
    assert_same_result(tmp_path / "whole", tmp_path / "broken")
    whole, broken = fedrema.load(tmp_path / "whole").relations(), done.relations()
    assert list(whole) == list(broken) == [1, 2, 3, 4, 5, 6]
    for number, matrices in whole.items():
        for name, matrix in matrices.items():
            assert np.array_equal(matrix, broken[number][name], equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("more", [*RANDOM_NETWORKS, "augmented"])
def test_a_resumed_run_with_random_layers_or_images_is_bit_identical(tmp_path, more, backend):
    more = ("--augment", "flip,crop,cutout,noise") if more == "augmented" else ("--net", more)
    arguments = (*more, "--backend", backend, "--checkpoint-every", "2")
    quick_run(tmp_path / "whole", *arguments, method="fedavg")
    with pytest.raises(Killed):
        quick_run(tmp_path / "broken", *arguments, method="fedavg", watch=stop_after(5, Killed()))
    torch.manual_seed(1)  # the position of torch's own generator must not matter
    assert resume(tmp_path / "broken").finished
    assert_same_result(tmp_path / "whole", tmp_path / "broken")


def test_ctrl_c_saves_and_prints_how_to_continue(tmp_path):
    quick_run(tmp_path / "whole")
    with pytest.raises(Interrupted, match=f"after round 3; resume it with: fedrema resume {tmp_path}/stopped"):
        quick_run(tmp_path / "stopped", watch=stop_after(3))
    assert not fedrema.load(tmp_path / "stopped").finished
    resume(tmp_path / "stopped")
    assert_same_result(tmp_path / "whole", tmp_path / "stopped")


def test_a_second_ctrl_c_interrupts_immediately(tmp_path):
    def twice(result) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        quick_run(tmp_path / "run", watch=twice)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def start(out: Path, *arguments: str, python: Path | str = sys.executable) -> subprocess.Popen:
    command = [python, "-m", "fedrema", "run", "fedrema", *arguments, "--out", str(out), "--quiet"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_rounds(out: Path, number: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        file = out / "rounds.jsonl"
        if file.exists() and file.read_bytes().count(b"\n") >= number:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise AssertionError(f"{number} rounds did not come")


LONG = ("--rounds", "60", "--clients", "6", "--samples", "40", "--checkpoint-every", "7")


def test_a_run_resumed_after_kill_9_is_bit_identical(programs, tmp_path):
    process = start(tmp_path / "killed", *LONG)
    wait_for_rounds(tmp_path / "killed", 17, process)
    process.kill()
    process.communicate()
    assert not (tmp_path / "killed" / "summary.json").exists()
    finished = subprocess.run(
        [programs / "fedrema", "resume", tmp_path / "killed", "--quiet"], capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr
    whole = start(tmp_path / "whole", *LONG, python=programs / "python")
    assert whole.wait(60) == 0, whole.communicate()
    whole.communicate()
    assert_same_result(tmp_path / "whole", tmp_path / "killed")


def test_sigterm_saves_and_exits_with_130(tmp_path):
    process = start(tmp_path / "run", "--rounds", "500")
    wait_for_rounds(tmp_path / "run", 3, process)
    process.send_signal(signal.SIGTERM)
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "resume it with: fedrema resume" in complaint
    assert "Traceback" not in complaint
    facts, _ = read_checkpoint(tmp_path / "run" / "checkpoint" / "state.safetensors")
    assert facts["round"] == len(fedrema.load(tmp_path / "run").rounds)


def test_an_incomplete_last_record_is_ignored_on_resume(tmp_path):
    quick_run(tmp_path / "whole")
    with pytest.raises(Killed):
        quick_run(tmp_path / "broken", "--checkpoint-every", "2", watch=stop_after(3, Killed()))
    with (tmp_path / "broken" / "rounds.jsonl").open("a") as stream:
        stream.write('{"round": 4, "accu')
    assert len(fedrema.load(tmp_path / "broken").rounds) == 3
    resume(tmp_path / "broken")
    assert_same_result(tmp_path / "whole", tmp_path / "broken")


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path):
    quick_run(tmp_path / "whole")
    with pytest.raises(Killed):
        quick_run(tmp_path / "broken", watch=stop_after(2, Killed()))
    assert not (tmp_path / "broken" / "checkpoint").exists()
    resume(tmp_path / "broken")
    assert_same_result(tmp_path / "whole", tmp_path / "broken")


def test_a_finished_run_can_be_extended(tmp_path):
    quick_run(tmp_path / "short", "--rounds", "3")
    quick_run(tmp_path / "long")
    done = resume(tmp_path / "short", {"rounds": 6})
    assert len(done.rounds) == 6
    assert_same_result(tmp_path / "short", tmp_path / "long")


def test_each_backend_can_resume_runs_of_the_other(tmp_path):
    quick_run(tmp_path / "run", "--rounds", "2", "--backend", "stacked", "--precision", "float64")
    done = resume(tmp_path / "run", {"rounds": 4, "backend": "loop"})
    quick_run(tmp_path / "whole", "--rounds", "4", "--precision", "float64")
    one, other = saved(tmp_path / "whole"), saved(done.path)
    assert all(torch.allclose(one[name].double(), other[name].double(), atol=1e-9) for name in one)


def test_an_existing_run_is_replaced_only_with_overwrite(tmp_path):
    first = quick_run(tmp_path / "run")
    with pytest.raises(BadInput, match=r"--out .*run already exists: choose another folder, or --overwrite"):
        quick_run(tmp_path / "run")
    assert len(fedrema.load(first.path).rounds) == 6
    again = quick_run(tmp_path / "run", "--overwrite", "--rounds", "2")
    assert len(again.rounds) == 2


def test_overwrite_never_replaces_anything_but_a_run(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_text("cat")
    with pytest.raises(BadInput, match="holds something other than a run"):
        quick_run(tmp_path / "photos", "--overwrite")
    assert (tmp_path / "photos" / "cat.png").read_text() == "cat"
    with pytest.raises(BadInput, match="is a file: name a folder"):
        quick_run(tmp_path / "photos" / "cat.png", "--overwrite")


def test_a_refused_run_does_not_change_the_old_one(tmp_path):
    quick_run(tmp_path / "run")
    with pytest.raises(BadInput):
        quick_run(tmp_path / "run", "--overwrite", "--samples", "5000")
    assert len(fedrema.load(tmp_path / "run").rounds) == 6
    with pytest.raises(BadInput):
        quick_run(tmp_path / "new", "--samples", "5000")
    assert not (tmp_path / "new").exists()


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_round(tmp_path):
    with pytest.raises(Diverged, match=r"diverged in round \d+: .* client .*; round \d+ is kept in"):
        quick_run(tmp_path / "run", "--lr", "1e18", "--clip", "0", "--rounds", "20")
    facts, tensors = read_checkpoint(tmp_path / "run" / "checkpoint" / "state.safetensors")
    assert facts["round"] == len(fedrema.load(tmp_path / "run").rounds)
    assert all(torch.isfinite(value).all() for value in tensors.values())


def test_a_run_with_changed_settings_or_data_cannot_be_resumed(tmp_path):
    quick_run(tmp_path / "run", "--rounds", "2")
    directory = RunDirectory(tmp_path / "run")
    config = directory.config()
    config["settings"]["lr"] = 0.5
    directory.write_json(directory.config_file, config)
    with pytest.raises(BadInput, match="have changed since it was started"):
        resume(tmp_path / "run", {"rounds": 4})


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    quick_run(tmp_path / "one", "--rounds", "2")
    quick_run(tmp_path / "other", "--rounds", "2", "--lr", "0.2")
    foreign = (tmp_path / "other" / "checkpoint" / "state.safetensors").read_bytes()
    (tmp_path / "one" / "checkpoint" / "state.safetensors").write_bytes(foreign)
    with pytest.raises(BadInput, match="belongs to another run"):
        resume(tmp_path / "one", {"rounds": 4})
    assert len(fedrema.load(tmp_path / "one").rounds) == 2


def test_a_truncated_or_altered_checkpoint_is_refused(tmp_path):
    quick_run(tmp_path / "run", "--rounds", "2")
    file = tmp_path / "run" / "checkpoint" / "state.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(BadInput, match="is incomplete or not one of fedrema's"):
        resume(tmp_path / "run", {"rounds": 4})
    file.write_bytes(whole[:-8] + b"\xff" * 4 + whole[-4:])
    with pytest.raises(BadInput, match="was altered"):
        resume(tmp_path / "run", {"rounds": 4})
    file.write_bytes(b"not a checkpoint")
    with pytest.raises(BadInput, match="is incomplete or not one of fedrema's"):
        resume(tmp_path / "run", {"rounds": 4})


def test_a_federation_given_in_python_is_saved_with_the_run(tmp_path):
    federation = make_federation()
    quick_run(tmp_path / "whole", federation=federation)
    with pytest.raises(Killed):
        quick_run(tmp_path / "run", "--checkpoint-every", "1", federation=federation, watch=stop_after(3, Killed()))
    resume(tmp_path / "run")
    assert_same_result(tmp_path / "whole", tmp_path / "run")


def test_a_network_given_in_python_must_be_given_again(tmp_path):
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = nn.Linear(6, 5)
            self.out = nn.Linear(5, 4)

        def forward(self, x):
            return self.out(torch.tanh(self.hidden(x)))

    torch.manual_seed(0)
    module = Own()
    federation = make_federation()
    quick_run(tmp_path / "run", "--rounds", "2", "--head", "out", federation=federation, module=module)
    with pytest.raises(BadInput, match="network given in Python"):
        resume(tmp_path / "run", {"rounds": 3})
    assert len(resume(tmp_path / "run", {"rounds": 3}, module).rounds) == 3


def test_a_full_disk_is_reported_in_one_sentence_and_no_round_is_lost(programs, tmp_path):
    """A limit on file size makes writing fail as a full disk does."""
    script = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (40000, 40000))\n"
        "from fedrema.cli import main\n"
        f"arguments = ['--rounds', '200', '--checkpoint-every', '50', '--quiet', '--out', {str(tmp_path / 'run')!r}]\n"
        "sys.exit(main(['run', 'fedavg', *arguments]))\n"
    )
    ended = subprocess.run([programs / "python", "-c", script], capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    assert ended.stderr.startswith("fedrema: cannot write")
    assert len(ended.stderr.strip().splitlines()) == 1
    assert not list((tmp_path / "run").rglob("*.part"))
    records = fedrema.load(tmp_path / "run").rounds
    assert records
    assert (tmp_path / "run" / "rounds.jsonl").read_text().endswith("\n")


def test_config_json_describes_the_run_completely(tmp_path):
    run = quick_run(tmp_path / "run", "--rounds", "2")
    config = run.config
    assert config["method"] == "fedrema"
    assert config["settings"]["delta"] == 0.5
    assert config["settings"]["rounds"] == 2
    assert config["federation"]["names"] == ["0", "1", "2", "3"]
    assert config["federation"]["train_counts"] == [10, 10, 10, 10]
    assert set(config["ran_on"]["versions"]) == {"fedrema", "torch", "numpy"}
    assert config["ran_on"]["backend"] == "stacked"
