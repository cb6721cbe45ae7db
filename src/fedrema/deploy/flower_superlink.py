"""Flower's SuperLink with restricted access: other machines reach only the interface for nodes.

Flower serves three interfaces on one port, and the one that starts runs and registers keys has no authentication:
anyone who can reach it could register a key, or run code on every node. Here the SuperLink listens on two ports. The
public port serves only the interface for nodes, which authenticates each node by its key; a port of the loopback
interface serves the others. Usage: `python -m fedrema.deploy.flower_superlink HOST PORT -- ARGUMENTS OF FLOWER`
"""

import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import uvicorn
from flwr.supercore.http_logging import get_uvicorn_log_config
from flwr.supercore.logger import console_handler
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
from flwr.superlink.main import create_app

from fedrema.base.processes import exit_with_parent
from fedrema.deploy.check_endpoint import PATH, answer_check

NODE_INTERFACE = "/v1/fleet/"
"""The paths of Flower's interface for nodes (the Fleet API) begin with this."""
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def restricted(app: App, control_port: int, folder: Path | None = None) -> App:
    """Return an app that serves only the interface for nodes on every port except the control port.

    With the server's `folder`, it also answers the checks of nodes.
    """

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if folder is not None and scope["type"] == "http" and scope["path"] == PATH:
            await answer_check(scope, send, getattr(app, "state", None), folder)
            return
        trusted = scope["type"] == "lifespan" or scope["server"][1] == control_port
        if trusted or (scope["type"] == "http" and scope["path"].startswith(NODE_INTERFACE)):
            await app(scope, receive, send)
        else:
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    return serve


def main() -> None:
    """Serve until stopped, or until the parent process has exited."""
    (host, port), flower_arguments = sys.argv[1:3], sys.argv[4:]
    sys.argv[1:] = flower_arguments
    exit_with_parent()
    config = _parse_superlink_lifespan_config()
    app = create_app(config, SuperLinkLifespan)
    server = uvicorn.Server(
        uvicorn.Config(
            restricted(app, config.port, Path(str(config.ssl_certfile)).parent),
            log_config=get_uvicorn_log_config(console_handler.level),
            access_log=False,
            ssl_keyfile=config.ssl_keyfile,
            ssl_certfile=config.ssl_certfile,
            timeout_graceful_shutdown=2,
        )
    )
    server.run(sockets=[_listening_socket(host, int(port)), _listening_socket(config.host, config.port)])


def _listening_socket(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((host, port))
    return listening


if __name__ == "__main__":
    main()
