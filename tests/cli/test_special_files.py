"""Devices, pipes and closed streams in place of files: no device is replaced, and no command hangs."""

import os
import stat
import subprocess
import sys
import threading

import numpy as np
import pytest

from fedrema.cli import main
from tests.cli.time_limit import seconds

QUICK = ("--rounds", "1", "--clients", "2", "--samples", "20", "--epochs", "1")
RUN_FILES = ("config.json", "rounds.jsonl", "summary.json", "predictions.npz", "checkpoint/state.safetensors")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    assert main(["run", "local,fedavg", *QUICK, "--quiet", "--out", str(folder / "both")]) == 0
    return folder / "both"


@pytest.fixture
def folder(tmp_path, monkeypatch, runs):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "both").symlink_to(runs)
    return tmp_path


def device(name, minor):
    """Create a copy of /dev/null (3) or /dev/full (7)."""
    try:
        os.mknod(name, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
    except PermissionError:
        pytest.skip("creating devices needs root")


WRITING = {
    "compare --out": ["compare", "both", "--no-plot", "--out"],
    "verdict --csv": ["verdict", "both", "--csv"],
    "report --out": ["report", "both", "--out"],
    "partition --save": ["partition", "--clients", "2", "--samples", "20", "--save"],
}


@pytest.mark.parametrize("command", WRITING.values(), ids=WRITING)
@pytest.mark.parametrize("place", ["null", "link"])
def test_a_device_is_written_to_or_refused_and_never_replaced(command, place, folder, capsys):
    device("null", 3)
    (folder / "link").symlink_to("null")
    assert main([*command, place]) in (0, 2)
    assert "Traceback" not in capsys.readouterr().err
    assert stat.S_ISCHR(os.lstat("null").st_mode)
    assert stat.S_ISLNK(os.lstat("link").st_mode)
    assert not list(folder.glob(".*.part"))


WRITING_MORE = {
    "compare --plot": ["compare", "both", "--plot"],
    "partition --plot": ["partition", "--clients", "2", "--samples", "20", "--plot"],
    "predict --out": ["predict", "both/fedavg", "rows.npz", "--client", "0", "--out"],
    "personalize --out": ["personalize", "both/fedavg", "--data", "rows.npz", "--overwrite", "--out"],
    "export --out": ["export", "both/fedavg", "--overwrite", "--out"],
    "bench --json": ["bench", "--network", "mlp", "--method", "local", *QUICK, "--device", "cpu", "--json"],
}


@pytest.mark.parametrize("command", WRITING_MORE.values(), ids=WRITING_MORE)
def test_a_device_is_never_replaced_by_an_image_a_model_or_a_measurement(command, folder, capsys):
    np.savez(folder / "rows.npz", x=np.zeros((10, 1, 8, 8), np.float32), y=np.arange(10))
    device("null.png", 3)
    assert main([*command, "null.png"]) == (2 if "export" in command else 0)  # a folder of models cannot be a device
    assert "Traceback" not in capsys.readouterr().err
    assert stat.S_ISCHR(os.lstat("null.png").st_mode)
    assert not list(folder.glob(".*.part"))


@pytest.mark.parametrize("command", WRITING.values(), ids=WRITING)
@pytest.mark.parametrize("place", ["", ".", "pipe", "x" * 5000])
def test_a_file_that_cannot_be_written_is_one_sentence(command, place, folder, capsys):
    os.mkfifo("pipe")  # nobody reads it
    with seconds(20):
        assert main([*command, place]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert (folder / "pipe").is_fifo()


def test_a_full_device_is_one_sentence(folder, capsys):
    device("full", 7)
    assert main([*WRITING["compare --out"], "full"]) == 2
    assert "cannot write full: No space left on device" in capsys.readouterr().err


def test_a_pipe_with_a_reader_receives_the_file(folder):
    os.mkfifo("pipe")
    received = []
    reader = threading.Thread(target=lambda: received.append((folder / "pipe").read_text()))
    reader.start()
    with seconds(20):
        while main([*WRITING["verdict --csv"], "pipe"]) != 0:  # until the reader has opened it
            pass
    reader.join(20)
    assert received[0].count("\n") == 3
    assert "gain" in received[0]


def test_the_stream_of_stdout_as_a_file_is_written_to(folder, programs):
    with (folder / "out.txt").open("w") as out:
        command = [programs / "fedrema", *WRITING["compare --out"], "/dev/fd/1"]
        subprocess.run(command, stdout=out, check=True)
    lines = (folder / "out.txt").read_text().splitlines()
    assert any(line.startswith("FedAvg") for line in lines)
    assert lines[-1] == "Comparison: /dev/fd/1"


@pytest.mark.parametrize("name", RUN_FILES)
@pytest.mark.parametrize("special", ["pipe", "/dev/zero"])
def test_a_special_file_in_a_run_is_refused(name, special, folder, runs, capsys):
    copy = folder / "copy"
    subprocess.run(["cp", "-r", runs / "fedavg", copy], check=True)
    (copy / name).unlink()
    os.mkfifo(copy / name) if special == "pipe" else (copy / name).symlink_to(special)
    refused = []
    with seconds(60):
        for command in ("compare", "verdict", "resume", "report", "export"):
            arguments = ["copy", "--no-plot"] if command == "compare" else ["copy"]
            if command == "verdict":
                arguments = ["copy", "both/local"]
            status = main([command, *arguments])
            said = capsys.readouterr().err
            assert status in (0, 2)
            refused += [command] * (status == 2 and "it is not a regular file" in said)
    assert refused


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("data.csv", "--federation"),
        ("data.csv.gz", "--federation"),
        ("data.npz", "--federation"),
        ("data.json", "--federation"),
        ("settings.toml", "--config"),
        ("settings.toml", "--tuned"),
        ("partition.json", "--partition-file"),
        ("partition.npz", "--partition-file"),
    ],
)
@pytest.mark.parametrize("special", ["pipe", "/dev/zero"])
def test_a_special_file_as_input_is_refused(name, option, special, folder, capsys):
    os.mkfifo(name) if special == "pipe" else (folder / name).symlink_to(special)
    with seconds(20):
        assert main(["run", "fedavg", option, name, "--out", "run", "--quiet"]) == 2
    said = capsys.readouterr().err
    assert name in said
    assert "is not a" in said
    assert not (folder / "run").exists()


@pytest.mark.parametrize("suffix", ["csv", "npz", "json"])
def test_a_pipe_among_the_files_of_a_folder_is_refused(suffix, folder, capsys):
    (folder / "data").mkdir()
    if suffix == "npz":
        np.savez(folder / "data" / "first.npz", x=np.eye(4), y=[0, 1, 0, 1])
    os.mkfifo(f"data/second.{suffix}")
    with seconds(20):
        assert main(["run", "fedavg", "--federation", "data", "--out", "run", "--quiet"]) == 2
    assert "second" in capsys.readouterr().err


def test_a_pipe_as_an_image_is_refused(folder, capsys):
    (folder / "data" / "north" / "ill").mkdir(parents=True)
    os.mkfifo("data/north/ill/one.png")
    (folder / "labels.csv").write_text("client,image,label\n" + "a,data/north/ill/one.png,ill\n" * 5)
    with seconds(20):
        for source in ("data", "labels.csv"):
            assert main(["run", "fedavg", "--federation", source, "--out", "run", "--quiet"]) == 2
            assert "one.png" in capsys.readouterr().err


def test_output_that_cannot_be_written(folder):
    device("full", 7)
    command = f"{sys.prefix}/bin/fedrema compare both --no-plot"
    for redirection, status in ((">full", 2), (">&-", 0), ("2>&-", 0), (">&- 2>&-", 0)):
        done = subprocess.run(f"{command} {redirection}", shell=True, capture_output=True, text=True)
        assert done.returncode == status, (redirection, done.stderr)
        assert done.stderr == ("fedrema: cannot write the output: No space left on device.\n" if status else "")


def test_the_reader_of_a_runs_results_may_leave_early(folder, programs):
    read, write = os.pipe()
    os.close(read)
    command = [programs / "fedrema", "run", "local", *QUICK, "--out", "run"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == 141  # as docs/reference/cli.md says
    assert "Traceback" not in done.stderr
    assert (folder / "run" / "summary.json").is_file()
