"""The plan that a node's owner approves: what it shows, and that a node does not start if anything has changed."""

import json
import sys

import pytest

pytest.importorskip("flwr")

import fedrema
from fedrema.cli import main
from fedrema.deploy.approval import approve, approved_plan, proposed_plan
from fedrema.deploy.folder import NodeFolder
from fedrema.errors import BadInput
from tests.deploy.executors import NAMES, SETTINGS

OWN = """
from typing import ClassVar
from fedrema.methods.ditto import Ditto

class Mine(Ditto):
    name: ClassVar[str] = "mine"
"""


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    folder = tmp_path_factory.mktemp("approval") / "federation"
    words = ["--deal", "--nodes", ",".join(NAMES), *SETTINGS]
    assert main(["deploy", "init", str(folder), "fedavg", *words]) == 0
    return folder


@pytest.fixture
def node(federation):
    folder = NodeFolder.open(federation / "nodes" / "north")
    before = {file: file.read_bytes() for file in (folder.path / "node.toml", folder.plan_file)}
    yield folder
    folder.approval_file.unlink(missing_ok=True)
    for file, content in before.items():
        file.write_bytes(content)


def test_the_command_shows_the_plan_and_stores_its_digest(node, capsys):
    assert main(["deploy", "approve", str(node.path), "--show"]) == 0
    assert not node.approval_file.exists()
    assert main(["deploy", "approve", str(node.path)]) == 0
    printed = capsys.readouterr().out
    plan = approved_plan(node)
    assert json.loads(node.approval_file.read_text())["digest"] == plan.digest
    for line in (
        f"fedrema {fedrema.__version__}, method fedavg, at most 60 rounds",
        "before round 1, the node sends no statistics",
        "  epochs = 1",
        '  data = "data.npz"',
        "your own code: none",
        f"digest of the plan: {plan.digest}",
    ):
        assert line in printed.splitlines()


def test_the_servers_app_can_be_approved_instead_of_plan_toml(node, federation):
    there = federation / "server" / "app" / "pyproject.toml"
    assert proposed_plan(node, there) == proposed_plan(node)
    node.plan_file.unlink()
    with pytest.raises(BadInput, match=r"plan.toml does not exist: ask the server's operator for app/pyproject.toml"):
        proposed_plan(node)


def test_the_limits_of_the_server_are_not_part_of_the_plan(node):
    config = proposed_plan(node).config
    assert not {"folder", "least-clients", "wait-seconds", "round-seconds", "most-noise"} & config.keys()
    assert {"method", "lr", "rounds", "sample-shape", "device"} <= config.keys()


def test_a_node_does_not_start_without_an_approved_plan(node, capsys):
    assert main(["deploy", "client", str(node.path)]) == 2
    assert "has no approved plan: run fedrema deploy approve" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda node: node.approval_file.write_text(node.approval_file.read_text().replace("0.", "1.")), "was altered"),
        (lambda node: node.approval_file.write_text("{}"), "was altered"),
        (
            lambda node: (node.path / "node.toml").write_text(
                (node.path / "node.toml").read_text() + "privacy-clip = 1.0\nprivacy-noise = 1.0\n"
            ),
            "the setting for 'privacy-clip' has changed since the plan was approved",
        ),
        (
            lambda node: (node.path / "node.toml").write_text(
                (node.path / "node.toml").read_text().replace("data.npz", "other.npz")
            ),
            "the setting for 'data' has changed since the plan was approved",
        ),
    ],
)
def test_a_change_needs_a_new_approval(change, sentence, node):
    approve(node, proposed_plan(node))
    change(node)
    with pytest.raises(BadInput, match=sentence):
        approved_plan(NodeFolder.open(node.path))
    approve(node, proposed_plan(NodeFolder.open(node.path)))
    approved_plan(NodeFolder.open(node.path))


def test_another_version_of_fedrema_needs_a_new_approval(node, monkeypatch):
    approve(node, proposed_plan(node))
    monkeypatch.setattr(fedrema, "__version__", "99.0")
    with pytest.raises(BadInput, match=r"was approved for fedrema .*, and this is 99.0"):
        approved_plan(node)


def test_an_own_method_is_part_of_the_plan_and_is_not_imported_after_a_change(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_approved_method.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    words = ["--deal", "--nodes", ",".join(NAMES), *SETTINGS]
    assert main(["deploy", "init", "federation", "my_approved_method:Mine", *words]) == 0
    sys.modules.pop("my_approved_method")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "federation" / "nodes" / "north"), *sys.path])
    place = NodeFolder.open(tmp_path / "federation" / "nodes" / "north")
    with pytest.raises(BadInput, match="my_approved_method"):  # the owner has not placed it there
        proposed_plan(place)
    own = place.path / "my_approved_method.py"
    own.write_text(OWN)
    assert main(["deploy", "approve", str(place.path)]) == 0
    assert "  method: my_approved_method.py (SHA-256 " in capsys.readouterr().out
    assert approved_plan(place).settings()[0].method.name == "mine"
    sys.modules.pop("my_approved_method")
    own.write_text(f"raise SystemExit('executed')\n{OWN}")
    with pytest.raises(BadInput, match="the file for 'method' has changed since the plan was approved"):
        approved_plan(place)
    assert "my_approved_method" not in sys.modules
