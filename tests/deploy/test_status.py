"""fedrema deploy status: what it tells of a federation that is not going on at the moment."""

import json

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord

from fedrema.cli import main
from fedrema.config.settings import read_toml
from fedrema.deploy.conductor import Conductor
from fedrema.deploy.places import NodePlace, ServerPlace
from fedrema.deploy.plan import read_run_config
from fedrema.deploy.presence import beside, present
from fedrema.deploy.standing import _member, standing
from tests.deploy.flower_in_process import InProcessGrid

NAMES = ("north", "south", "west")


@pytest.fixture
def place(tmp_path, capsys):
    words = ["--rounds", "2", "--epochs", "1", "--samples", "40", "--hidden", "6"]
    assert main(["deploy", "init", str(tmp_path / "f"), "fedavg", "--deal", "--nodes", ",".join(NAMES), *words]) == 0
    capsys.readouterr()
    return ServerPlace.open(tmp_path / "f")


def played(place, spoil=lambda node, reply: reply):
    """Play the federation in this process, with its nodes' own folders."""
    config = read_toml(place.app / "pyproject.toml", "the app")["tool"]["flwr"]["app"]["config"]
    config["folder"] = str(place.run)
    nodes = [NodePlace.open(place.path.parent / "nodes" / name) for name in NAMES]
    grid = InProcessGrid(config, [node.config() for node in nodes], dict(zip((7, 8, 9), NAMES, strict=True)), spoil)
    for node in nodes:
        node.kept.mkdir()
    with present(place.run) as lock:
        Conductor(grid, *read_run_config(config), pause=lambda seconds: None).conduct(lock)


def test_before_it_has_begun(place):
    now = standing(place)
    assert (now.state, now.method, now.round, now.rounds) == ("stopped", "fedavg", 0, 2)
    assert [(member.name, member.state, member.last_round) for member in now.members] == [
        (name, "unknown", 0) for name in NAMES
    ]
    assert 820 < now.certificate_days < 826


def test_after_the_last_round(place, capsys):
    played(place, spoil=lambda node, reply: None if node == 8 and reply.metadata.group_id == "2" else reply)
    now = standing(place)
    assert (now.state, now.round) == ("finished", 2)
    assert [member.last_round for member in now.members] == [2, 1, 2]
    assert now.members[1].trouble == "round 2: no reply within 300 s"
    assert all(0 <= member.accuracy <= 1 for member in now.members)
    assert main(["deploy", "status", str(place.path)]) == 0
    said = capsys.readouterr().out
    assert "fedavg: finished; round 2 of 2, accuracy" in said
    assert "no reply within 300 s" in said
    assert main(["deploy", "status", str(place.path.parent), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [member["name"] for member in told["members"]] == list(NAMES)
    assert told["checkpoint_age"] >= 0
    # The nodes' owners have a log of their own.
    assert "accuracy" in (place.path.parent / "nodes" / "north" / "node.log").read_text()


def test_rejected_and_clipped_replies_are_counted_by_node(place):
    def spoil(node, reply):
        if node == 8 and "params" in reply.content:
            arrays = {name: array.numpy() for name, array in reply.content["params"].items()}
            far = 1e30 if reply.metadata.group_id == "1" else 1.0
            reply.content["params"] = ArrayRecord(
                {name: Array(value * np.float32(far)) for name, value in arrays.items()}
            )
        if node == 9 and reply.metadata.group_id == "2" and "params" in reply.content:
            reply.content["facts"]["count"] = 10**9
        return reply

    played(place, spoil)
    north, south, west = standing(place).members
    assert (north.rejected, north.clipped, north.trouble) == (0, 0, "")
    assert (south.rejected, south.clipped, south.last_round) == (1, 0, 2)
    assert south.trouble.startswith("round 1: the numbers in ")
    assert (west.rejected, west.last_round) == (1, 1)
    assert west.trouble.startswith("round 2: it says that it trained on 1000000000 samples, but it joined with ")
    # A clipped reply is shown too; an ordinary record has no such entry.
    records = [json.loads(line) for line in (place.run / "rounds.jsonl").read_text().splitlines()]
    assert all("clipped" not in record for record in records)
    clipped = _member("north", list(NAMES), [{**records[-1], "clipped": {"north": "too long"}}], "online")
    assert (clipped.rejected, clipped.clipped, clipped.trouble) == (0, 1, "round 2: too long")
    both = _member("south", list(NAMES), [records[0], {**records[1], "clipped": {"south": "too long"}}], "online")
    assert both.trouble == "round 2: too long (rejected 1, clipped 1 times lately)"


def test_while_somebody_writes_and_after_it_gave_up(place):
    with present(place.run):
        assert standing(place).state == "going on, but the SuperLink does not answer"
    beside(place.run, "stopped").write_text("Only 1 of at least 2 clients were there after 3 s (north).\n")
    assert standing(place).state == "given up: Only 1 of at least 2 clients were there after 3 s (north)."
