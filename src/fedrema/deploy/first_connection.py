"""The first test of a node's connection, before PyTorch is imported: its owner learns within seconds what is wrong."""

import tomllib
from pathlib import Path

from fedrema.base.files import regular_file
from fedrema.deploy.connection import Cause, probe


def first_problem(folder: Path, server: str | None = None) -> str:
    """Return why an approved node cannot connect; empty if it can, or if the folder is not that of an approved node.

    The complete checks of the folder follow when the node starts.
    """
    files = [folder / name for name in ("node.toml", "ca.crt", "node.key", "approved.json")]
    if not all(file.is_file() for file in files):
        return ""
    try:
        content = tomllib.loads(regular_file(files[0]).read_text(encoding="utf-8"))
        address, name = str(server or content["server"]), str(content["name"])
    except (OSError, ValueError, KeyError):
        return ""
    found = probe(address, files[1], files[2], name)
    return "" if found.cause in (Cause.CONNECTED, Cause.OTHER) else f"not connected: {found}"
