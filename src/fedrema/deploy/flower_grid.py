"""Calls of Flower's Grid with a deadline: Flower itself retries forever while its SuperLink does not respond."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar, cast

import httpx
from flwr.app import Message
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.superlink.grid import HttpGrid

from fedrema.base.terminal import safe_logger
from fedrema.deploy.flower_packing import pack
from fedrema.deploy.flower_replies import NetworkReplies, unreadable

log = safe_logger("fedrema")
SECONDS_BETWEEN_PULLS = 0.2
"""Minimum number of seconds between two questions for replies."""
LARGEST_SHARE = 0.25
"""Largest part of the time that is spent on asking."""
Result = TypeVar("Result")


class NoResponse(Exception):
    """The SuperLink did not respond in time."""


def list_nodes(grid: Grid, seconds: float) -> list[NodeInfo]:
    """Return the connected nodes; raises `NoResponse` if the SuperLink does not respond in time."""
    try:
        return list(_within(grid.get_nodes, seconds))
    except httpx.HTTPError as error:  # an error that Flower does not retry
        raise NoResponse from error


def exchange(grid: Grid, messages: Sequence[Message], seconds: float, tensor_bytes: int = 0) -> list[Message]:
    """Send messages and return the replies that arrive in time, even if the SuperLink stops responding meanwhile.

    `tensor_bytes` is the size of the tensors of a reply; a larger reply over the network is replaced by an error.
    """
    replies: queue.SimpleQueue[Message] = queue.SimpleQueue()
    done = threading.Event()

    network = NetworkReplies(grid, tensor_bytes) if isinstance(grid, HttpGrid) else None

    def send_and_pull() -> None:
        if network:
            pack(*messages)
        pushed = zip(grid.push_messages(messages), messages, strict=True)
        waiting, reported = {identity: message for identity, message in pushed if identity}, False
        while waiting and not done.is_set():
            start, before = time.monotonic(), network.bytes if network else 0
            try:
                for identity, reply in network.arrived(waiting) if network else _handed_over(grid, waiting):
                    del waiting[identity]
                    replies.put(reply)
            except httpx.HTTPError as error:  # an error that Flower does not retry
                if not reported:
                    log.warning("the server cannot fetch replies from Flower's SuperLink: %r", error)
                reported = True
            # Fetching takes time as well, but more may be there by now.
            asking = 0.0 if network and network.bytes > before else time.monotonic() - start
            if waiting:
                done.wait(max(SECONDS_BETWEEN_PULLS, asking * (1 / LARGEST_SHARE - 1)))

    try:
        _within(send_and_pull, seconds)
    except NoResponse:  # the time is over; the replies so far are returned
        pass
    except httpx.HTTPError as error:
        log.warning("the server cannot send messages to Flower's SuperLink: %r", error)
    finally:
        done.set()
    return [replies.get() for _ in range(replies.qsize())]


def _handed_over(grid: Grid, waiting: Mapping[str, Message]) -> Iterator[tuple[str, Message]]:
    """Yield the replies that a grid within this process has, with the identities of their requests."""
    # One by one: Flower decodes what it pulls, and a reply that cannot be decoded must not affect the others.
    for identity, request in list(waiting.items()):
        try:
            found = list(grid.pull_messages([identity]))
        except httpx.HTTPError:
            raise
        except Exception as error:  # decoding what a node sent can fail in any way
            found = [unreadable(request, error)]
        yield from ((identity, reply) for reply in found[:1])


def _within(call: Callable[[], Result], seconds: float) -> Result:
    """Return a call's result, or raise its exception; raises `NoResponse` after the deadline.

    The call runs in its own thread, which is abandoned after the deadline.
    """
    results: queue.SimpleQueue[tuple[Result | None, BaseException | None]] = queue.SimpleQueue()

    def run_call() -> None:
        try:
            results.put((call(), None))
        except BaseException as error:
            results.put((None, error))

    end = time.monotonic() + seconds
    # A daemon thread: a call that never returns must not keep the process from exiting.
    threading.Thread(target=run_call, daemon=True, name="fedrema-grid").start()
    try:
        result, error = results.get(timeout=max(0.0, end - time.monotonic()))
    except queue.Empty:
        raise NoResponse from None
    if error is not None:
        raise error
    return cast(Result, result)
