"""Flower's SuperLink with restricted access: other machines reach only the interface for nodes.

Flower serves three interfaces on one port, and the one that starts runs and registers keys has no authentication:
anyone who can reach it could register a key, or run code on every node. Here the SuperLink listens on two ports. The
public port serves only the interface for nodes, which authenticates each node by its key; a port of the loopback
interface serves the others. Usage: `python -m fedrema.deploy.flower_superlink HOST PORT -- ARGUMENTS OF FLOWER`
"""

import copy
import gc
import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from flwr.supercore.http_logging import get_uvicorn_log_config
from flwr.supercore.logger import console_handler
from flwr.supercore.routers.runtime.tracing import RuntimeTracingMiddleware
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
from flwr.superlink.main import create_app
from flwr.superlink.routers.control.middlewares import (
    ControlAuthenticationMiddleware,
    ControlEventLogMiddleware,
    ControlLicenseMiddleware,
    ControlSensitiveResponseMiddleware,
)
from flwr.superlink.routers.fleet.middlewares import FleetEventLogMiddleware

from fedrema.base.processes import exit_with_parent
from fedrema.base.tls_server import RenewableServer
from fedrema.deploy.check_endpoint import PATH, answer_check
from fedrema.deploy.flower_database import limit_memory, shorten_transactions

NODE_INTERFACE = "/v1/fleet/"
"""The paths of Flower's interface for nodes (the Fleet API) begin with this."""
APP_INTERFACE = "/v1/runtime/"
"""The paths of the interface for the server's app begin with this."""
FOR_CONTROL: tuple[object, ...] = (
    ControlAuthenticationMiddleware,
    ControlEventLogMiddleware,
    ControlLicenseMiddleware,
    ControlSensitiveResponseMiddleware,
    FleetEventLogMiddleware,
    RuntimeTracingMiddleware,
)
"""Layers of Flower's app that pass on every message unchanged: they are for operators, logs and tracing."""
LARGEST_BODY = 16_000_000
"""Largest request of a node, in bytes; Flower sends tensors in parts of 5 MB."""
MOST_GARBAGE = 20_000_000
"""Bytes of messages after which unused objects are deleted."""
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def restricted(app: App, control_port: int, folder: Path | None = None, messages: App | None = None) -> App:
    """Return an app that serves only the interface for nodes on every port except the control port.

    With the server's `folder`, it also answers the checks of nodes. `messages` serves the interfaces of nodes and of
    the server's app, through which messages are exchanged; None: `app` does.
    """
    messages = messages or app

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if folder is not None and scope["type"] == "http" and scope["path"] == PATH:
            await answer_check(scope, send, getattr(app, "state", None), folder)
            return
        trusted = scope["type"] == "lifespan" or scope["server"][1] == control_port
        if trusted:
            is_message = scope["type"] == "http" and scope["path"].startswith(APP_INTERFACE)
            await (messages if is_message else app)(scope, receive, send)
        elif scope["type"] != "http" or not scope["path"].startswith(NODE_INTERFACE):
            await _refuse(send, 404)
        elif (body := await _received_body(receive)) is None:
            await _refuse(send, 413)
        else:
            await messages(scope, _replayed(body, receive), send)

    return serve


async def _refuse(send: Send, status: int) -> None:
    # The connection is closed, so that the rest of the request is not read.
    await send({"type": "http.response.start", "status": status, "headers": [(b"connection", b"close")]})
    await send({"type": "http.response.body", "body": b""})


async def _received_body(receive: Receive) -> bytes | None:
    """Return the body of a request; None if it is too large, whatever its headers say."""
    parts, size, more = [], 0, True
    while more:
        event = await receive()
        if event["type"] != "http.request":  # the node has closed the connection
            break
        parts.append(event.get("body", b""))
        size, more = size + len(parts[-1]), event.get("more_body", False)
        if size > LARGEST_BODY:
            return None
    return b"".join(parts)


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return a function that returns the body as one event, and then what is received."""
    events = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_event() -> MutableMapping[str, Any]:
        return events.pop() if events else await receive()

    return next_event


def without_layers(app: FastAPI) -> FastAPI:
    """Return the app without the layers that do nothing for messages: each costs more than answering a message."""
    lean = copy.copy(app)
    lean.user_middleware = [layer for layer in app.user_middleware if layer.cls not in FOR_CONTROL]
    lean.middleware_stack = None  # is built at the first request
    return lean


def bounded(app: App) -> App:
    """Return the app, with a bound on the memory of the messages that it has already answered.

    They are in reference cycles, which Python deletes by the number of objects and not by their size: parts of 5 MB
    would accumulate to hundreds of MB.
    """
    transferred = 0

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal transferred

        async def counted_receive() -> MutableMapping[str, Any]:
            nonlocal transferred
            event = await receive()
            transferred += len(event.get("body", b""))
            return event

        async def counted_send(event: MutableMapping[str, Any]) -> None:
            nonlocal transferred
            transferred += len(event.get("body", b""))
            await send(event)

        await app(scope, counted_receive, counted_send)
        if transferred > MOST_GARBAGE:
            transferred = 0
            gc.collect()

    return serve


def main() -> None:
    """Serve until stopped, or until the parent process has exited."""
    (host, port), flower_arguments = sys.argv[1:3], sys.argv[4:]
    sys.argv[1:] = flower_arguments
    exit_with_parent()
    shorten_transactions()
    limit_memory()
    config = _parse_superlink_lifespan_config()
    app = create_app(config, SuperLinkLifespan)
    server = RenewableServer(
        uvicorn.Config(
            restricted(app, config.port, Path(str(config.ssl_certfile)).parent, bounded(without_layers(app))),
            log_config=get_uvicorn_log_config(console_handler.level),
            access_log=False,
            ssl_keyfile=config.ssl_keyfile,
            ssl_certfile=config.ssl_certfile,
            timeout_graceful_shutdown=2,
        )
    )
    gc.freeze()  # what exists now is needed until the end, so that looking for unused objects takes milliseconds
    server.run(sockets=[_listening_socket(host, int(port)), _listening_socket(config.host, config.port)])


def _listening_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((host, port))
    return listening


if __name__ == "__main__":
    main()
