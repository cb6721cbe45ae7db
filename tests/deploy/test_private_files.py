"""All files of a federation are readable by their owner only, whatever the umask."""

import os

import pytest

pytest.importorskip("flwr")

from fedrema.base.files import make_private
from fedrema.cli import main

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no modes")
DATA = ("--dataset", "digits", "--clients", "2", "--nodes", "2", "--rounds", "1")


@pytest.fixture(params=[0o022, 0o000], ids=["022", "000"])
def umask(request):
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def open_to_others(folder):
    return [str(path) for path in (folder, *folder.rglob("*")) if path.lstat().st_mode & 0o077]


def test_commands_that_create_a_federation(umask, tmp_path, monkeypatch):
    folder = tmp_path / "federation"
    assert main(["deploy", "init", str(folder), "fedavg", "--deal", *DATA]) == 0
    assert main(["deploy", "add", str(folder), "east"]) == 0
    assert main(["deploy", "key", str(folder / "nodes" / "node-1")]) == 0
    assert main(["deploy", "approve", str(folder / "nodes" / "node-1")]) == 0
    assert main(["deploy", "renew", str(folder)]) == 0
    assert main(["deploy", "renew", str(folder), "--authority", "prepare"]) == 0
    assert open_to_others(folder) == []
    now = os.umask(umask)
    assert now == umask  # the caller's umask is unchanged


def test_a_folder_that_was_copied(umask, tmp_path):
    outside = tmp_path / "outside.npz"
    outside.touch(0o666)
    (tmp_path / "server" / "keys").mkdir(parents=True)
    (tmp_path / "server" / "start.sh").touch(0o755)
    (tmp_path / "server" / "data.npz").symlink_to(outside)
    before = outside.stat().st_mode
    make_private(tmp_path / "server")
    shown = open_to_others(tmp_path / "server")
    assert shown == [str(tmp_path / "server" / "data.npz")]  # the link itself
    assert (tmp_path / "server" / "start.sh").stat().st_mode & 0o700 == 0o700 & ~umask
    assert outside.stat().st_mode == before


@pytest.mark.network
@pytest.mark.parametrize("given", [0o022, 0o000], ids=["022", "000"])
def test_a_federation_of_processes(given, tmp_path):
    before = os.umask(given)
    try:
        folder = tmp_path / "federation"
        assert main(["deploy", "demo", str(folder), "fedavg", "--nodes", "2", "--rounds", "2"]) == 0
    finally:
        os.umask(before)
    names = {path.name for path in folder.rglob("*")}
    assert {"rounds.jsonl", "audit.jsonl", "superlink.db", "superlink.log", "state.safetensors", "run.log"} <= names
    assert open_to_others(folder) == []
