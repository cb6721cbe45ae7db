"""The executor of a node: the same models as simulated, its data in memory, and nothing for a hostile operator."""

import sys

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.constant import TaskType
from flwr.supercore.task_identity import TaskIdentity

from fedrema.data import build_federation
from fedrema.deploy import flower_executor
from fedrema.deploy.answered_rounds import AnsweredRounds
from fedrema.deploy.node import Node
from fedrema.deploy.run_config import read_run_config
from fedrema.runs.execute import build_simulator
from fedrema.runs.run import Run
from tests.deploy.executors import Approved

HOSTILE = """
from pathlib import Path
Path(__file__).with_suffix(".executed").touch()
from fedrema.methods.fedavg import FedAvg as Mine
"""


@pytest.mark.parametrize("method", ["fedrema", "ditto", "local"])
def test_models_equal_those_of_the_simulator_and_samples_are_read_once(method, tmp_path, monkeypatch):
    opened = []

    def open_node(context, name, agreement, folder):
        opened.append(name)
        return original(context, name, agreement, folder)

    original = flower_executor.open_node
    monkeypatch.setattr(flower_executor, "open_node", open_node)
    made = Approved(tmp_path / "federation", method)
    central = made.conduct().central
    assert sorted(opened) == ["north", "south", "west"]
    settings, _ = read_run_config({**made.place.run_config(), "folder": "/unknown"})
    simulator = build_simulator(settings, build_federation(settings.data))
    state = simulator.start()
    records = [result.record for result in simulator.run(state)]
    for name, value in state.params.common.items():
        torch.testing.assert_close(central.state.params.common[name], value, rtol=0, atol=1e-6)
    for name, value in central.state.params.own.items():
        torch.testing.assert_close(value[:3], state.params.own[name], rtol=0, atol=1e-6)
    assert [record["accuracy"] for record in Run(made.place.run).rounds] == [record["accuracy"] for record in records]
    assert "refused" not in "".join(made.log(name) for name in made.executors)


@pytest.fixture(scope="module")
def attacked(tmp_path_factory):
    """A federation after its first request, and that request."""
    made = Approved(tmp_path_factory.mktemp("attacked") / "federation", "ditto")
    grid = made.grid()
    made.conduct(grid)
    made.config = grid.contexts[7].run_config
    made.content = grid.sent[0].content
    return made


def sent(made, content=None, kind=MessageType.TRAIN, task=TaskType.CLIENT_APP, **changes):
    """Return the reply of node north to a message, and the new lines in its log."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    message = Message(made.content if content is None else content, 7, kind, ttl=60.0)
    message.metadata.__dict__["_message_id"] = "1"
    config = {name: value for name, value in {**made.config, **changes}.items() if value is not None}
    before = made.log("north")
    reply = made.executors["north"].reply_to(message, Context(1, 7, {}, RecordDict(), config), task)
    return reply, made.log("north")[len(before) :]


def with_facts(made, **facts):
    return RecordDict({**made.content, "facts": ConfigRecord({**made.content["facts"], **facts})})


def with_own(made, name, group="own"):
    return RecordDict({**made.content, group: ArrayRecord({**made.content[group], name: Array(np.zeros(3))})})


@pytest.mark.parametrize(
    ("attack", "why"),
    [
        (lambda made: sent(made, method="hostile_for_executor:Mine"), "has not approved method ="),
        (lambda made: sent(made, net="hostile_for_executor:Net"), "has not approved net ="),
        (lambda made: sent(made, method="fedavg"), "has not approved method = 'fedavg'"),
        (lambda made: sent(made, lr=0.5), "has not approved lr = 0.5"),
        (lambda made: sent(made, epochs=1.0), "has not approved epochs = 1.0"),
        (lambda made: sent(made, epochs=True), "has not approved epochs = True"),
        (lambda made: sent(made, federation="/etc/passwd"), "has not approved any federation"),
        (lambda made: sent(made, lr=None), "has no lr, which the node's owner approved"),
        (lambda made: sent(made, rounds=10**6), "has approved 3 rounds, not 1000000"),
        (lambda made: sent(made, with_facts(made, round=4)), "has approved rounds 1 to 3, and this is round 4"),
        (lambda made: sent(made, with_facts(made, round=0)), "has approved rounds 1 to 3, and this is round 0"),
        (lambda made: sent(made, with_facts(made, round=-(10**6))), "and this is round -1000000"),
        (lambda made: sent(made, with_facts(made, round=0, train=False)), "and this is round 0"),
        (lambda made: sent(made, with_facts(made, name="south")), "the server calls this node 'south'"),
        (lambda made: sent(made, RecordDict()), "the server calls this node None"),
        (lambda made: sent(made, kind="query.private_parameters"), "messages of the type query.private_parameters"),
        (lambda made: sent(made, kind="train.everything"), "messages of the type train.everything"),
        (lambda made: sent(made, kind=MessageType.EVALUATE), "messages of the type evaluate"),
        (
            lambda made: sent(made, with_facts(made, round=5, train=False)),
            "approved rounds 1 to 3, and this is round 5",
        ),
        (lambda made: sent(made, with_facts(made, round="1")), "approved rounds 1 to 3, and this is round '1'"),
        (lambda made: sent(made, task=TaskType.AGENT_APP), "apps of the kind flwr-agentapp"),
        (lambda made: sent(made, kind=MessageType.QUERY, lr=0.5), "has not approved lr = 0.5"),
    ],
)
def test_a_hostile_operator_gets_nothing_and_nothing_is_executed(attack, why, attacked, tmp_path, monkeypatch):
    (tmp_path / "hostile_for_executor.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("open_node", "reply_to_request"):
        monkeypatch.setattr(flower_executor, name, lambda *arguments: pytest.fail("it was executed"))
    monkeypatch.setattr(Node, "reply_to", lambda *arguments: pytest.fail("it trained"))
    states = {file: file.read_bytes() for file in attacked.node("north").kept.iterdir()}
    reply, logged = attack(attacked)
    assert reply.has_error()
    assert not reply.has_content()
    assert reply.error.code == ErrorCode.CLIENT_APP_RAISED_EXCEPTION
    code, _, sentence = reply.error.reason.partition(": ")
    assert why in sentence
    assert f"refused ({code}): {sentence}\n" in logged
    assert "hostile_for_executor" not in sys.modules
    assert not list(tmp_path.glob("*.executed"))
    assert {file: file.read_bytes() for file in attacked.node("north").kept.iterdir()} == states


@pytest.mark.parametrize(
    ("attack", "why"),
    [
        # Ditto's personal model is private: the server can neither ask for it nor replace it.
        (lambda made: sent(made, with_own(made, private_name(made))), "which the method does not allow"),
        (lambda made: sent(made, with_own(made, "more", "common")), "which the method does not allow"),
        (lambda made: sent(made, kind="query.statistics"), "sends no statistics, because this federation needs none"),
    ],
)
def test_a_request_within_the_plan_cannot_exceed_the_method(attack, why, attacked):
    AnsweredRounds(attacked.node("north").kept).permit_from(1)
    states = {file: file.read_bytes() for file in attacked.node("north").kept.glob("round-*")}
    reply, logged = attack(attacked)
    AnsweredRounds(attacked.node("north").kept).permit_from(1)
    assert reply.has_error()
    assert not reply.has_content()
    assert why in reply.error.reason
    assert why in logged
    assert {file: file.read_bytes() for file in attacked.node("north").kept.glob("round-*")} == states


def private_name(made):
    node = made.executors["north"].node
    return next(name for name in node.initial.params.own if name not in made.content["common"])


def test_the_server_does_not_see_the_text_of_an_unexpected_error(attacked, monkeypatch, caplog):
    def fail(*arguments):
        raise ValueError("patient 17 is called Smith")

    monkeypatch.setattr(Node, "reply_to", fail)
    reply, logged = sent(attacked)
    assert reply.error.reason == "internal: it failed, and its node.log says why"
    assert "it failed with ValueError; " in logged
    assert "Smith" in caplog.text  # on the node


def test_a_malformed_request_is_answered_with_an_error(attacked):
    content = RecordDict({"facts": attacked.content["facts"]})
    assert sent(attacked, content)[0].has_error()
    assert not sent(attacked)[0].has_error()


def test_fewer_rounds_than_approved_are_accepted(attacked):
    assert not sent(attacked, rounds=2)[0].has_error()


def test_the_unchanged_request_is_answered_without_private_parameters(attacked):
    reply, _ = sent(attacked)
    assert set(reply.content.array_records) == {"params", "extras"}
    assert private_name(attacked) not in reply.content["params"]
