"""The audit of messages: their size and digest, on the node and on the server."""

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Concatenate, ParamSpec, cast

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fedrema.deploy.audit import HASH, AuditLog, Entry, Event, Head
from fedrema.deploy.audit_service import settings_change
from fedrema.deploy.flower_records import FACTS, MASK, SHARE, STATISTICS, UNMASK
from fedrema.deploy.tls import fingerprint, public_half
from fedrema.errors import BadInput, FedremaError

AUDIT = "audit"
"""The record of a reply that holds the last line of the node's audit log."""
LARGEST_LINE = 10**12
STAGE_EVENTS = {SHARE: Event.SHARES_SENT, MASK: Event.MASKED_SENT, UNMASK: Event.UNMASKING_SENT}
"""What a node sends in the stages of secure aggregation, by the type of the message that it answers."""
P = ParamSpec("P")
Handler = Callable[Concatenate[Message, Context, P], Message]


def measured(content: RecordDict) -> tuple[int, str]:
    """Return the size in bytes and the SHA-256 of a message's content, without the record of the audit.

    The digest is the one by which Flower itself identifies the content; it covers all records.
    """
    records = RecordDict({name: record for name, record in content.items() if name != AUDIT})
    objects = get_all_nested_objects(records)
    return sum(len(each.deflate()) for each in objects.values()), records.object_id


def audited(handler: Handler[P]) -> Handler[P]:
    """Record a node's requests and replies in the audit log in its folder; nothing is sent that is not in the log.

    The reply carries the number and the hash of the log's last line, which the server records.
    """

    @functools.wraps(handler)
    def handle(message: Message, context: Context, *args: P.args, **kwargs: P.kwargs) -> Message:
        folder = context.node_config.get("folder")
        if not folder:
            return handler(message, context, *args, **kwargs)
        home = Path(str(folder)).parent
        name, number = str(context.node_config.get("name", "node")), _round(message.content)
        log, key = AuditLog(home, name), _own_fingerprint(home)
        size, digest = measured(message.content)
        settings = {name: value for name, value in context.run_config.items() if name != "folder"}
        change = settings_change(log, settings)
        log.append(
            Entry(Event.REQUEST_RECEIVED, name, key, number, size, digest), *([] if change is None else [change])
        )
        try:
            reply = handler(message, context, *args, **kwargs)
        except Exception as error:
            why = str(error) if isinstance(error, FedremaError) else f"an error in the node's app: {error}"
            log.append(Entry(Event.REQUEST_REFUSED, name, key, number, decision=f"no reply was sent: {why}"))
            raise
        size, digest = measured(reply.content)
        facts = reply.content.config_records.get(FACTS, ConfigRecord({}))
        kind = Event.STATISTICS_SENT if STATISTICS in facts else Event.REPLY_SENT
        kind = STAGE_EVENTS.get(message.metadata.message_type, kind)
        spent = f"noise was added; ε spent so far: {facts['epsilon']!r}" if "epsilon" in facts else ""
        head = log.append(Entry(kind, name, key, number, size, digest, spent))
        reply.content[AUDIT] = ConfigRecord({"line": head.line, "hash": head.hash})
        return reply

    return cast(Handler[P], handle)


def stage_of(message: Message) -> str:
    """Return the stage of secure aggregation that a message asks for, in words; empty for other messages."""
    kind = message.metadata.message_type
    return f"secure aggregation: {kind.rpartition('.')[2]}" if kind in STAGE_EVENTS else ""


def record_refusal(home: Path, name: str, message: Message, why: str) -> None:
    """Record a message that is outside of the approved plan in the audit log in a node's folder."""
    entry = Entry(Event.REQUEST_REFUSED, name, _own_fingerprint(home), decision=f"no reply was sent: {why}")
    if message.has_content():
        try:
            size, digest = measured(message.content)
            entry = replace(entry, round=_round(message.content), bytes=size, sha256=digest)
        except Exception as error:  # no message may stop the executor
            entry = replace(entry, decision=f"{entry.decision}; its content has no digest: {error}")
    AuditLog(home, name).append(entry)


def received(what: Event, name: str, number: int, content: RecordDict) -> Entry:
    """Return the server's entry about what a node has sent; nothing in it is trusted."""
    try:
        size, digest = measured(content)
    except Exception as error:  # no message of a node may stop the server
        return Entry(what, name, round=number, decision=f"its content has no digest: {error}")
    head = node_head(content)
    return Entry(
        what,
        name,
        round=number,
        bytes=size,
        sha256=digest,
        node_line=None if head is None else head.line,
        node_hash="" if head is None else head.hash,
    )


def node_head(content: RecordDict) -> Head | None:
    """Return the last line of a node's audit log, from its reply; None if it is missing or malformed."""
    record = content.get(AUDIT)
    if not isinstance(record, ConfigRecord):
        return None
    line, digest = record.get("line"), record.get("hash")
    if type(line) is not int or not 0 < line < LARGEST_LINE or not isinstance(digest, str):
        return None
    return Head(line, digest) if HASH.fullmatch(digest) else None


def _round(content: RecordDict) -> int | None:
    number = content.config_records.get(FACTS, ConfigRecord({})).get("round")
    return number if isinstance(number, int) else None


def _own_fingerprint(home: Path) -> str:
    try:
        return fingerprint(public_half(home / "node.key"))
    except BadInput:  # without a registered key, for experiments
        return ""
