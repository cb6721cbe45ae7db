"""`fedrema watch`: serves the page over HTTP while runs train. It only reads, and serves no files."""

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
from starlette.routing import BaseRoute, Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedrema.base.tls_server import RenewableServer
from fedrema.errors import BadInput
from fedrema.page.live_runs import LiveRuns
from fedrema.page.render import as_text, page

Gone = Callable[[], Awaitable[bool]]
"""Whether nobody listens to a stream of events any more."""
SECONDS_BETWEEN_EVENTS = 0.5
SECONDS_FOR_HEADERS = 10.0
"""Within which a connection must have sent the headers of its first request."""
MOST_CONNECTIONS = 500
"""Open connections above which new ones are closed at once; the limit of open files is often 1,024."""
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
    """Return the application that shows the runs in a folder to requests for one of the hosts."""
    return application(run_routes(LiveRuns(folder)), hosts)


def application(routes: Sequence[BaseRoute], hosts: Sequence[str], middleware: Sequence[Middleware] = ()) -> Starlette:
    """Return an application that answers requests for one of the hosts.

    Requests for other host names are refused, which prevents DNS rebinding.
    """
    trusted = Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
    return Starlette(routes=routes, middleware=[trusted, *middleware])


def run_routes(live: LiveRuns) -> list[BaseRoute]:
    """Return the addresses of the page about runs."""
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
        return event_stream(request, lambda gone: _events(live, gone))

    return [Route("/", first), Route("/parts/{name}", part), Route("/events", events)]


def event_stream(request: Request, stream: Callable[[Gone], AsyncIterator[str]]) -> Response:
    """Return a response with the events of a stream, which ends when the browser or the server does."""

    async def gone() -> bool:
        ending: Callable[[], bool] = getattr(request.app.state, "ending", bool)
        return ending() or await request.is_disconnected()

    return StreamingResponse(stream(gone), media_type="text/event-stream", headers=HEADERS)


def _events(live: LiveRuns, gone: Gone) -> AsyncIterator[str]:
    """Yield the versions of the parts and the status of the runs whenever they change."""

    def now() -> object:
        live.refresh()
        return {"versions": live.versions, "status": live.status()}

    return changes(now, gone)


async def changes(read: Callable[[], object], gone: Gone) -> AsyncIterator[str]:
    """Yield what `read` returns, as events, whenever it has changed."""
    sent = ""
    while not await gone():
        now = json.dumps(await run_in_threadpool(read))
        # The comment keeps the connection alive, and shows when the browser has closed it.
        yield f"data: {now}\n\n" if now != sent else ": no change\n\n"
        sent = now
        await asyncio.sleep(SECONDS_BETWEEN_EVENTS)


def serve(
    app: Starlette, host: str, port: int, ready: Callable[[str], None], certificate: tuple[Path, Path] | None = None
) -> None:
    """Serve until interrupted; `ready` is called with the address.

    With a certificate and its key, connections use TLS; renewed files are used without a restart.
    """
    listener = _listener(host, port)
    port = listener.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    limits: dict[str, Any] = {"timeout_graceful_shutdown": 5, "lifespan": "off", "ws": "none", "server_header": False}
    limits |= {"http": _PunctualProtocol}
    if certificate is None:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", **limits))
    else:
        limits |= {"ssl_certfile": certificate[0], "ssl_keyfile": certificate[1]}
        server = RenewableServer(uvicorn.Config(app, log_level="warning", **limits))
    app.state.ending = lambda: server.should_exit
    ready(f"{'http' if certificate is None else 'https'}://{shown}:{port}/")
    with contextlib.suppress(KeyboardInterrupt):  # the usual end
        server.run(sockets=[listener])


class _PunctualProtocol(H11Protocol):
    """An HTTP connection that is closed if a request does not arrive in time, or if there are too many connections."""

    deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.abort()
        self._wait_for_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
        super().connection_lost(exc)

    def _wait_for_request(self) -> None:
        if self.deadline is None and self._has_no_request():
            self.deadline = self.loop.call_later(SECONDS_FOR_HEADERS, self._close_if_late)

    def _close_if_late(self) -> None:
        self.deadline = None
        if self._has_no_request():
            self.transport.abort()

    def _has_no_request(self) -> bool:
        return self.cycle is None or self.cycle.response_complete


def is_local(host: str) -> bool:
    """Whether an address can be reached from this machine only."""
    return host in (*LOOPBACK, "::1")


def host_names(host: str) -> tuple[str, ...]:
    """Return the host names that are valid in requests to a server that listens on an address."""
    if is_local(host):
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
