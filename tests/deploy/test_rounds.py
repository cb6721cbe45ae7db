"""When a round is completed, repeated or abandoned: the number of usable replies, and the deadline during an outage."""

import threading
from dataclasses import replace

import httpx
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from fedrema.deploy.flower_grid import NoResponse, exchange, list_nodes
from fedrema.deploy.flower_records import FACTS
from fedrema.errors import BadInput
from fedrema.runs.run import Run
from tests.deploy.flower_in_process import InProcessGrid
from tests.deploy.test_flower import CLIENTS, Federated, first, node, with_arrays

NOT_FINITE = with_arrays(lambda arrays: first(arrays, lambda value: value * float("nan")))


def rejected_in_round_two(times):
    """Return a function that makes all replies to round 2 but the first client's unusable, so many times."""
    spoiled = []

    def spoil(number, reply):
        if number == node(0) or reply.metadata.group_id != "2" or len(spoiled) >= times * (CLIENTS - 1):
            return reply
        spoiled.append(number)
        return NOT_FINITE(reply)

    return spoil


def test_a_round_with_too_few_usable_replies_is_repeated_and_leaves_no_trace(tmp_path):
    made = Federated(tmp_path / "repeated", spoil=rejected_in_round_two(times=2))
    conductor = made.conductor()
    conductor.run.open()
    conductor._round()
    before = {name: value.clone() for name, value in conductor.central.state.params.common.items()}
    conductor._round()  # one of two required replies can be used
    assert conductor.central.round == 1
    assert all(torch.equal(value, before[name]) for name, value in conductor.central.state.params.common.items())
    assert set(conductor.central.registry.last_used_round.values()) == {1}
    conductor.conduct()
    run = Run(tmp_path / "repeated" / "server")
    assert [record["participants"] for record in run.rounds] == [[0, 1, 2, 3]] * 3
    assert run.rounds[1]["rejected"] == {}
    # The record contains the clients that were rejected in each attempt.
    assert [sorted(attempt) for attempt in run.rounds[1]["attempts"]] == [["1", "2", "3"]] * 2
    assert "is not finite" in run.rounds[1]["attempts"][0]["1"]
    assert run.rounds[0].nodes.attempts == []
    assert run.rounds[2].nodes.attempts == []
    Federated(tmp_path / "whole").conductor().conduct()
    expected = Run(tmp_path / "whole" / "server")
    assert [record["client_accuracy"] for record in run.rounds] == [
        record["client_accuracy"] for record in expected.rounds
    ]
    for name, value in expected.state().params.own.items():
        assert torch.equal(run.state().params.own[name], value)


def test_too_few_usable_replies_for_too_long_end_the_run_with_the_reason(tmp_path):
    made = Federated(tmp_path, spoil=rejected_in_round_two(times=99), wait_seconds=0.0)
    sentence = (
        r"Round 2 needs 2 usable replies and had 1 for 0 s; 1: .* is not finite\. The run can resume after round 1"
    )
    with pytest.raises(BadInput, match=sentence):
        made.conductor().conduct()


def test_one_reply_is_enough_for_least_clients_1(tmp_path):
    made = Federated(tmp_path, spoil=rejected_in_round_two(times=1), least_clients=1)
    made.conductor().conduct()
    assert [record["participants"] for record in Run(tmp_path / "server").rounds] == [[0, 1, 2, 3], [0], [0, 1, 2, 3]]


def test_at_least_the_required_number_of_clients_is_chosen(tmp_path):
    made = Federated(tmp_path, more=["--participation", "0.25"], least_clients=3)
    made.conductor().conduct()
    assert [len(record["participants"]) for record in Run(tmp_path / "server").rounds] == [3, 3, 3]


class Outage(InProcessGrid):
    """A grid with an outage at one of Flower's calls: the call blocks, as Flower's own do, or raises."""

    def __init__(self, *arguments, error=None):
        super().__init__(*arguments)
        self.call, self.error = "", error
        self.back = threading.Event()
        self.timed_out = False

    def lost(self, call):
        if call == self.call and not self.back.is_set():
            if self.error is not None:
                raise self.error
            self.timed_out = not self.back.wait(60)
            raise httpx.ConnectError("that was too late")

    def get_nodes(self):
        self.lost("get_nodes")
        return super().get_nodes()

    def push_messages(self, messages):
        self.lost("push_messages")
        return super().push_messages(messages)

    def pull_messages(self, message_ids):
        self.lost("pull_messages")
        if self.call != "second pull":
            return super().pull_messages(message_ids)
        self.call = "pull_messages"
        return super().pull_messages(message_ids)


def lost_federation(tmp_path, call, error=None, **plan):
    made = Federated(tmp_path, "fedavg", **{"round_seconds": 0.3, **plan})
    made.grid = Outage(made.config, [made.grid.nodes[node(row)] for row in range(CLIENTS)], error=error)
    conductor = made.conductor()
    conductor.run.open()
    conductor._online()  # all have sent their names
    made.grid.call = call
    return made.grid, conductor


@pytest.mark.parametrize("call", ["push_messages", "pull_messages"])
@pytest.mark.parametrize("error", [None, httpx.ConnectError("gone")])
def test_a_round_ends_in_time_without_a_superlink(call, error, tmp_path):
    grid, conductor = lost_federation(tmp_path, call, error)
    conductor._round()
    assert not grid.timed_out
    assert conductor.central.round == 0
    assert conductor.attempts == [{str(row): "no reply within 0.3 s" for row in range(CLIENTS)}]
    grid.back.set()
    conductor.plan = replace(conductor.plan, round_seconds=300.0)
    conductor.conduct()  # it continues when the SuperLink answers again
    assert [record["participants"] for record in Run(tmp_path / "server").rounds] == [[0, 1, 2, 3]] * 3


def test_replies_from_before_the_outage_are_returned(tmp_path, monkeypatch):
    monkeypatch.setattr("fedrema.deploy.flower_grid.SECONDS_BETWEEN_PULLS", 0.0)
    grid, _ = lost_federation(tmp_path, "second pull")
    question = RecordDict({FACTS: ConfigRecord({})})
    messages = [Message(question, node(row), MessageType.QUERY, ttl=9.0) for row in range(CLIENTS)]
    (reply,) = exchange(grid, messages, 3.0)
    assert not grid.timed_out
    assert not reply.has_error()
    grid.back.set()


@pytest.mark.parametrize("error", [None, httpx.ConnectError("gone")])
def test_without_a_superlink_no_client_is_connected(error, tmp_path, monkeypatch):
    monkeypatch.setattr("fedrema.deploy.flower_conductor.SECONDS_TO_LIST_NODES", 0.1)
    grid, conductor = lost_federation(tmp_path, "get_nodes", error, wait_seconds=0.2)
    with pytest.raises(BadInput, match=r"Only 0 of at least 2 nodes were connected after 0\.2 s \(none\)"):
        conductor.conduct()
    with pytest.raises(NoResponse):
        list_nodes(grid, 0.1)
    assert not grid.timed_out
    grid.back.set()


def test_an_error_other_than_an_outage_ends_the_run(tmp_path):
    _, conductor = lost_federation(tmp_path, "push_messages", ZeroDivisionError("a bug"), round_seconds=300.0)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        conductor._round()


def test_a_reply_that_flower_cannot_decode_does_not_affect_the_others(tmp_path):
    class Undecodable(InProcessGrid):
        def pull_messages(self, message_ids):
            if any(identity.startswith(f"{node(1)}-") for identity in message_ids):
                raise ValueError("an object that is none")
            return super().pull_messages(message_ids)

    made = Federated(tmp_path, "fedavg")
    conductor = made.conductor()
    conductor.run.open()
    conductor._online()
    grid = Undecodable(made.config, [made.grid.nodes[node(row)] for row in range(CLIENTS)])
    grid.replies, conductor.grid = made.grid.replies, grid
    conductor._round()
    assert conductor.central.round == 1
    assert "its reply cannot be decoded: an object that is none" in conductor.run.pending["rejected"]["1"]
    assert conductor.run.pending["participants"] == [0, 2, 3]
