"""Input that does not fit into memory is refused before allocation; errors of the system become one sentence."""

import io
import subprocess
import sys
import tracemalloc
import zipfile

import numpy as np
import pytest

from fedrema.base.memory import amount
from fedrema.cli import main
from fedrema.data import Federation
from fedrema.data.npz import read_npz
from fedrema.errors import BadInput
from fedrema.models.networks import Network, build_net

DEEP = 100_000
USER_CODE = """
import sys
from torch import nn

def data():
    sys.exit("no data today")

def network(shape, classes):
    sys.exit(4)

class Leaving(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.fc = nn.Linear(shape[0], classes)

    def forward(self, x):
        sys.exit()
"""


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(arguments, capsys) -> str:
    """Run a command that must fail; return its error message of one line."""
    assert main([str(argument) for argument in arguments]) == 2
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1, shown.err
    return shown.err


def write_header(archive: zipfile.ZipFile, name: str, shape: tuple[int, ...], content: bytes = b"") -> None:
    """Put a member into an archive whose header announces an array of float64."""
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": "<f8", "fortran_order": False, "shape": shape})
    archive.writestr(name, stream.getvalue() + content)


@pytest.mark.parametrize("option", ["--hidden", "--projection"])
@pytest.mark.parametrize("size", [10**10, 10**14])
def test_a_network_larger_than_memory_is_refused(option, size, capsys, tmp_path):
    said = refused(["run", "fedavg", option, size, "--rounds", 1, "--out", "run", "--quiet"], capsys)
    assert f"{option} {size}" in said
    assert "of memory, but only" in said
    assert not (tmp_path / "run").exists()


def test_nothing_is_allocated_for_billions_of_classes():
    with pytest.raises(BadInput, match=r"--projection 0 and 2147483648 classes needs 1.1 TB of memory"):
        build_net(Network(), (3,), 2**31, seed=0)
    federation = Federation.from_arrays(np.zeros((2, 1)), [0, 1], [0, 0], classes=2**45)
    with pytest.raises(BadInput, match=r"counting 35184372088832 classes of 1 clients needs 281.5 TB of memory"):
        federation.label_counts()


def test_an_archive_with_an_extreme_compression_ratio_is_refused_unread(tmp_path):
    bomb = tmp_path / "bomb.npz"
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("x.npy", "w", force_zip64=True) as stream:
            header = io.BytesIO()
            np.lib.format.write_array_header_1_0(
                header, {"descr": "|u1", "fortran_order": False, "shape": (150, 10**6)}
            )
            stream.write(header.getvalue())
            for _ in range(150):
                stream.write(bytes(10**6))
        for name in ("y", "client"):
            write_header(archive, f"{name}.npy", (150,), bytes(8 * 150))
    assert bomb.stat().st_size < 10**6
    tracemalloc.start()
    try:
        with pytest.raises(BadInput, match=r"bomb.npz of .* kB would grow to 150.0 MB: .*save it uncompressed"):
            Federation.load(bomb)
        assert tracemalloc.get_traced_memory()[1] < 10**7
    finally:
        tracemalloc.stop()


def test_data_that_compresses_well_is_read(tmp_path):
    np.savez_compressed(tmp_path / "zeros.npz", x=np.zeros((5000, 1000), np.uint8), y=np.zeros(5000), client=[0] * 5000)
    assert len(Federation.load(tmp_path / "zeros.npz").y) == 5000


@pytest.mark.parametrize("shape", [(10**13,), (10**13, 10**13), (2**63,), (3,), (4, 4)])
def test_a_header_that_contradicts_the_content_is_refused_unread(shape, tmp_path):
    file = tmp_path / "odd.npz"
    with zipfile.ZipFile(file, "w") as archive:
        write_header(archive, "x.npy", shape, bytes(32))
        write_header(archive, "y.npy", (4,), bytes(32))
    with pytest.raises(BadInput, match=r"odd.npz cannot be read \(altered or incomplete\)"):
        read_npz(file, required=("x", "y"), optional=())


def test_a_member_that_cannot_be_opened_or_understood_is_refused(tmp_path):
    file = tmp_path / "odd.npz"
    header = b"{'descr': " + b"[" * 5000 + b", 'shape': (1,)}"
    magic = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little")
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.npy", magic + header)
        write_header(archive, "y.npy", (4,), bytes(32))
    nested = file.read_bytes()
    encrypted = bytearray(nested)
    for start in (encrypted.index(b"PK\x03\x04") + 6, encrypted.index(b"PK\x01\x02") + 8):
        encrypted[start] |= 1  # the flag of an encrypted member
    for content in (nested, bytes(encrypted)):
        file.write_bytes(content)
        with pytest.raises(BadInput, match=r"odd.npz cannot be read \(altered or incomplete\)"):
            read_npz(file, required=("x", "y"), optional=())


def test_an_archive_larger_than_memory_is_refused(tmp_path, monkeypatch):
    np.savez(tmp_path / "large.npz", x=np.zeros((1000, 100)), y=np.zeros(1000))
    monkeypatch.setattr("fedrema.base.memory.free_memory", lambda: 10**5)
    with pytest.raises(BadInput, match=r"large.npz needs 808.\d kB of memory, but only 100.0 kB is free"):
        read_npz(tmp_path / "large.npz", required=("x", "y"), optional=())


def test_amounts_of_memory_are_formatted_for_people():
    assert [amount(size) for size in (12, 1500, 2 * 10**9, 10**20)] == ["12 bytes", "1.5 kB", "2.0 GB", "100000.0 PB"]


def test_deeply_nested_files_are_refused(capsys, tmp_path):
    (tmp_path / "deep.toml").write_text("lr = " + "[" * DEEP)
    assert "--config deep.toml is not valid TOML" in refused(["run", "fedavg", "--config", "deep.toml"], capsys)
    (tmp_path / "deep.json").write_text("[" * DEEP)
    said = refused(["run", "fedavg", "--partition-file", "deep.json"], capsys)
    assert "--partition-file deep.json is not valid JSON" in said
    meta = np.array("[" * DEEP)
    np.savez("meta.npz", x=np.zeros((4, 2)), y=[0, 1, 0, 1], client=[0, 0, 1, 1], meta=meta)
    assert "'meta' is not the JSON object" in refused(["run", "fedavg", "--federation", "meta.npz"], capsys)


@pytest.mark.parametrize("file", ["config.json", "summary.json"])
def test_a_run_with_a_deeply_nested_file_is_refused(file, capsys, tmp_path):
    quick = ["--rounds", "1", "--clients", "2", "--epochs", "1", "--quiet"]
    assert main(["run", "local", *quick, "--out", "run"]) == 0
    (tmp_path / "run" / file).write_text('{"a": ' * DEEP)
    assert f"run/{file} cannot be read" in refused(["compare", "run"], capsys)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--federation", "leaving:data"], "--federation leaving:data failed: it called sys.exit('no data today')"),
        (["--net", "leaving:network"], "--net 'leaving:network' cannot be built: it called sys.exit(4)"),
        (["--net", "leaving:Leaving"], "does not accept samples of shape (1, 8, 8): it called sys.exit()"),
        (["--net", "gone:network"], "The network 'gone:network' cannot be loaded: it called sys.exit(1)"),
    ],
)
def test_an_exit_in_users_code_is_one_sentence(arguments, sentence, capsys, tmp_path):
    (tmp_path / "leaving.py").write_text(USER_CODE)
    (tmp_path / "gone.py").write_text("import sys\nsys.exit(1)\n")
    try:
        said = refused(["run", "fedavg", *arguments, "--rounds", 1, "--out", "run"], capsys)
    finally:
        for name in ("leaving", "gone"):
            sys.modules.pop(name, None)
    assert sentence in said
    assert "raise an exception instead" in said


@pytest.mark.parametrize("arguments", ["methods", "--help", "run fedavg --help"])
def test_a_closed_output_pipe_ends_the_command_quietly(arguments, programs):
    command = [programs / "fedrema", *arguments.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode != 2


def test_an_error_of_the_system_is_one_sentence(capsys):
    # /sys refuses new folders even to root.
    for place in ("/sys/fedrema/run", "/dev/null/run"):
        said = refused(["run", "local", "--rounds", 1, "--quiet", "--out", place], capsys)
        assert place.rpartition("/")[0] in said


@pytest.mark.parametrize("out", ["file", "file/deeper"])
def test_an_output_folder_that_is_a_file_is_refused_at_once(out, capsys, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "grid.toml").write_text("this is read only after --out has been checked")
    for command in (["reproduce", "table1"], ["grid", "grid.toml"]):
        said = refused([*command, "--out", out], capsys)
        assert f"--out {out}: file is a file; name a folder for the results" in said
    assert (tmp_path / "file").read_text() == "mine"
    assert {file.name for file in tmp_path.iterdir()} == {"file", "grid.toml"}
