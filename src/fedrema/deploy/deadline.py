"""Calls to Flower's Grid with a deadline: Flower itself retries for ever while its SuperLink is gone."""

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
SECONDS_BETWEEN_PULLS = 1.0
LONGEST_REASON = 200
Result = TypeVar("Result")


class NoAnswer(Exception):
    """The SuperLink did not answer in time."""


def nodes_within(grid: Grid, seconds: float) -> list[NodeInfo]:
    """Return the connected nodes; raises NoAnswer when the SuperLink does not answer in time."""
    try:
        return list(_within(grid.get_nodes, seconds))
    except httpx.HTTPError as error:  # what Flower does not retry
        raise NoAnswer from error


def exchange_within(grid: Grid, messages: Sequence[Message], seconds: float) -> list[Message]:
    """Send messages and return the replies that arrive in time, also when the SuperLink is lost on the way."""
    replies: queue.SimpleQueue[Message] = queue.SimpleQueue()
    over = threading.Event()

    def exchange() -> None:
        pushed = zip(grid.push_messages(messages), messages, strict=True)
        waiting, told = {identity: message for identity, message in pushed if identity}, False
        while waiting and not over.is_set():
            # One by one: Flower decodes what it pulls, and a reply that cannot be decoded must not take others with it.
            for identity, message in list(waiting.items()):
                try:
                    arrived = list(grid.pull_messages([identity]))
                except httpx.HTTPError as error:  # what Flower does not retry
                    if not told:
                        log.warning("replies cannot be fetched: %r", error)
                    told = True
                    break
                except Exception as error:  # Flower decodes what a node sent, which can fail in any way
                    arrived = [_unreadable(message, error)]
                if arrived:
                    del waiting[identity]
                for reply in arrived:
                    replies.put(reply)
            if waiting:
                over.wait(SECONDS_BETWEEN_PULLS)

    try:
        _within(exchange, seconds)
    except NoAnswer:  # a node that has not replied by now is missing
        pass
    except httpx.HTTPError as error:
        log.warning("messages cannot be sent: %r", error)
    finally:
        over.set()
    return [replies.get() for _ in range(replies.qsize())]


def _unreadable(message: Message, error: Exception) -> Message:
    """Return what stands for a reply that Flower could not decode."""
    reason = f"its reply cannot be decoded: {type(error).__name__}: {error}"[:LONGEST_REASON]
    return Message(Error(ErrorCode.UNKNOWN, reason), reply_to=message)


def _within(call: Callable[[], Result], seconds: float) -> Result:
    """Return a call's result, or raise what it raises; after the deadline it is left to a thread of its own."""
    done: queue.SimpleQueue[tuple[Result | None, BaseException | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            done.put((call(), None))
        except BaseException as error:
            done.put((None, error))

    end = time.monotonic() + seconds
    # A daemon: a call that never returns must not keep the process from ending.
    threading.Thread(target=work, daemon=True, name="fedrema-grid").start()
    try:
        result, error = done.get(timeout=max(0.0, end - time.monotonic()))
    except queue.Empty:
        raise NoAnswer from None
    if error is not None:
        raise error
    return cast(Result, result)
