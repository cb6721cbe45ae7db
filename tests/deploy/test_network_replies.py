"""Replies are fetched part by part: none can use up the server's memory, or delay the others."""

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedResponse, ObjectTree, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

from fedrema.deploy.flower_packing import pack
from fedrema.deploy.flower_replies import LARGEST_OTHER, MOST_PARTS, NetworkReplies


class SuperLink:
    """Answers as Flower's SuperLink; a test decides which parts of a reply have arrived."""

    def __init__(self):
        self.replies, self.parts, self.late, self.asked, self.deleted = {}, {}, set(), [], []

    def add(self, request, content, change=lambda tree: tree):
        """Announce a reply to a request; return its parts."""
        reply = Message(content, reply_to=request)
        pack(reply)
        identity = vars(reply.metadata)["_message_id"] = reply.object_id
        parts = {name: each.deflate() for name, each in get_all_nested_objects(reply).items()}
        self.parts |= parts
        announced = message_to_proto(remove_content_from_message(reply))
        self.replies[request.metadata.message_id] = announced, change(get_object_tree(reply))
        return [identity, *(set(parts) - {identity})]

    def PullMessages(self, request):  # noqa: N802
        found = [self.replies.pop(each) for each in request.message_ids if each in self.replies]
        return PullAppMessagesResponse(
            messages_list=[message for message, _ in found], message_object_trees=[tree for _, tree in found]
        )

    def PullObject(self, request):  # noqa: N802
        self.asked.append(request.object_id)
        there = request.object_id in self.parts and request.object_id not in self.late
        content = self.parts[request.object_id] if there else b""
        return PullObjectResponse(object_found=True, object_available=there, object_content=content)

    def ConfirmMessageReceived(self, request):  # noqa: N802
        self.deleted.append(request.message_object_id)
        return ConfirmMessageReceivedResponse()


@pytest.fixture
def superlink():
    return SuperLink()


@pytest.fixture
def grid(superlink):
    grid = HttpGrid(token="secret")
    grid._client = superlink
    grid.set_run(Run.create_empty(1))
    return grid


def requests(count):
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    made = {}
    for number in range(count):
        message = Message(RecordDict({"facts": ConfigRecord({"n": number})}), 7 + number, MessageType.TRAIN)
        made[f"request-{number}"] = message
        vars(message.metadata)["_message_id"] = f"request-{number}"
    return made


def content(seed, size=10):
    generator = np.random.default_rng(seed)
    tensors = {name: Array(generator.normal(size=size)) for name in ("weight", "bias")}
    return RecordDict({"params": ArrayRecord(tensors), "facts": ConfigRecord({"seed": seed})})


def test_a_reply_that_arrives_slowly_does_not_delay_the_others(superlink, grid):
    waiting, replies = requests(3), NetworkReplies(grid, 1000)
    sent = {name: content(number) for number, name in enumerate(waiting)}
    parts = {name: superlink.add(request, sent[name]) for name, request in waiting.items()}
    superlink.late = set(parts["request-1"])
    found = dict(replies.arrived(waiting))
    assert set(found) == {"request-0", "request-2"}
    for name, reply in found.items():
        assert reply.content.object_id == sent[name].object_id
    left = {"request-1": waiting["request-1"]}
    superlink.asked.clear()
    assert dict(replies.arrived(left)) == {}
    assert len(superlink.asked) == 1  # one question for a reply of which nothing has arrived
    superlink.late = set(parts["request-1"][-1:])
    assert dict(replies.arrived(left)) == {}
    superlink.late = set()
    (reply,) = dict(replies.arrived(left)).values()
    assert reply.content.object_id == sent["request-1"].object_id
    assert len(superlink.deleted) == 3


def test_a_large_reply_is_refused_before_all_of_it_is_in_memory(superlink, grid):
    waiting, replies = requests(2), NetworkReplies(grid, 1000)
    superlink.add(waiting["request-0"], content(0, 10_000_000))
    superlink.add(waiting["request-1"], content(1))
    found = dict(replies.arrived(waiting))
    assert found["request-0"].error.reason == (
        f"its reply cannot be decoded: it has more than {1000 + LARGEST_OTHER} bytes"
    )
    assert replies.announced["request-0"].bytes < 10_000_000  # two parts of 5 MB at most
    assert replies.announced["request-0"].contents == {}
    assert found["request-1"].has_content()
    assert len(superlink.deleted) == 2


def test_a_reply_of_very_many_parts_is_refused_at_once(superlink, grid):
    def grown(tree):
        children = [ObjectTree(object_id=f"{number:064x}") for number in range(MOST_PARTS + 9)]
        return ObjectTree(object_id=tree.object_id, children=children)

    waiting, replies = requests(1), NetworkReplies(grid, 1000)
    superlink.add(waiting["request-0"], content(0), grown)
    (reply,) = dict(replies.arrived(waiting)).values()
    assert "parts" in reply.error.reason
    assert superlink.asked == []


def test_parts_that_are_no_message_are_refused(superlink, grid):
    waiting, replies = requests(1), NetworkReplies(grid, 1000)
    parts = superlink.add(waiting["request-0"], content(0))
    superlink.parts[parts[0]] = b"nothing that Flower knows"
    (reply,) = dict(replies.arrived(waiting)).values()
    assert reply.error.reason.startswith("its reply cannot be decoded: ")
