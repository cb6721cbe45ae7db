"""A node tests its connection before it imports PyTorch, so that its owner need not wait for the reason."""

import shutil
import subprocess
import sys

import pytest

pytest.importorskip("flwr")

from fedrema.base.processes import free_port
from fedrema.cli import main
from fedrema.deploy.approval import approve, proposed_plan
from fedrema.deploy.connection import Cause, Finding
from fedrema.deploy.first_connection import first_problem
from fedrema.deploy.folder import NodeFolder
from fedrema.deploy.node_connection import NodeConnection


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    folder = tmp_path_factory.mktemp("early") / "f"
    port = ["--host", "127.0.0.1", "--port", str(free_port())]
    assert main(["deploy", "init", str(folder), "fedavg", "--deal", "--nodes", "north,south", *port]) == 0
    opened = NodeFolder.open(folder / "nodes" / "north")
    approve(opened, proposed_plan(opened))
    return opened.path


def test_the_reason_is_known_without_pytorch_and_flower(node):
    code = (
        "import sys; from pathlib import Path; import fedrema.cli.deploy;"
        "from fedrema.deploy.first_connection import first_problem;"
        "print(first_problem(Path(sys.argv[1])), 'torch' in sys.modules, 'flwr' in sys.modules)"
    )
    printed = subprocess.run([sys.executable, "-c", code, str(node)], capture_output=True, text=True, check=True).stdout
    assert printed.startswith("not connected: no server listens at 127.0.0.1:")
    assert printed.endswith("False False\n")


def test_the_same_sentence_is_not_repeated(node, monkeypatch):
    found = first_problem(node)
    assert NodeConnection(NodeFolder.open(node), found).news() == []
    assert NodeConnection(NodeFolder.open(node)).news() == [found]
    monkeypatch.setattr("fedrema.deploy.first_connection.probe", lambda *arguments: Finding(Cause.CONNECTED))
    assert first_problem(node) == ""


@pytest.mark.parametrize("missing", ["node.toml", "ca.crt", "node.key", "approved.json"])
def test_an_incomplete_or_unapproved_folder_contacts_nobody(node, missing, tmp_path, monkeypatch):
    shutil.copytree(node, tmp_path / "node")
    (tmp_path / "node" / missing).unlink()
    monkeypatch.setattr("fedrema.deploy.first_connection.probe", pytest.fail)
    assert first_problem(tmp_path / "node") == ""


@pytest.mark.parametrize("content", [b"", b"server = 3", b"\xff", b'name = "x"', b"nonsense"])
def test_a_damaged_file_is_left_to_the_complete_check(node, content, tmp_path):
    shutil.copytree(node, tmp_path / "node")
    (tmp_path / "node" / "node.toml").write_bytes(content)
    assert first_problem(tmp_path / "node") == ""
