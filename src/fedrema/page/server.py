"""`fedrema watch`: serves the page over HTTP while runs train. It only reads, and serves no files."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

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
from fedrema.page.live_runs import LiveRuns
from fedrema.page.render import as_text, page

SECONDS_BETWEEN_EVENTS = 0.5
LOOPBACK = ("127.0.0.1", "localhost", "[")
"""Host names of this machine. Starlette truncates [::1] at its first colon; no DNS name begins with a bracket."""
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def watch_app(folder: Path, hosts: Sequence[str] = LOOPBACK) -> Starlette:
    """Return the application that shows the runs in a folder to requests for one of the hosts.

    Requests for other host names are refused, which prevents DNS rebinding.
    """
    live = LiveRuns(folder)
    # A large run takes a while to read: start before the browser connects.
    threading.Thread(target=live.refresh, daemon=True).start()

    async def first(request: Request) -> Response:
        await run_in_threadpool(live.refresh)
        html = await run_in_threadpool(lambda: page({"main": live.part("main")}))
        return HTMLResponse(html, headers=HEADERS)

    async def part(request: Request) -> Response:
        asked = request.path_params["name"]
        name = next((name for name in live.PARTS if name == asked), None)
        if name is None:
            return PlainTextResponse("There is no such part.", status_code=404, headers=HEADERS)
        await run_in_threadpool(live.refresh)
        text = await run_in_threadpool(lambda: as_text(live.part(name)))
        return Response(text, media_type="application/json", headers=HEADERS)

    async def events(request: Request) -> Response:
        async def gone() -> bool:
            ending: Callable[[], bool] = getattr(request.app.state, "ending", bool)
            return ending() or await request.is_disconnected()

        return StreamingResponse(_events(live, gone), media_type="text/event-stream", headers=HEADERS)

    return Starlette(
        routes=[Route("/", first), Route("/parts/{name}", part), Route("/events", events)],
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)],
    )


async def _events(live: LiveRuns, gone: Callable[[], Awaitable[bool]]) -> AsyncIterator[str]:
    """Yield the versions of the parts and the status of the runs whenever they change."""
    sent = ""
    while not await gone():
        await run_in_threadpool(live.refresh)
        now = json.dumps({"versions": live.versions, "status": await run_in_threadpool(live.status)})
        # The comment keeps the connection alive, and shows when the browser has closed it.
        yield f"data: {now}\n\n" if now != sent else ": no change\n\n"
        sent = now
        await asyncio.sleep(SECONDS_BETWEEN_EVENTS)


def serve(folder: Path, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve until interrupted; `ready` is called with the address."""
    listener = _listener(host, port)
    port = listener.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    app = watch_app(folder, host_names(host))
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=5, lifespan="off", ws="none")
    server = uvicorn.Server(config)
    app.state.ending = lambda: server.should_exit
    ready(f"http://{shown}:{port}/")
    with contextlib.suppress(KeyboardInterrupt):  # the usual end
        server.run(sockets=[listener])


def host_names(host: str) -> tuple[str, ...]:
    """Return the host names that are valid in requests to a server that listens on an address."""
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
        listener.listen()  # connections made before the server has started wait
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        raise BadInput(f"--host {host} --port {port} cannot be used: {reason}; --port 0 selects a free one.") from error
    return listener
