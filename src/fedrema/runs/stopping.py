"""Ctrl-C and SIGTERM: finish the round, save, say how to go on."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether someone has asked to stop."""

    asked = False


@contextmanager
def stopping_gently() -> Iterator[StopRequest]:
    """Turn the first Ctrl-C or SIGTERM into a request; a second one interrupts at once.

    Only the main thread can listen to signals; elsewhere nothing changes.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if request.asked:
            raise KeyboardInterrupt
        request.asked = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
