"""Incomplete requests do not block the page of fedrema watch."""

import contextlib
import socket
import threading
import time
import urllib.request

import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from fedrema.page.server import LOOPBACK, application, serve

INCOMPLETE = 40


async def answer(request):
    return PlainTextResponse("here")


@pytest.fixture
def address(monkeypatch):
    monkeypatch.setattr("fedrema.page.server.SECONDS_FOR_HEADERS", 1.0, raising=False)
    monkeypatch.setattr("fedrema.page.server.MOST_CONNECTIONS", INCOMPLETE // 2, raising=False)
    addresses = []
    app = application([Route("/", answer)], LOOPBACK)
    threading.Thread(target=serve, args=(app, "127.0.0.1", 0, addresses.append), daemon=True).start()
    while not addresses:
        time.sleep(0.01)
    return addresses[0]


def test_incomplete_requests_are_closed_and_the_page_answers(address):
    port = int(address.rstrip("/").rpartition(":")[2])
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(INCOMPLETE):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            with contextlib.suppress(OSError):  # closed at once: there are too many
                connection.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")
            opened.append(connection)
        began = time.monotonic()
        for connection in opened:
            with contextlib.suppress(ConnectionError):
                assert connection.recv(1) == b""
        assert time.monotonic() - began < 8
        assert urllib.request.urlopen(address, timeout=5).read() == b"here"
