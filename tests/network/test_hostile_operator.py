"""A hostile operator controls the server and what it sends; no code of the server runs on a node."""

import json
import re

import pytest

pytest.importorskip("flwr")

from tests.network.federation_of_processes import Processes

pytestmark = pytest.mark.network
HOSTILE = """
from pathlib import Path
Path({marker!r}).touch()
from fedrema.deploy.client_app import app
"""

CURIOUS = """
import json, time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    while len(nodes := grid.get_nodes()) < 3:
        time.sleep(0.5)
    found = []
    for kind in ("query.private_parameters", "train.private_parameters", "evaluate"):
        facts = {{node.node_id: ConfigRecord({{"name": node.name, "round": 1}}) for node in nodes}}
        asked = [Message(RecordDict({{"facts": facts[node]}}), node, kind) for node in facts]
        for reply in grid.send_and_receive(asked, timeout=60.0):
            found.append((kind, reply.has_content(), reply.error.reason if reply.has_error() else ""))
    Path({file!r}).write_text(json.dumps(found))
    time.sleep(600)
"""
"""An app of the server that asks the nodes for something else than training."""


def spoil(network, name, old, new):
    """Change a file of the app that the server sends."""
    file = network.folder / "server" / "app" / name
    text, found = re.subn(old, new, file.read_text(), count=1)
    assert found == 1
    file.write_text(text)


def test_the_app_that_the_server_sends_is_never_executed(tmp_path):
    with Processes(tmp_path / "federation", "ditto", rounds=2, least_clients=3) as network:
        package = network.folder / "server" / "app" / "fedrema_app"
        (package / "client_app.py").write_text(HOSTILE.format(marker=str(tmp_path / "executed")))
        network.start_all()
        # The configuration is the approved one, so the nodes train: with their own code.
        assert network.finish() == 0, network.output("server")
        installed = [file for name in network.names for file in network.node(name).rglob("*fedrema_app*")]
    assert not (tmp_path / "executed").exists()
    assert installed == []
    assert all(record["participants"] == [0, 1, 2] for record in network.records())


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (r"(?m)^method = .*$", 'method = "local"', "has not approved method = 'local'"),
        (r"(?m)^epochs = .*$", "epochs = 50", "has not approved epochs = 50"),
    ],
)
def test_another_plan_is_refused_and_nothing_is_sent(old, new, why, tmp_path):
    with Processes(tmp_path / "federation", "fedavg", rounds=2, wait_seconds=10.0) as network:
        spoil(network, "pyproject.toml", old, new)
        network.start_all()
        assert network.finish() == 2
        for name in network.names:
            assert f"refused (setting): the node's owner {why}" in (network.node(name) / "node.log").read_text()
            assert not list((network.node(name) / "kept").iterdir())
    assert f"setting: the node's owner {why}" in (network.folder / "server" / "run.log").read_text()
    assert network.records() == []


def test_an_app_of_the_server_that_asks_for_private_parameters_gets_nothing(tmp_path):
    answers = tmp_path / "answers.json"
    with Processes(tmp_path / "federation", "ditto", rounds=2) as network:
        app = network.folder / "server" / "app" / "fedrema_app" / "server_app.py"
        app.write_text(CURIOUS.format(file=str(answers)))
        network.start_all()
        network.wait(answers.exists)
        found = json.loads(answers.read_text())
        logs = [(network.node(name) / "node.log").read_text() for name in network.names]
    assert len(found) == sum(log.count(" refused (message): ") for log in logs) == 9
    for kind, has_content, reason in found:
        assert not has_content
        assert reason == f"message: the node's owner has not approved messages of the type {kind}"
    assert not any(list((network.node(name) / "kept").iterdir()) for name in network.names)
