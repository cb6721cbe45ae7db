"""Replies of nodes, fetched from Flower's SuperLink part by part.

Flower's own `HttpGrid.pull_messages` fetches a reply of any size, waits until the last part of each reply has arrived,
and raises an error if one cannot be decoded. One node could so use up the server's memory, or delay the other nodes.
"""

from collections.abc import Iterator, Mapping

import httpx
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectUnavailableError,
    inflate_object_from_contents,
)
from flwr.superlink.grid import HttpGrid

from fedrema.deploy.flower_packing import unpacked
from fedrema.errors import BadInput

LARGEST_OTHER = 1_000_000
"""Bytes of a reply besides its tensors: names, types and shapes, scores, or statistics."""
MOST_PARTS = 2000
"""Parts of a reply, besides one for each MB; each is a request to the SuperLink."""
PARTS_AT_ONCE = 50
"""Parts of one reply that are fetched before those of another."""
LONGEST_REASON = 200


class AnnouncedReply:
    """A reply whose parts are arriving."""

    def __init__(self, grid: HttpGrid, identity: str, tree: ObjectTree, most_bytes: int) -> None:
        self.grid, self.identity, self.most_bytes = grid, identity, most_bytes
        self.missing = list(dict.fromkeys(each.object_id for each in iterate_object_tree(tree)))
        self.contents: dict[str, bytes] = {}
        self.bytes = 0
        self.most_parts = MOST_PARTS + most_bytes // 1_000_000

    def fetch(self) -> bool:
        """Fetch parts that have arrived; return whether all have. Refuses a reply that is too large."""
        grid = self.grid
        if len(self.missing) > self.most_parts:
            raise BadInput(f"it has more than {self.most_parts} parts")
        pull = make_pull_object_fn_protobuf(grid._runtime_client.PullObject, grid.node, grid.run.run_id)
        for part in self.missing[:PARTS_AT_ONCE]:
            try:
                self.contents[part] = pull(part)
            except (ObjectUnavailableError, ObjectPullError):
                break
            self.missing.remove(part)
            self.bytes += len(self.contents[part])
            if self.bytes > self.most_bytes:
                self.contents = {}
                raise BadInput(f"it has more than {self.most_bytes} bytes")
        return not self.missing

    def assembled(self) -> Message:
        """Return the reply, once all of its parts are there."""
        reply = inflate_object_from_contents(self.identity, self.contents)
        if not isinstance(reply, Message):
            raise BadInput("it is not a message")
        vars(reply.metadata)["_message_id"] = self.identity
        if reply.has_content():
            reply.content = unpacked(reply.content)
        return reply

    def discard(self) -> None:
        """Let the SuperLink delete what it has of this reply."""
        self.grid._runtime_client.ConfirmMessageReceived(
            ConfirmMessageReceivedRequest(
                node=self.grid.node, run_id=self.grid.run.run_id, message_object_id=self.identity
            )
        )


class NetworkReplies:
    """The replies to some requests, each with at most `tensor_bytes` of tensors."""

    def __init__(self, grid: HttpGrid, tensor_bytes: int) -> None:
        self.grid, self.most_bytes = grid, tensor_bytes + LARGEST_OTHER
        self.announced: dict[str, AnnouncedReply] = {}
        """By the identity of the request."""

    @property
    def bytes(self) -> int:
        """How much has been fetched."""
        return sum(each.bytes for each in self.announced.values())

    def arrived(self, waiting: Mapping[str, Message]) -> Iterator[tuple[str, Message]]:
        """Yield the replies that are complete, with the identities of their requests; never waits for a node."""
        if asked := [identity for identity in waiting if identity not in self.announced]:
            answer = self.grid._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=asked))
            for found, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
                if (identity := found.metadata.reply_to_message_id) in waiting:
                    self.announced[identity] = AnnouncedReply(
                        self.grid, found.metadata.message_id, tree, self.most_bytes
                    )
        for identity in [identity for identity in waiting if identity in self.announced]:
            try:
                if not self.announced[identity].fetch():
                    continue
                reply = self.announced[identity].assembled()
            except httpx.HTTPError:
                raise
            except Exception as error:  # decoding what a node sent can fail in any way
                reply = unreadable(waiting[identity], error)
            self.announced[identity].discard()
            yield identity, reply


def unreadable(request: Message, error: Exception) -> Message:
    """Return an error message in place of a reply that cannot be decoded."""
    reason = f"its reply cannot be decoded: {error}"[:LONGEST_REASON]
    return Message(Error(ErrorCode.UNKNOWN, reason), reply_to=request)
