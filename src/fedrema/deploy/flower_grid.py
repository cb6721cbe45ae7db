"""Calls of Flower's Grid with a deadline: Flower itself retries forever while its SuperLink does not respond."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import httpx
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from fedrema.base.terminal import safe_logger

log = safe_logger("fedrema")
SECONDS_BETWEEN_PULLS = 0.5
"""Minimum number of seconds between two questions for replies."""
LARGEST_SHARE = 0.25
"""Largest part of the time that is spent on asking."""
LONGEST_REASON = 200
Result = TypeVar("Result")


class NoResponse(Exception):
    """The SuperLink did not respond in time."""


def list_nodes(grid: Grid, seconds: float) -> list[NodeInfo]:
    """Return the connected nodes; raises `NoResponse` if the SuperLink does not respond in time."""
    try:
        return list(_within(grid.get_nodes, seconds))
    except httpx.HTTPError as error:  # an error that Flower does not retry
        raise NoResponse from error


def exchange(grid: Grid, messages: Sequence[Message], seconds: float) -> list[Message]:
    """Send messages and return the replies that arrive in time, even if the SuperLink stops responding meanwhile."""
    replies: queue.SimpleQueue[Message] = queue.SimpleQueue()
    done = threading.Event()

    def send_and_pull() -> None:
        pushed = zip(grid.push_messages(messages), messages, strict=True)
        waiting, reported = {identity: message for identity, message in pushed if identity}, False
        while waiting and not done.is_set():
            start = time.monotonic()
            # One by one: Flower decodes what it pulls, and a reply that cannot be decoded must not affect the others.
            for identity, message in list(waiting.items()):
                try:
                    arrived = list(grid.pull_messages([identity]))
                except httpx.HTTPError as error:  # an error that Flower does not retry
                    if not reported:
                        log.warning("the server cannot fetch replies from Flower's SuperLink: %r", error)
                    reported = True
                    break
                except Exception as error:  # decoding what a node sent can fail in any way
                    arrived = [_unreadable(message, error)]
                if arrived:
                    del waiting[identity]
                for reply in arrived:
                    replies.put(reply)
            if waiting:
                done.wait(max(SECONDS_BETWEEN_PULLS, (time.monotonic() - start) * (1 / LARGEST_SHARE - 1)))

    try:
        _within(send_and_pull, seconds)
    except NoResponse:  # the time is over; the replies so far are returned
        pass
    except httpx.HTTPError as error:
        log.warning("the server cannot send messages to Flower's SuperLink: %r", error)
    finally:
        done.set()
    return [replies.get() for _ in range(replies.qsize())]


def _unreadable(message: Message, error: Exception) -> Message:
    """Return an error message in place of a reply that Flower could not decode."""
    reason = f"its reply cannot be decoded: {error}"[:LONGEST_REASON]
    return Message(Error(ErrorCode.UNKNOWN, reason), reply_to=message)


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
