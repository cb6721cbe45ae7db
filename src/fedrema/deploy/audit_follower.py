"""Follows a growing audit log, verifies every new line, and sums up what each site has sent and received."""

from collections import deque
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from fedrema.deploy.audit import HEAD_FILE, LOG_FILE, Event, Head, Line, parsed_line, read_head

LATEST_FAILURES = 5
"""How many failures are kept per site."""
TO_NODE = (Event.REQUEST_SENT, Event.REQUEST_RECEIVED)
FROM_NODE = (
    *(Event.REPLY_SENT, Event.REPLY_RECEIVED, Event.STATISTICS_SENT, Event.STATISTICS_RECEIVED),
    *(Event.SHARES_SENT, Event.SHARES_RECEIVED, Event.MASKED_SENT, Event.MASKED_RECEIVED),
    *(Event.UNMASKING_SENT, Event.UNMASKING_RECEIVED),
)
FAILED = (Event.REPLY_REJECTED, Event.REQUEST_REFUSED)


@dataclass
class SiteTotals:
    """What an audit log says about one site."""

    bytes_down: int = 0
    """Size of all requests to the node."""
    bytes_up: int = 0
    """Size of all replies of the node."""
    failed: int = 0
    """Replies that were rejected or missing, and requests that the node refused."""
    clipped: int = 0
    last_message: float | None = None
    """When the last reply of the node was sent or received, in seconds since 1970."""
    failures: deque[tuple[str, int | None, str]] = field(default_factory=lambda: deque(maxlen=LATEST_FAILURES))
    """Time, round and reason of the latest failures."""

    def add(self, line: Line) -> None:
        """Add a line that concerns the site."""
        entry = line.entry
        if entry.what in TO_NODE:
            self.bytes_down += entry.bytes or 0
        elif entry.what in FROM_NODE:
            self.bytes_up += entry.bytes or 0
            self.last_message = seconds_of(line.time)
        elif entry.what in FAILED:
            self.failed += 1
            self.failures.append((line.time, entry.round, entry.decision))
        elif entry.what is Event.REPLY_CLIPPED:
            self.clipped += 1
            self.failures.append((line.time, entry.round, f"clipped: {entry.decision}"))


class AuditFollower:
    """The audit log in a folder, read as far as it is complete; `latest` are its last lines."""

    def __init__(self, folder: Path, latest: int = 200) -> None:
        self.file, self.head_file = folder / LOG_FILE, folder / HEAD_FILE
        self.latest: deque[Line] = deque(maxlen=latest)
        self._restart()

    def _restart(self) -> None:
        self.position, self.inode, self.end = 0, 0, Head()
        self.sites: dict[str, SiteTotals] = {}
        self.problem = ""
        """The first thing that is wrong with the log; empty if nothing is."""
        self.latest.clear()

    def refresh(self) -> None:
        """Read the lines that were added since the last call; a log that was replaced is read from its beginning."""
        try:
            facts = self.file.stat()
            if facts.st_ino != self.inode or facts.st_size < self.position:
                self._restart()
                self.inode = facts.st_ino
            with self.file.open("rb") as stream:
                stream.seek(self.position)
                complete, newline, _ = stream.read().rpartition(b"\n")
        except OSError:
            complete, newline = b"", b""
        if newline:
            self.position += len(complete) + 1
            for raw in complete.split(b"\n"):
                self._add(raw)
        if not self.problem:
            self.problem = self._missing_lines()

    def _add(self, raw: bytes) -> None:
        number, line = self.end.line + 1, parsed_line(raw)
        if line is None:
            self.problem = self.problem or f"Line {number} was changed: it does not match its own hash."
            self.end = Head(number, "")
            return
        if line.number != number or (self.end.hash and line.previous != self.end.hash):
            self.problem = self.problem or f"Line {number} does not follow the line before it."
        elif line.entry.what in (Event.DAMAGED, Event.DAMAGED_AT_NODE):
            self.problem = self.problem or f"Line {number} records earlier damage: {line.entry.decision}."
        self.end = Head(number, line.hash)
        self.latest.append(line)
        if line.entry.site:
            self.sites.setdefault(line.entry.site, SiteTotals()).add(line)

    def _missing_lines(self) -> str:
        """Return a sentence if `audit.head` names lines that the log does not have."""
        head = read_head(self.head_file)
        if head is None:
            return f"{HEAD_FILE} is missing or unreadable." if self.end.line else ""
        if head.line > self.end.line:
            return f"The log ends at line {self.end.line}, but {HEAD_FILE} names line {head.line}."
        return ""


def seconds_of(time: str) -> float | None:
    """Return the time of a line in seconds since 1970; None if it is not a time."""
    try:
        return datetime.fromisoformat(time).timestamp()
    except ValueError:
        return None
