"""The audit of a service: its start and stop, and changes of the settings since its last start."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fedrema.base.processes import StopRequested
from fedrema.deploy.audit import SERVER, AuditLog, Entry, Event
from fedrema.errors import FedremaError


@contextmanager
def audited_service(audit: AuditLog, *entries: Entry | None) -> Iterator[None]:
    """Record that a service starts and stops, and why; `entries` are recorded at its start."""
    audit.append(Entry(Event.STARTED), *(entry for entry in entries if entry is not None))
    try:
        yield
    except StopRequested:
        audit.append(Entry(Event.STOPPED, decision="stopped by its operator"))
        raise
    except FedremaError as error:
        audit.append(Entry(Event.STOPPED, decision=str(error)))
        raise
    audit.append(Entry(Event.STOPPED))


def settings_change(audit: AuditLog, config: Mapping[str, object]) -> Entry | None:
    """Return an entry with the settings if they are not those of the last such entry; None if they are the same."""
    size, digest = _measured(config)
    last = audit.last(Event.SETTINGS_CHANGED, Event.SETTINGS_APPROVED)
    if last is not None and last.entry.sha256 == digest:
        return None
    main = ", ".join(f"{name} {config[name]}" for name in ("method", "rounds", "least-clients") if name in config)
    first = "the first settings" if last is None else "other settings than before"
    return Entry(Event.SETTINGS_CHANGED, bytes=size, sha256=digest, decision=f"{first}: {main}")


def record_approval(folder: Path, who: str, config: Mapping[str, object], plan: str, repeat_from: int = 0) -> None:
    """Record in a node's folder that its owner has approved the settings of a plan; `plan` is the plan's digest."""
    size, digest = _measured(config)
    repeats = f"; the server may repeat round {repeat_from} and later ones" if repeat_from else ""
    entry = Entry(Event.SETTINGS_APPROVED, who, bytes=size, sha256=digest, decision=f"approved plan: {plan}{repeats}")
    AuditLog(folder, who).append(entry)


def _measured(config: Mapping[str, object]) -> tuple[int, str]:
    """Return the size and the digest of settings."""
    text = json.dumps(dict(sorted(config.items()))).encode()
    return len(text), hashlib.sha256(text).hexdigest()


def record_export(folder: Path, who: str, file: Path, where: str) -> None:
    """Record that a model was exported from a folder; `file` identifies it."""
    content = file.read_bytes()
    site = "" if who == SERVER else who
    digest = hashlib.sha256(content).hexdigest()
    AuditLog(folder, who).append(Entry(Event.MODEL_EXPORTED, site, bytes=len(content), sha256=digest, decision=where))
