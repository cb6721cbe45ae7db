"""The state of a node or server is resumed only by the same revision of fedrema with the same method file."""

import sys

import pytest

from fedrema.cli.arguments import parse_settings
from fedrema.deploy.node import Node
from fedrema.deploy.run_config import Plan
from fedrema.deploy.run_state import RunState
from fedrema.deploy.server import CentralServer
from fedrema.errors import BadInput
from fedrema.methods.ditto import Ditto
from fedrema.runs.trained_clients import dummy_federation
from tests.fixtures import make_federation

ARGUMENTS = ("--hidden", "4", "--rounds", "3", "--epochs", "1", "--batch", "5", "--device", "cpu")
OWN = """
from typing import ClassVar
from fedrema.methods.ditto import Ditto

class Mine(Ditto):
    name: ClassVar[str] = "mine"
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "my_deployed_method.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "my_deployed_method.py"
    sys.modules.pop("my_deployed_method", None)


class Both:
    """A server and a node with folders, as they are when their processes start."""

    def __init__(self, method, folder):
        federation = make_federation(counts=(20,))
        self.settings = parse_settings(method, ARGUMENTS, plain=True)
        self.central = CentralServer(self.settings, dummy_federation(federation.sample_shape, federation.task), 1)
        plan = Plan(str(folder), "6", 4, least_clients=1)
        self.run = RunState(folder / "server", self.settings, plan, self.central)
        self.start_node = lambda: Node(self.settings, federation, folder / "node")

    def run_round(self):
        """Run a round and save it."""
        self.run.open()
        self.run.add_scores({})  # the record of the round before, whose models no node has scored
        node = self.start_node()
        record = self.central.complete_round({node.name: node.reply_to(self.central.request(node.name))})
        self.run.save_round(record)
        self.run.lock.release()


def test_another_revision_of_the_method_resumes_neither(tmp_path, monkeypatch):
    Both("ditto", tmp_path).run_round()
    Both("ditto", tmp_path).run_round()
    monkeypatch.setattr(Ditto, "revision", 7, raising=False)
    later = Both("ditto", tmp_path)
    for start in (later.run.open, later.start_node):
        with pytest.raises(BadInput, match=r"was started with revision \d of Ditto; this .* has revision 7: start"):
            start()


def test_another_method_file_resumes_neither(own, tmp_path):
    Both("my_deployed_method:Mine", tmp_path).run_round()
    sys.modules.pop("my_deployed_method")
    Both("my_deployed_method:Mine", tmp_path).run_round()
    sys.modules.pop("my_deployed_method")
    own.write_text(f"{OWN}    # changed\n")
    later = Both("my_deployed_method:Mine", tmp_path)
    for start in (later.run.open, later.start_node):
        with pytest.raises(BadInput, match=r"be continued: my_deployed_method.py has changed since it was started"):
            start()
