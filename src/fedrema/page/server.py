"""`fedrema watch`: the page over HTTP while runs go on. It only reads, and hands out no files."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from fedrema.errors import BadInput
from fedrema.page.live_runs import Followed
from fedrema.page.render import as_text, page

SECONDS_BETWEEN_LOOKS = 0.5
LOOPBACK = ("127.0.0.1", "localhost", "[")
"""Starlette cuts [::1] off at its first colon; no name in the DNS begins with a bracket."""
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def watching_app(folder: Path, hosts: Sequence[str] = LOOPBACK) -> Starlette:
    """Return the application that shows a folder's runs to requests that name one of the hosts.

    A page elsewhere that lets its name point to this machine (DNS rebinding) names another host, and is refused.
    """
    followed = Followed(folder)
    # A huge run takes a moment to read: it has been read when the browser asks.
    threading.Thread(target=followed.look, daemon=True).start()

    async def first(request: Request) -> Response:
        await run_in_threadpool(followed.look)
        return HTMLResponse(await run_in_threadpool(page, {"main": followed.part("main")}), headers=HEADERS)

    async def part(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in followed.PARTS:
            return PlainTextResponse("There is no such part.", status_code=404, headers=HEADERS)
        await run_in_threadpool(followed.look)
        text = await run_in_threadpool(lambda: as_text(followed.part(name)))
        return Response(text, media_type="application/json", headers=HEADERS)

    async def events(request: Request) -> Response:
        async def gone() -> bool:
            ending: Callable[[], bool] = getattr(request.app.state, "ending", bool)
            return ending() or await request.is_disconnected()

        return StreamingResponse(_events(followed, gone), media_type="text/event-stream", headers=HEADERS)

    return Starlette(
        routes=[Route("/", first), Route("/parts/{name}", part), Route("/events", events)],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)],
    )


async def _events(followed: Followed, gone: Callable[[], Awaitable[bool]]) -> AsyncIterator[str]:
    """Yield what has changed, as soon as it has; now and then how the runs are doing."""
    told: Any = None
    while not await gone():
        await run_in_threadpool(followed.look)
        now = {"versions": followed.versions, "status": await run_in_threadpool(followed.status)}
        if now != told:
            told = json.loads(json.dumps(now))
            yield f"data: {json.dumps(now)}\n\n"
        else:
            yield ": nothing new\n\n"
        await asyncio.sleep(SECONDS_BETWEEN_LOOKS)


def serve(folder: Path, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve until interrupted; `ready` is called with the address."""
    listener = _listener(host, port)
    port = listener.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    app = watching_app(folder, names_of(host))
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    app.state.ending = lambda: server.should_exit
    ready(f"http://{shown}:{port}/")
    with contextlib.suppress(KeyboardInterrupt):  # the ordinary end
        server.run(sockets=[listener])


def names_of(host: str) -> tuple[str, ...]:
    """Return how a machine that listens on an address may be called by those who ask."""
    if host in (*LOOPBACK, "::1"):
        return LOOPBACK
    addresses = [
        one.address for found in psutil.net_if_addrs().values() for one in found if one.family == socket.AF_INET
    ]
    return (*LOOPBACK, host, socket.gethostname(), socket.getfqdn(), *addresses)


def _listener(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()  # who asks before the server is up waits, and is not turned away
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        raise BadInput(f"--host {host} --port {port} cannot be used: {reason}; --port 0 takes any free one.") from error
    return listener
