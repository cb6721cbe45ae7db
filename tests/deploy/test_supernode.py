"""The SuperNode forgets a message whose run ends while it is being received, and connects again within seconds."""

from itertools import islice

import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, pull_objects
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.retry import http_retry, make_simple_http_retry_invoker
from flwr.supercore.run import Run, RunNotRunningException
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState

from fedrema.deploy.flower_supernode import receive_message
from fedrema.deploy.flower_transfers import shorten_pauses


def received(is_running):
    """Receive a message; return the state, the objects and the result."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    store = InMemoryObjectStore()
    state = InMemoryNodeState(store)
    state.set_node_id(7)
    state.store_run(Run.create_empty(1))
    message = Message(RecordDict({"facts": ConfigRecord({"round": 1})}), 7, MessageType.TRAIN)
    vars(message.metadata)["_message_id"] = message.object_id
    parts = {name: each.deflate() for name, each in get_all_nested_objects(message).items()}

    def pull_object(run, part):
        if not is_running:
            raise RunNotRunningException
        return parts[part]

    result = receive_message(
        state=state,
        object_store=store,
        node_config={},
        receive=lambda: (remove_content_from_message(message), get_object_tree(message)),
        get_run=None,
        get_fab=None,
        pull_object=pull_object,
        confirm_message_received=lambda run, identity: None,
        trusted_entities=None,
    )
    return state, store, result


def test_a_message_is_received():
    state, store, result = received(is_running=True)
    assert (result, len(state.msg_store), len(store)) == (1, 1, 3)


def test_nothing_remains_of_a_message_whose_run_has_ended():
    state, store, result = received(is_running=False)
    assert (result, len(state.msg_store), len(store)) == (None, 0, 0)


def test_pauses_are_short_while_the_server_does_not_respond(monkeypatch):
    monkeypatch.setattr(http_retry, "MAX_RETRY_DELAY", http_retry.MAX_RETRY_DELAY)  # is restored at the end
    for function in (pull_objects, pull_and_inflate_object_from_tree):
        monkeypatch.setattr(function, "__kwdefaults__", dict(function.__kwdefaults__))
    shorten_pauses()
    pauses = list(islice(make_simple_http_retry_invoker().wait_gen_factory(), 10))
    assert pauses[0] <= 1
    assert max(pauses) == 4
    assert pull_objects.__kwdefaults__["backoff_cap"] == 1
