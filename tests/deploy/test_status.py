"""fedrema deploy status of a federation whose SuperLink does not run."""

import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord

from fedrema.cli import main
from fedrema.config.settings import read_toml
from fedrema.deploy.flower_conductor import Conductor
from fedrema.deploy.folder import NodeFolder, ServerFolder
from fedrema.deploy.run_config import read_run_config
from fedrema.deploy.run_state import locked_run, stop_reason_file
from fedrema.deploy.status import _node, read_status
from fedrema.errors import BadInput
from fedrema.runs.run import Run
from tests.deploy.executors import Approved
from tests.deploy.flower_in_process import InProcessGrid

NAMES = ("north", "south", "west")


@pytest.fixture
def place(tmp_path, capsys):
    words = ["--rounds", "2", "--epochs", "1", "--samples", "40", "--hidden", "6"]
    assert main(["deploy", "init", str(tmp_path / "f"), "fedavg", "--deal", "--nodes", ",".join(NAMES), *words]) == 0
    capsys.readouterr()
    return ServerFolder.open(tmp_path / "f")


def conducted(place, spoil=lambda node, reply: reply):
    """Conduct the federation in this process, with the folders of its nodes."""
    config = read_toml(place.app / "pyproject.toml", "the app")["tool"]["flwr"]["app"]["config"]
    config["folder"] = str(place.run)
    nodes = [NodeFolder.open(place.path.parent / "nodes" / name) for name in NAMES]
    grid = InProcessGrid(
        config, [node.node_config() for node in nodes], dict(zip((7, 8, 9), NAMES, strict=True)), spoil
    )
    for node in nodes:
        node.kept.mkdir()
    with locked_run(place.run) as lock:
        Conductor(grid, *read_run_config(config), pause=lambda seconds: None).conduct(lock)


def test_before_the_first_round(place):
    now = read_status(place)
    assert (now.state, now.method, now.round, now.rounds) == ("stopped", "fedavg", 0, 2)
    assert [(member.name, member.state, member.last_round) for member in now.members] == [
        (name, "unknown", 0) for name in NAMES
    ]
    assert 820 < now.certificate_days < 826


def test_after_the_last_round(place, capsys):
    conducted(place, spoil=lambda node, reply: None if node == 8 and reply.metadata.group_id == "2" else reply)
    now = read_status(place)
    assert (now.state, now.round) == ("finished", 2)
    assert [member.last_round for member in now.members] == [2, 1, 2]
    assert now.members[1].problem == "round 2: no reply within 300 s"
    assert all(0 <= member.accuracy <= 1 for member in now.members)
    assert main(["deploy", "status", str(place.path)]) == 0
    printed = capsys.readouterr().out
    assert "fedavg: finished; round 2 of 2, accuracy" in printed
    assert "no reply within 300 s" in printed
    assert main(["deploy", "status", str(place.path.parent), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert [member["name"] for member in status["members"]] == list(NAMES)
    assert status["checkpoint_age"] >= 0
    assert main(["deploy", "status", str(place.path), "--healthy"]) == 0
    # A node's owner has a log.
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

    conducted(place, spoil)
    north, south, west = read_status(place).members
    assert (north.rejected, north.clipped, north.problem) == (0, 0, "")
    assert (south.rejected, south.clipped, south.last_round) == (1, 0, 2)
    assert south.problem == ""  # its next reply was used
    assert (west.rejected, west.last_round) == (1, 1)
    assert west.problem.startswith("round 2: it reports 1000000000 training samples, but it joined with ")
    # A clipped reply is shown too; in an ordinary record there is none.
    records = Run(place.run).rounds
    assert all(not record.nodes.clipped for record in records)

    def clipping(name):
        return replace(records[-1], nodes=replace(records[-1].nodes, clipped={name: "too long"}))

    clipped = _node("north", list(NAMES), [clipping("north")], "online")
    assert (clipped.rejected, clipped.clipped, clipped.problem) == (0, 1, "round 2: too long")
    both = _node("south", list(NAMES), [records[0], clipping("south")], "online")
    assert both.problem == "round 2: too long (rejected 1, clipped 1 times in the last 20 rounds)"
    failed = replace(records[-1], participants=[0], nodes=replace(records[-1].nodes, rejected={"west": "x.y.Bad: no"}))
    assert _node("west", list(NAMES), [failed], "online").problem == "round 2: no"
    # It is shown until a later reply is used, however many rounds are completed without the node.
    absent = [replace(failed, round=number, nodes=replace(failed.nodes, rejected={})) for number in range(3, 40)]
    assert _node("west", list(NAMES), [failed, *absent], "offline").problem == "round 2: no"
    back = replace(absent[-1], round=40, participants=[0, 2])
    assert _node("west", list(NAMES), [failed, *absent, back], "online").problem == ""


def test_while_a_server_runs_and_after_it_failed(place):
    assert main(["deploy", "status", str(place.path), "--healthy"]) == 1
    with locked_run(place.run):
        assert read_status(place).state == "running, but the SuperLink does not respond"
        assert main(["deploy", "status", str(place.path), "--healthy"]) == 1
    stop_reason_file(place.run).write_text("Only 1 of at least 2 clients were there after 3 s (north).\n")
    assert read_status(place).state == "failed: Only 1 of at least 2 clients were there after 3 s (north)."


def test_a_refusal_is_shown_while_its_round_is_repeated(tmp_path, capsys):
    made = Approved(tmp_path / "federation", "fedavg", more=["--least-clients", "3"])
    seen = []

    def spoil(node, reply):
        seen.append(read_status(made.place).members[0].problem)
        return reply

    with pytest.raises(BadInput, match="Round 1 needs 3 usable replies"):
        made.conduct(made.grid(spoil, rounds=7))
    why = "rounds: the node's owner has approved 3 rounds, not 7"
    assert seen == [""] * 3 + [f"round 1, attempt 1: {why}"] * 3
    assert [node.problem for node in read_status(made.place).members] == [f"round 1, attempt 2: {why}"] * 3
    capsys.readouterr()
    main(["deploy", "status", str(made.folder)])
    assert why in " ".join(capsys.readouterr().out.split()).replace("| ", "")
    made.conduct()
    assert [node.problem for node in read_status(made.place).members] == [""] * 3
