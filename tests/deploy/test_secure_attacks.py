"""Secure aggregation against a malicious server: what it can ask real executors for, message by message."""

import os

import numpy as np
import pytest

pytest.importorskip("flwr")

import msgspec
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from fedrema.deploy.flower_records import FACTS, MASK, SECURE, SHARE, UNMASK
from tests.deploy.executors import NAMES, Approved

EASY = ("--secure-aggregation", "--secure-threshold", "0.5")
"""Two of three nodes hold enough shares, so that only the other rules protect a node; sums need three nodes."""


class Captured(Exception):
    """The first requests of the real server, which are not sent."""


class Operator:
    """A server that sends the executors whatever it likes, starting from the real server's requests."""

    def __init__(self, made):
        self.made, self.requests = made, {}
        grid = made.grid()

        def capture(node, message, context):
            name = grid.names[node]
            self.requests[name] = message.content
            if len(self.requests) == len(NAMES):
                raise KeyboardInterrupt
            raise Captured

        grid.answer = capture
        with pytest.raises(KeyboardInterrupt):
            made.conduct(grid)
        self.config = grid.contexts[7].run_config

    def ask(self, name, kind, content):
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        message = Message(content, 7, kind, ttl=60.0)
        message.metadata.__dict__["_message_id"] = "1"
        return self.made.executors[name].reply_to(message, Context(1, 7, {}, RecordDict(), self.config))

    def train(self, name, common=None, **facts):
        """Request training; return the announced keys, or None if the node refuses."""
        content = RecordDict({**self.requests[name]})
        content[FACTS] = ConfigRecord({**content[FACTS], **facts})
        if common is not None:
            content["common"] = common(content["common"])
        return answer_in(self.ask(name, MessageType.TRAIN, content))

    def stage(self, name, kind, what):
        """Ask for a stage; return the answer, or None if the node refuses."""
        content = RecordDict({SECURE: ConfigRecord({SECURE: msgspec.msgpack.encode(what)})})
        content[FACTS] = ConfigRecord({"name": name, "round": 1})
        return answer_in(self.ask(name, kind, content))

    def share(self, name, keys):
        return self.stage(name, SHARE, {"participants": len(keys), "keys": keys})

    def mask(self, name, encrypted):
        """Pass on what the other nodes have encrypted for this one."""
        return self.stage(name, MASK, {other: each[name] for other, each in encrypted.items() if other != name})


def answer_in(reply):
    if reply.has_error():
        return None
    if SECURE not in reply.content:
        return reply.content
    return msgspec.msgpack.decode(reply.content[SECURE][SECURE])


@pytest.fixture
def operator(tmp_path):
    return Operator(Approved(tmp_path / "federation", "fedavg", 2, EASY))


def test_names_that_the_server_invents_do_not_count_towards_the_least_number_of_nodes(operator):
    keys = [operator.train(name) for name in NAMES]
    encrypted = {name: operator.share(name, keys) for name in NAMES}
    del encrypted["west"]  # as if it had failed
    for name in ("north", "south"):
        operator.mask(name, encrypted)
        assert operator.stage(name, UNMASK, ["ghost", "north", "south"]) is None  # a sum of two


def test_a_node_that_has_failed_does_not_count_either(operator):
    keys = [operator.train(name) for name in NAMES]
    encrypted = {name: operator.share(name, keys) for name in ("north", "south")}  # west gave no shares
    for name in ("north", "south"):
        operator.mask(name, encrypted)
        assert operator.stage(name, UNMASK, list(NAMES)) is None


def test_all_three_stages_are_answered_for_an_honest_sum(operator):
    keys = [operator.train(name) for name in NAMES]
    encrypted = {name: operator.share(name, keys) for name in NAMES}
    for name in NAMES:
        assert operator.mask(name, encrypted) is not None
    for name in NAMES:
        assert set(operator.stage(name, UNMASK, list(NAMES))) == set(NAMES)


def dead(common):
    """Return the model with the same shapes with which no parameter changes."""
    return ArrayRecord({name: Array(np.zeros_like(array.numpy())) for name, array in common.items()})


@pytest.mark.parametrize("singled_out", NAMES)
def test_nodes_that_have_received_different_models_do_not_mask_together(singled_out, operator):
    keys = [operator.train(name, None if name == singled_out else dead) for name in NAMES]
    assert None not in keys  # a node cannot know what the others receive
    assert operator.share(singled_out, keys) is None
    others = [name for name in NAMES if name != singled_out]
    assert all(operator.share(name, keys) is None for name in others)
    log = operator.made.log(others[0])
    assert "not signed by it for this sum" in log


def test_keys_of_an_earlier_attempt_at_the_round_are_refused(operator):
    earlier = {name: operator.train(name) for name in NAMES}
    session = os.urandom(16)
    again = {name: operator.train(name, session=session) for name in ("north", "south")}
    assert operator.share("north", [again["north"], again["south"], earlier["west"]]) is None
    assert "'west' are not signed by it for this sum" in operator.made.log("north")


def test_the_number_of_an_earlier_sum_is_refused(operator):
    assert operator.train("north") is not None
    assert operator.train("north") is None
    assert operator.train("north", session=b"") is None
    assert operator.train("north", session=os.urandom(16)) is not None


def test_a_node_without_the_keys_of_the_others_contributes_to_no_sum(tmp_path):
    def alone(node):
        for file in (node / "peers").iterdir():
            file.unlink()
        (node / "peers").rmdir()

    operator = Operator(Approved(tmp_path / "federation", "fedavg", 2, EASY, alone))
    keys = [operator.train(name) for name in NAMES]
    assert operator.share("north", keys) is None
    assert "There is no key of node 'south' in this node's folder peers" in operator.made.log("north")
