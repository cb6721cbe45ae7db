"""A time limit for commands that must not hang."""

import signal
from contextlib import contextmanager

import pytest


@contextmanager
def seconds(limit):
    """Fail instead of hanging, for example when a pipe without a writer is opened."""

    def late(*_):
        pytest.fail(f"still running after {limit} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(limit)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
