"""The server's answer to `fedrema deploy check` on a node: whether it would admit the node, and what it expects.

A node signs the time with its key. The answer says whether the key is registered and in use; with a registered key, it
also contains the versions and the run configuration, which the node would receive with its first request anyway. The
node does not join, and nothing is changed.
"""

import asyncio
import base64
import binascii
import json
import platform
from collections.abc import Awaitable, Callable, MutableMapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import fedrema
from fedrema.deploy.tls import is_signed_by

PATH = "/v1/fedrema/check"
PURPOSE = b"fedrema check "
"""What is signed begins with this, so that the signature is valid for nothing else."""
KEY, TIME, SIGNATURE = "fedrema-key", "fedrema-time", "fedrema-signature"
"""Headers of the request."""
LARGEST_AGE, LARGEST_LEAD = 300.0, 5.0
"""How many seconds the time of a message may be behind and ahead of the server's: those of Flower."""
Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def versions() -> dict[str, str]:
    """Return the versions that have to fit together on all machines."""
    found = {"fedrema": fedrema.__version__, "python": platform.python_version()}
    for name in ("flwr", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


async def answer_check(scope: Scope, send: Send, state: Any, folder: Path) -> None:
    """Answer a check; `state` is that of Flower's app, `folder` is the server's."""
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    status, content = await asyncio.to_thread(_answer, headers, state, folder)
    content |= {"time": datetime.now(UTC).isoformat()}
    body = json.dumps(content).encode()
    kind = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": kind})
    await send({"type": "http.response.body", "body": body})


def _answer(headers: dict[str, str], state: Any, folder: Path) -> tuple[int, dict[str, object]]:
    try:
        key = base64.b64decode(headers[KEY], validate=True)
        signed = base64.b64decode(headers[SIGNATURE], validate=True)
        age = (datetime.now(UTC) - datetime.fromisoformat(headers[TIME])).total_seconds()
    except (KeyError, ValueError, TypeError, binascii.Error):
        return 400, {"reason": "request"}
    if not is_signed_by(key, PURPOSE + headers[TIME].encode(), signed):
        return 401, {"reason": "signature"}
    if not -LARGEST_LEAD < age < LARGEST_AGE + LARGEST_LEAD:
        return 401, {"reason": "clock"}
    links = state.linkstate_factory.state()
    number = links.get_node_id_by_public_key(key)
    found = [] if number is None else links.get_node_info(node_ids=[number])
    if not found:
        return 403, {"reason": "key"}
    return 200, {"name": found[0].name, "state": found[0].status, "versions": versions(), "config": _config(folder)}


def _config(folder: Path) -> dict[str, object]:
    from fedrema.deploy.folder import ServerFolder
    from fedrema.errors import BadInput

    try:
        return dict(ServerFolder.open(folder).run_config())
    except BadInput:  # the operator is editing it
        return {}
