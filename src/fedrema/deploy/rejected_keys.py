"""Keys that the server has rejected, from the log of Flower's SuperLink: for console, `status` and audit log."""

import ast
import json
import re
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from fedrema.base.files import write_text
from fedrema.base.processes import LogTail
from fedrema.deploy.audit import SERVER, AuditLog, Entry, Event
from fedrema.deploy.folder import ServerFolder
from fedrema.deploy.tls import fingerprint

REFUSED = re.compile(r"Attempted to register SuperNode with public key: (b'[^']*'), exception: (.*)")
UNKNOWN, IN_USE = "it is not registered", "it is in use by a connected node"
MOST_KEYS = 50
"""How many keys of no registered node are kept: anyone can connect with a new key each time."""
SECONDS_SHOWN = {UNKNOWN: 3600.0, IN_USE: 120.0}
"""For how long a rejection is shown after its last attempt; a node retries every 30 s."""


@dataclass(frozen=True)
class RejectedKey:
    """A key with which a node could not connect."""

    fingerprint: str
    name: str
    """The node that the key is registered for; empty if it is not registered."""
    reason: str
    attempts: int
    last: str
    """Time of the last attempt, in UTC."""


class RejectedKeys:
    """Follows the SuperLink's log; keeps the rejected keys in state/rejected-keys.json."""

    def __init__(self, folder: ServerFolder) -> None:
        self.folder, self.tail = folder, LogTail(folder.state / "superlink.log")
        self.audit = AuditLog(folder.path, SERVER)
        self.found: dict[str, RejectedKey] = {}

    def news(self) -> list[str]:
        """Return a sentence for each key that was rejected for the first time, or for another reason."""
        sentences: list[str] = []
        changed = False
        for line in self.tail.lines():
            key, reason = rejected_key(line)
            if not key:
                continue
            name = registered_names(self.folder).get(key, "")
            before = self.found.get(key)
            # Registered keys are few and always kept: strangers' keys must not hide a node's.
            strangers = sum(not each.name for each in self.found.values())
            if before is None and not name and strangers >= MOST_KEYS:
                continue
            now = datetime.now(UTC).isoformat(timespec="seconds")
            self.found[key] = RejectedKey(key, name, reason, 1 + (before.attempts if before else 0), now)
            changed = True
            if before is None or before.reason != reason:
                whose = f"of node {name} " if name else ""
                sentences.append(f"rejected the key {whose}{key}: {reason}")
                self.audit.append(Entry(Event.KEY_REJECTED, name, key, decision=reason))
        if changed:
            content = [asdict(each) for each in self.found.values()]
            write_text(self.folder.state / "rejected-keys.json", json.dumps(content, indent=1) + "\n", durable=False)
        return sentences


def rejected_key(line: str) -> tuple[str, str]:
    """Return the fingerprint of a key that a line of the SuperLink's log rejects, and why; empty for other lines."""
    if not (found := REFUSED.search(line)):
        return "", ""
    try:
        key = ast.literal_eval(found[1])
    except (ValueError, SyntaxError):
        return "", ""
    return fingerprint(key), UNKNOWN if "No SuperNode found" in found[2] else IN_USE


def registered_names(folder: ServerFolder) -> dict[str, str]:
    """Return the names of the nodes by the fingerprints of their registered keys."""
    return {fingerprint(file.read_bytes()): file.stem for file in sorted(folder.keys.glob("*.pub"))}


def current_rejections(folder: ServerFolder) -> tuple[RejectedKey, ...]:
    """Return the rejected keys that are still a problem.

    A key that was registered since then is none any more, and neither is a second connection that no longer retries.
    """
    try:
        content = json.loads((folder.state / "rejected-keys.json").read_text(encoding="utf-8"))
        found = [RejectedKey(**each) for each in content]
        ages = [(datetime.now(UTC) - datetime.fromisoformat(each.last)).total_seconds() for each in found]
    except (OSError, ValueError, TypeError):
        return ()
    names = registered_names(folder)
    return tuple(
        each
        for each, age in zip(found, ages, strict=True)
        if age < SECONDS_SHOWN.get(each.reason, 0.0) and (each.reason != UNKNOWN or each.fingerprint not in names)
    )
