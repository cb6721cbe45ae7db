"""The audit log of a server or a node: JSON lines, each with the hash of the line before it.

`audit.jsonl` only grows. `audit.head` holds the number and the hash of its last line, so that removed lines are
noticed. Both are on disk when `AuditLog.append` returns. A process that is killed while it writes leaves an incomplete
line, or a complete line that `audit.head` does not name yet: the next writer removes the former and records that, and
accepts the latter. Any other difference is recorded as damage, which stays in the log. Anyone who can write to the
folder can also write a new log from the beginning; the server therefore records the last hash of each node's log with
every reply.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path

from filelock import FileLock, Timeout

from fedrema.base.files import make_folder, write_text
from fedrema.base.terminal import safe
from fedrema.errors import BadInput

LOG_FILE, HEAD_FILE, LOCK_FILE = "audit.jsonl", "audit.head", "audit.lock"
SECONDS_TO_WAIT = 30.0
"""How long a writer waits for another one."""
LONGEST_TEXT = 500
BLOCK = 65_536
SEALED = re.compile(rb'(\{.*),"hash":"([0-9a-f]{64})"\}', re.S)
HASH = re.compile(r"[0-9a-f]{64}")
SERVER = "server"
"""How the server is named in its log; nodes have names."""


class Event(StrEnum):
    """What an entry is about."""

    STARTED = "started"
    STOPPED = "stopped"
    JOINED = "joined"
    SETTINGS_APPROVED = "settings approved"
    SETTINGS_CHANGED = "settings changed"
    NODE_ADDED = "node added"
    NODE_REMOVED = "node removed"
    NODE_FORGOTTEN = "node forgotten"
    KEY_REPLACED = "key replaced"
    KEY_REJECTED = "key rejected"
    CERTIFICATE_RENEWED = "certificate renewed"
    REQUEST_SENT = "request sent"
    REQUEST_RECEIVED = "request received"
    REQUEST_REFUSED = "request refused"
    STATISTICS_SENT = "statistics sent"
    STATISTICS_RECEIVED = "statistics received"
    SHARES_SENT = "encrypted shares sent"
    SHARES_RECEIVED = "encrypted shares received"
    MASKED_SENT = "masked parameters sent"
    MASKED_RECEIVED = "masked parameters received"
    UNMASKING_SENT = "shares to unmask the sum sent"
    UNMASKING_RECEIVED = "shares to unmask the sum received"
    REPLY_SENT = "reply sent"
    REPLY_RECEIVED = "reply received"
    REPLY_REJECTED = "reply rejected"
    REPLY_CLIPPED = "reply clipped"
    MODEL_EXPORTED = "model exported"
    REPAIRED = "log repaired"
    DAMAGED = "log damaged"
    DAMAGED_AT_NODE = "node's log damaged"


@dataclass(frozen=True)
class Head:
    """The last line of a log."""

    line: int = 0
    hash: str = "0" * 64

    def __str__(self) -> str:
        return f"{self.line}:{self.hash}"

    @classmethod
    def parse(cls, text: str) -> "Head":
        """Read LINE:HASH, as `fedrema deploy audit` prints it."""
        line, _, digest = text.strip().partition(":")
        if not line.isascii() or not line.isdigit() or not HASH.fullmatch(digest):
            raise BadInput(f"{safe(text[:100])!r} is not LINE:HASH, as fedrema deploy audit prints it for a site.")
        return cls(int(line), digest)


@dataclass(frozen=True)
class Entry:
    """One event, as the caller describes it."""

    what: Event
    site: str = ""
    """The node that the event concerns."""
    key: str = ""
    """Fingerprint of the node's public key, as `ssh-keygen -l` shows it."""
    round: int | None = None
    bytes: int | None = None
    """Size of what was sent or received."""
    sha256: str = ""
    """Digest of what was sent or received."""
    decision: str = ""
    """What was decided, and why."""
    node_line: int | None = None
    """Last line of the node's own log when it sent a reply, and its hash."""
    node_hash: str = ""

    def values(self) -> dict[str, object]:
        """Return the fields that are set, with text on one line and of limited length."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            name: safe(value)[:LONGEST_TEXT] if isinstance(value, str) else value
            for name, value in values.items()
            if value not in (None, "")
        }


@dataclass(frozen=True)
class Line:
    """One line of a log."""

    number: int
    time: str
    who: str
    entry: Entry
    previous: str
    hash: str

    @property
    def head(self) -> Head:
        """Its number and hash."""
        return Head(self.number, self.hash)


@dataclass(frozen=True)
class Problem:
    """Something that is wrong with a log."""

    line: int
    sentence: str


class AuditLog:
    """The audit log in a folder; `who` writes to it, the server or a node."""

    def __init__(self, folder: Path, who: str) -> None:
        self.file, self.head_file, self.who = folder / LOG_FILE, folder / HEAD_FILE, who
        self._lock = FileLock(folder / LOCK_FILE, thread_local=False)

    def append(self, *entries: Entry) -> Head:
        """Append entries durably, one writer at a time; return the last line. Raises `BadInput` if that fails."""
        if not entries:
            return self.head()
        try:
            make_folder(self.file.parent)
            with self._lock.acquire(timeout=SECONDS_TO_WAIT):
                return self._append(entries)
        except Timeout:
            raise BadInput(f"{self.file} is in use by another process for {SECONDS_TO_WAIT:g} s.") from None
        except OSError as error:
            raise BadInput(f"cannot write {self.file}: {error.strerror or error}; nothing is sent unlogged.") from error

    def head(self) -> Head:
        """Return the last line that was written completely."""
        return read_head(self.head_file) or Head()

    def last(self, *events: Event) -> Line | None:
        """Return the latest line about one of these events; None if there is none."""
        found = None
        for raw in _raw_lines(self.file):
            line = parsed_line(raw)
            if line is not None and line.entry.what in events:
                found = line
        return found

    def node_heads(self) -> dict[str, Head]:
        """Return the last line of each node's log that the server has recorded here."""
        lines = filter(None, map(parsed_line, _raw_lines(self.file)))
        return {site: Head(*max(seen.items())) for site, seen in seen_by_server(lines).items()}

    def _append(self, entries: tuple[Entry, ...]) -> Head:
        if not self.file.exists() and not self.head_file.exists():
            self._write_head(Head())  # before the first line: a log without it is damaged
        found, complete, fragment = self._end()
        notes = [*_repair(fragment), *self._damage(found)]
        head, text = found, b""
        for entry in (*notes, *entries):
            line = _sealed(entry, self.who, head)
            head, text = Head(head.line + 1, line[-66:-2].decode()), text + line + b"\n"
        with self.file.open("r+b" if self.file.exists() else "wb") as stream:
            stream.truncate(complete)
            stream.seek(complete)
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        self._write_head(head)
        return head

    def _write_head(self, head: Head) -> None:
        write_text(self.head_file, f"{head}\n")

    def _end(self) -> tuple[Head, int, bytes]:
        """Return the last complete line, the size of the file up to it, and the incomplete line after it."""
        if not self.file.exists():
            return Head(), 0, b""
        size = self.file.stat().st_size
        with self.file.open("rb") as stream:
            start, tail = size, b""
            while start and tail.count(b"\n") < 2:
                start = max(0, start - BLOCK)
                stream.seek(start)
                tail = stream.read(size - start)
        content, newline, fragment = tail.rpartition(b"\n")
        complete = size - len(fragment)
        if not newline:
            return Head(), complete, fragment
        raw = content.rpartition(b"\n")[2]
        line = parsed_line(raw)
        if line is not None:
            return line.head, complete, fragment
        number = sum(1 for _ in _raw_lines(self.file))
        return Head(number, hashlib.sha256(raw).hexdigest()), complete, fragment

    def _damage(self, found: Head) -> list[Entry]:
        """Return an entry if the end of the file is not what the last writer left."""
        head = read_head(self.head_file)
        if head == found or (head is not None and head.line < found.line and self._contains(head)):
            return []
        return [Entry(Event.DAMAGED, decision=_difference(head, found))]

    def _contains(self, head: Head) -> bool:
        if not head.line:
            return True
        lines = (raw for number, raw in enumerate(_raw_lines(self.file), 1) if number == head.line)
        line = parsed_line(next(lines, b""))
        return line is not None and line.head == head


def verify(folder: Path, expected: Mapping[int, str] | None = None) -> tuple[list[Line], list[Problem]]:
    """Read the log in a folder; return its lines, and everything that is wrong with it in the order of lines.

    `expected` are hashes of lines by number that another machine has recorded.
    """
    file, lines, problems = folder / LOG_FILE, [], []
    if not file.is_file() and not (folder / HEAD_FILE).is_file():
        raise BadInput(f"{folder} has no audit log: {LOG_FILE} is written when the server or the node starts.")
    head, end = read_head(folder / HEAD_FILE), Head()
    for number, raw in enumerate(_raw_lines(file), 1):
        line = parsed_line(raw)
        if line is None:
            problems.append(Problem(number, f"Line {number} was changed: it does not match its own hash."))
            end = Head(number, "")
            continue
        if line.number != number:
            if not problems:
                problems.append(
                    Problem(number, f"Line {number} is entry {line.number}: lines are missing, added or reordered.")
                )
        elif end.hash and line.previous != end.hash:
            problems.append(
                Problem(number - 1, f"Line {number - 1} was replaced: line {number} recorded another hash for it.")
            )
        if line.entry.what in (Event.DAMAGED, Event.DAMAGED_AT_NODE):
            whose = f" of {line.entry.site}'s log" if line.entry.site else ""
            problems.append(Problem(number, f"Line {number} records earlier damage{whose}: {line.entry.decision}."))
        lines.append(line)
        end = Head(number, line.hash)
    matches_before = head is not None and (head.line == 0 or any(line.head == head for line in lines))
    if not problems and head != end and not (head is not None and head.line < end.line and matches_before):
        problems.append(Problem(min(end.line, head.line if head else end.line), f"{_difference(head, end)}."))
    for number, digest in (expected or {}).items():
        line = lines[number - 1] if 0 < number <= len(lines) else None
        if line is None:
            problems.append(Problem(number, f"Line {number} is missing, which the server has seen."))
        elif line.hash != digest:
            problems.append(Problem(number, f"Line {number} is not the one that the server has seen."))
    return lines, sorted(problems, key=lambda problem: problem.line)


def incomplete_line(folder: Path) -> bool:
    """Whether a process was killed while it wrote the last line; the next writer removes it."""
    file = folder / LOG_FILE
    return file.is_file() and file.stat().st_size > 0 and not file.read_bytes().endswith(b"\n")


def seen_by_server(lines: Iterable[Line]) -> dict[str, dict[int, str]]:
    """Return the hashes of each node's log that the server has recorded, by node and line."""
    found: dict[str, dict[int, str]] = {}
    for line in lines:
        entry = line.entry
        if entry.node_line is not None and HASH.fullmatch(entry.node_hash):
            found.setdefault(entry.site, {})[entry.node_line] = entry.node_hash
    return found


def described(line: Line) -> str:
    """Return a line in plain words."""
    entry = line.entry
    parts = [f"{line.time[:19].replace('T', ' ')} UTC", line.who + ":"]
    parts.append(f"{entry.what}{f' in round {entry.round}' if entry.round is not None else ''}")
    if entry.site and entry.site != line.who:
        parts.append(f"({entry.site})")
    about = [f"{entry.bytes} bytes"] if entry.bytes is not None else []
    about += [f"SHA-256 {entry.sha256[:16]}…"] if entry.sha256 else []
    about += [f"key {entry.key}"] if entry.key else []
    about += [f"line {entry.node_line} of the node's log"] if entry.node_line is not None else []
    text = " ".join(parts) + (f", {', '.join(about)}" if about else "")
    return f"{text}; {entry.decision}" if entry.decision else text


def _repair(fragment: bytes) -> list[Entry]:
    if not fragment:
        return []
    why = "the last line was incomplete because its writer was killed; it was removed"
    return [Entry(Event.REPAIRED, bytes=len(fragment), sha256=hashlib.sha256(fragment).hexdigest(), decision=why)]


def _difference(head: Head | None, found: Head) -> str:
    """Return how the end of a log differs from what `audit.head` says."""
    if head is None:
        return f"{HEAD_FILE} is missing or unreadable, so lines may be missing after line {found.line}"
    if head.line > found.line:
        missing = (
            f"line {head.line} is" if head.line == found.line + 1 else f"lines {found.line + 1} to {head.line} are"
        )
        return f"The log ends at line {found.line}, but {missing} missing by {HEAD_FILE}"
    return f"Line {head.line} is not the one that {HEAD_FILE} names: the log was replaced"


def _sealed(entry: Entry, who: str, head: Head) -> bytes:
    time = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    values = {"line": head.line + 1, "time": time, "who": who, **entry.values(), "previous": head.hash}
    body = json.dumps(values, separators=(",", ":")).encode()
    return body[:-1] + b',"hash":"' + hashlib.sha256(body).hexdigest().encode() + b'"}'


def parsed_line(raw: bytes) -> Line | None:
    """Return a line that matches its own hash; None for any other."""
    found = SEALED.fullmatch(raw)
    if not found or hashlib.sha256(found[1] + b"}").hexdigest().encode() != found[2]:
        return None
    try:
        values = json.loads(found[1] + b"}")
        known = {field.name: values[field.name] for field in fields(Entry) if field.name in values}
        entry = Entry(**{**known, "what": Event(values["what"])})
        return Line(
            int(values["line"]),
            str(values["time"]),
            str(values["who"]),
            entry,
            str(values["previous"]),
            found[2].decode(),
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def read_head(file: Path) -> Head | None:
    """Return the content of `audit.head`; None if it is missing or unreadable."""
    try:
        return Head.parse(file.read_text(encoding="ascii"))
    except (OSError, UnicodeDecodeError, BadInput):
        return None


def _raw_lines(file: Path) -> Iterator[bytes]:
    """Yield the complete lines."""
    if file.is_file():
        with file.open("rb") as stream:
            for raw in stream:
                if raw.endswith(b"\n"):
                    yield raw[:-1]
