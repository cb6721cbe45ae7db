"""The server's port for nodes on the loopback interface, with real TLS, but without Flower's SuperLink."""

import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import uvicorn

from fedrema.base.processes import free_port
from fedrema.deploy.flower_superlink import restricted
from fedrema.deploy.tls import read_public_key


class Links:
    """The nodes that the SuperLink knows: their states by public key."""

    def __init__(self, keys, states=None):
        self.names = {read_public_key(file): file.stem for file in sorted(keys.glob("*.pub"))}
        self.states = states or {}

    def state(self):
        return self

    def get_node_id_by_public_key(self, key):
        return list(self.names).index(key) if key in self.names else None

    def get_node_info(self, node_ids):
        name = list(self.names.values())[node_ids[0]]
        return [SimpleNamespace(name=name, status=self.states.get(name, "registered"))]


@contextmanager
def serving(server, states=None, certificate=None, check=True):
    """Serve the interface for nodes of a server's folder; yield its address."""

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    app.state = SimpleNamespace(linkstate_factory=Links(server / "keys", states))
    port, folder = free_port(), certificate or server
    config = uvicorn.Config(
        restricted(app, 0, server if check else None),
        host="127.0.0.1",
        port=port,
        lifespan="off",
        ws="none",
        log_level="critical",
        ssl_certfile=folder / "server.crt",
        ssl_keyfile=folder / "server.key",
    )
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started and thread.is_alive():
        time.sleep(0.01)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        running.should_exit = True
        thread.join(10)
