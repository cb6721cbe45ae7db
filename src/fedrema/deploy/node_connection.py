"""A node's connection to the server as its owner sees it: reported on the console, and recorded in the audit log."""

from functools import partial

from fedrema.deploy.audit import AuditLog, Entry, Event
from fedrema.deploy.connection import ConnectionWatch, probe
from fedrema.deploy.folder import NodeFolder
from fedrema.deploy.tls import fingerprint, public_half


class NodeConnection:
    """Watches the connection of the node in a folder; raises `BadInput` if its key is not valid.

    `reported` is the last sentence about the connection that its owner has seen.
    """

    def __init__(self, folder: NodeFolder, reported: str = "") -> None:
        path, self.name, self.server = folder.path, folder.name, folder.config.server
        self.key = fingerprint(public_half(path / "node.key"))
        self.audit = AuditLog(path, folder.name)
        test = partial(probe, self.server, path / "ca.crt", path / "node.key", folder.name)
        self.watch = ConnectionWatch(path / "state" / "supernode.log", test, reported)

    def news(self) -> list[str]:
        """Return sentences about the connection that were not returned before."""
        found = self.watch.news()
        if self.watch.joined:
            self.audit.append(Entry(Event.JOINED, self.name, self.key, decision=f"connected to {self.server}"))
        return found
