"""Flower's SuperLink, with a gate: from other machines only what a node needs can be reached.

Flower serves three interfaces at one port, and the one that starts runs and registers keys asks nobody who they are:
whoever reached it could register a key of their own, or run code of theirs on every node. Here it listens at two
ports: at the open one only the nodes' interface is answered, which knows each node by its key; the rest is at a port
of the loopback interface. `python -m fedrema.deploy.superlink HOST PORT -- FLOWER'S OWN ARGUMENTS`
"""

import os
import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import uvicorn
from flwr.supercore.app_utils import start_parent_process_monitor
from flwr.supercore.http_logging import get_uvicorn_log_config
from flwr.supercore.logger import console_handler
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
from flwr.superlink.main import create_app

NODES_INTERFACE = "/v1/fleet/"
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def gated(app: App, control_port: int) -> App:
    """Answer at any port but the control port what is for nodes, and nothing else."""

    async def gate(scope: Scope, receive: Receive, send: Send) -> None:
        inside = scope["type"] == "lifespan" or scope["server"][1] == control_port
        if inside or (scope["type"] == "http" and scope["path"].startswith(NODES_INTERFACE)):
            await app(scope, receive, send)
        else:
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    return gate


def main() -> None:
    """Serve until told to stop, or until the process that started this one is gone."""
    own, flowers = sys.argv[1:3], sys.argv[4:]
    sys.argv[1:] = flowers
    start_parent_process_monitor(os.getppid())
    config = _parse_superlink_lifespan_config()
    app = create_app(config, SuperLinkLifespan)
    server = uvicorn.Server(
        uvicorn.Config(
            gated(app, config.port),
            log_config=get_uvicorn_log_config(console_handler.level),
            access_log=False,
            ssl_keyfile=config.ssl_keyfile,
            ssl_certfile=config.ssl_certfile,
            timeout_graceful_shutdown=2,
        )
    )
    server.run(sockets=[_listening(own[0], int(own[1])), _listening(config.host, config.port)])


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listening.bind((host, port))
    return listening


if __name__ == "__main__":
    main()
