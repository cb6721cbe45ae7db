"""Ctrl-C and SIGTERM: finish the round, save, say how to go on."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether someone has asked to stop."""

    asked = False


_listening: list[StopRequest] = []
"""The request that signals now go to, if any."""


@contextmanager
def stopping_gently() -> Iterator[StopRequest]:
    """Turn the first Ctrl-C or SIGTERM into a request; a second one interrupts at once.

    Only the main thread can listen to signals; elsewhere nothing changes. Inside another such block the request is
    that one's: who asks a series of runs to stop while the next is being prepared asks that run too.
    """
    if threading.current_thread() is not threading.main_thread():
        yield StopRequest()
        return
    if _listening:
        yield _listening[0]
        return
    request = StopRequest()

    def ask(number: int, frame: FrameType | None) -> None:
        if request.asked:
            raise KeyboardInterrupt
        request.asked = True

    _listening.append(request)
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _listening.remove(request)
