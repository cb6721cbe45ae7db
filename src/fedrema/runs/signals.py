"""Ctrl-C and SIGTERM: finish the round, save a checkpoint, and print how to resume."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Records whether a stop was requested."""

    made = False


_listening: list[StopRequest] = []
"""The request that currently receives signals, if any."""


@contextmanager
def graceful_stop() -> Iterator[StopRequest]:
    """Turn the first Ctrl-C or SIGTERM into a request; a second one interrupts at once.

    Only the main thread can receive signals; in other threads nothing changes. Inside another such block the request
    is that of the outer block, so that a stop requested between two runs of a series also stops the next run.
    """
    if threading.current_thread() is not threading.main_thread():
        yield StopRequest()
        return
    if _listening:
        yield _listening[0]
        return
    request = StopRequest()

    def request_stop(number: int, frame: FrameType | None) -> None:
        if request.made:
            raise KeyboardInterrupt
        request.made = True

    _listening.append(request)
    before = {number: signal.signal(number, request_stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _listening.remove(request)
