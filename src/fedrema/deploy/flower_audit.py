"""The audit of messages: their size and digest, on the node and on the server; and a node's refusals."""

import functools
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Concatenate, ParamSpec, cast

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from fedrema.base.terminal import safe
from fedrema.deploy.audit import HASH, AuditLog, Entry, Event, Head
from fedrema.deploy.audit_service import settings_change
from fedrema.deploy.flower_records import FACTS, MASK, SHARE, STATISTICS, UNMASK
from fedrema.deploy.refusals import Refusal, Refused, as_refused
from fedrema.deploy.tls import fingerprint, public_half
from fedrema.errors import BadInput, FedremaError

log = logging.getLogger("fedrema.executor")
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


def answered(handler: Handler[P]) -> Handler[P]:
    """Answer a message with the handler's reply or with a refusal, and record it in the audit log in the node's folder.

    Nothing is sent that is not in the log, except that the log cannot be written. A reply carries the number and the
    hash of the log's last line, which the server records.
    """

    @functools.wraps(handler)
    def handle(message: Message, context: Context, *args: P.args, **kwargs: P.kwargs) -> Message:
        folder = context.node_config.get("folder")
        home = Path(str(folder)).parent if folder else None
        name = str(context.node_config.get("name", "node"))
        try:
            if home is None:
                return handler(message, context, *args, **kwargs)
            number, size, digest = _round(message.content), *measured(message.content)
            audit, key = AuditLog(home, name), _own_fingerprint(home)
            settings = {name: value for name, value in context.run_config.items() if name != "folder"}
            change = settings_change(audit, settings)
            request = Entry(Event.REQUEST_RECEIVED, name, key, number, size, digest)
            _append(audit, request, *([] if change is None else [change]))
            reply = handler(message, context, *args, **kwargs)
            size, digest = measured(reply.content)
            facts = reply.content.config_records.get(FACTS, ConfigRecord({}))
            kind = Event.STATISTICS_SENT if STATISTICS in facts else Event.REPLY_SENT
            kind = STAGE_EVENTS.get(message.metadata.message_type, kind)
            spent = f"noise was added; ε spent so far: {facts['epsilon']!r}" if "epsilon" in facts else ""
            head = _append(audit, Entry(kind, name, key, number, size, digest, spent))
            reply.content[AUDIT] = ConfigRecord({"line": head.line, "hash": head.hash})
            return reply
        except Exception as error:  # its text could contain samples
            return refusal_to(message, error, home, name)

    return cast(Handler[P], handle)


def refusal_to(message: Message, error: Exception, home: Path | None, name: str) -> Message:
    """Return the refusal of a message because of an error, recorded in the node's logs in its folder `home`.

    The audit log contains what is sent, and `node.log` the text of the error.
    """
    if not isinstance(error, FedremaError):
        log.exception("a message could not be answered")
    refused = as_refused(error)
    if home is not None:
        entry = _refused_entry(message, name, f"sent instead of a reply: {refused.sent}")
        try:
            write_node_log(home, entry.round, [f"refused ({refused.refusal.code}): {safe(refused)}"])
            AuditLog(home, name).append(replace(entry, key=_own_fingerprint(home)))
        except (FedremaError, OSError) as failure:  # such as a full disk
            log.error("a refusal could not be recorded: %s", failure)
            refused = Refused(Refusal.AUDIT)
    return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, refused.sent), reply_to=message)


def _refused_entry(message: Message, name: str, decision: str) -> Entry:
    entry = Entry(Event.REQUEST_REFUSED, name, decision=decision)
    if not message.has_content():
        return entry
    try:
        size, digest = measured(message.content)
        return replace(entry, round=_round(message.content), bytes=size, sha256=digest)
    except Exception as error:  # no message may stop the executor
        return replace(entry, decision=f"{decision}; the request has no digest: {type(error).__name__}")


def write_node_log(home: Path, number: int | None, lines: Iterable[str]) -> None:
    """Append lines about a round to node.log in a node's folder, which only the node's owner reads."""
    about = "" if number is None else f"round {number}: "
    with (home / "node.log").open("a", encoding="utf-8") as stream:
        stream.writelines(f"{datetime.now():%Y-%m-%d %H:%M:%S} {about}{line}\n" for line in lines)


def _append(audit: AuditLog, *entries: Entry) -> Head:
    try:
        return audit.append(*entries)
    except FedremaError as error:
        raise Refused(Refusal.AUDIT, str(error)) from error


def stage_of(message: Message) -> str:
    """Return the stage of secure aggregation that a message asks for, in words; empty for other messages."""
    kind = message.metadata.message_type
    return f"secure aggregation: {kind.rpartition('.')[2]}" if kind in STAGE_EVENTS else ""


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
