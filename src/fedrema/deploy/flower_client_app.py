"""The Flower app of a node: trains on the node's samples when a request arrives, and answers queries for its name."""

import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedrema.config.settings import Settings
from fedrema.data import Federation, Preprocessing
from fedrema.deploy.agreement import Agreement, Needs
from fedrema.deploy.flower_audit import answered, write_node_log
from fedrema.deploy.flower_packing import unpacked
from fedrema.deploy.flower_records import FACTS, STATISTICS, read_agreement, read_request, reply_record
from fedrema.deploy.messages import Reply, Request
from fedrema.deploy.node import Node
from fedrema.deploy.node_data import own_samples, partitioned_dataset, statistics_of_samples, statistics_of_table
from fedrema.deploy.node_model import save_model
from fedrema.deploy.node_results import append_result
from fedrema.deploy.privacy import PrivacyGuard, PrivacySettings
from fedrema.deploy.refusals import Refusal, Refused, refusing
from fedrema.deploy.run_config import HELD_BY_NODES, Plan, read_run_config

app = ClientApp()
NODE_FILES = "node-files"
"""The record in Flower's state that holds the node's files, if the node has no folder."""


@app.query()
def identify(message: Message, context: Context) -> Message:
    """Send this node's name, which the server uses if the node has no registered key."""
    name = str(context.node_config.get("name") or context.node_config.get("partition-id", ""))
    return Message(RecordDict({FACTS: ConfigRecord({"name": name})}), reply_to=message)


@app.query(STATISTICS)
@answered
def send_statistics(message: Message, context: Context) -> Message:
    """Send the statistics of this node's training samples that the federation needs before round 1."""
    settings, plan = read_run_config(context.run_config)
    name = str(message.content.config_records[FACTS]["name"])
    privacy = PrivacySettings.read(context.node_config)
    with node_folder(context) as folder, node_log(context.node_config.get("folder"), 0) as write:
        if privacy.privacy_clip:
            raise Refused(Refusal.STATISTICS_PRIVATE)
        needs, data = Needs.of(settings, plan), context.node_config.get("data")
        if not needs:
            raise Refused(Refusal.STATISTICS)
        if data is not None and plan.is_table:
            found = statistics_of_table(str(data), settings, name, needs, plan)
        else:
            found = statistics_of_samples(node_samples(settings, plan, context, name), needs, plan)
        write(found.described(needs))
        with refusing(Refusal.PRIVACY):
            PrivacyGuard(privacy, folder / "privacy.json").record(0)
    return Message(RecordDict({FACTS: ConfigRecord({STATISTICS: found.encoded()})}), reply_to=message)


def open_node(context: Context, name: str, agreement: Agreement, folder: Path) -> Node:
    """Return the node with its samples, and its states in a folder."""
    settings, plan = read_run_config(context.run_config)
    plan, config = agreement.within(settings, plan), context.node_config
    samples = plan.relabelled(node_samples(settings, plan, context, name, agreement.preprocessing))
    return Node(settings, samples, folder, int(config.get("kept-rounds", 1)), bool(config.get("accept-lost-state")))


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train for a round, or only score the received model."""
    message.content = unpacked(message.content)
    return reply_to_request(message, context, lambda context, _, *what: open_node(context, *what))


Write = Callable[[str], None]
OpenNode = Callable[[Context, Request, str, Agreement, Path], Node]
"""Returns the node that answers a request, given its name, what the nodes agreed on, and the folder of its state."""
HoldBack = Callable[[Node, Request, Agreement, Reply, Write], tuple[Reply, RecordDict]]
"""Returns a reply without what is summed under masks, and a record with the node's keys for the sum."""


@answered
def reply_to_request(
    message: Message,
    context: Context,
    opened: OpenNode,
    hold_back: HoldBack | None = None,
) -> Message:
    """Answer a request to train, or to score the received model.

    `hold_back` is needed for secure aggregation.
    """
    with refusing(Refusal.REQUEST):
        (request, name), agreement = read_request(message.content), read_agreement(message.content) or Agreement()
    settings, _ = read_run_config(context.run_config)
    is_secure = settings.simulation.secure_aggregation
    if is_secure and hold_back is None:
        raise Refused(Refusal.SECURE)
    with node_folder(context) as folder, node_log(context.node_config.get("folder"), request.round) as write:
        node = opened(context, request, name, agreement, folder)
        with refusing(Refusal.PRIVACY):
            guard = PrivacyGuard(PrivacySettings.read(context.node_config), folder / "privacy.json")
            if note := guard.begin(request.last_used_round, bool(context.node_config.get("accept-lost-state"))):
                write(note)
        if request.train:
            with refusing(Refusal.BUDGET):
                guard.check_budget()
        reply = node.reply_to(request)
        if node.note:
            write(node.note)
        if context.node_config.get("folder"):  # without a folder there is no `fedrema deploy model`
            save_model(folder, settings, node, request.round - 1, reply)
            append_result(folder.parent, reply)
        write(_description(reply))
        with refusing(Refusal.PRIVACY):
            reply = guard.protect(reply, node.start_params(request) if guard.settings.privacy_clip else {})
        keys = RecordDict()
        if is_secure and request.train and hold_back is not None:
            reply, keys = hold_back(node, request, agreement, reply, write)
    return Message(RecordDict({**reply_record(reply), **keys}), reply_to=message)


@contextmanager
def node_folder(context: Context) -> Iterator[Path]:
    """Return the folder of the node's own state; if none is configured, its files are stored in Flower's state."""
    if folder := context.node_config.get("folder"):
        yield Path(str(folder))
        return
    temporary = Path(_temporary_folder().name) / str(context.node_id)
    temporary.mkdir(exist_ok=True)
    for name, content in context.state.config_records.get(NODE_FILES, ConfigRecord({})).items():
        (temporary / name).write_bytes(cast(bytes, content))
    yield temporary
    files = list(temporary.iterdir())
    context.state[NODE_FILES] = ConfigRecord({file.name: file.read_bytes() for file in files})
    for file in files:  # another process may receive the next message
        file.unlink()


@functools.cache
def _temporary_folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory()


@contextmanager
def node_log(folder: object, number: int) -> Iterator[Write]:
    """Write lines about a round to node.log next to the folder of the node's state: for the node's owner only."""
    lines: list[str] = []
    try:
        yield lines.append
    finally:
        if folder:
            write_node_log(Path(str(folder)).parent, number, lines)


def _description(reply: Reply) -> str:
    parts = []
    for score, when in ((reply.received, "of the received model"), (reply.trained, "after training")):
        if score is not None:
            parts.append(f"{score.described()} {when}")
    if reply.loss is not None:
        parts.append(f"loss {reply.loss:.4f}")
    return ", ".join([f"{reply.count} samples", *parts])


def node_samples(
    settings: Settings, plan: Plan, context: Context, name: str, preprocessing: Preprocessing | None = None
) -> Federation:
    """Return this node's samples: its own data, or its part of a partitioned dataset."""
    data = context.node_config.get("data")
    if data is not None:
        return own_samples(str(data), settings, name, plan, preprocessing)
    row = context.node_config.get("partition-id")
    if row is None or settings.data.federation == HELD_BY_NODES:
        raise Refused(Refusal.NO_DATA, "The node has no data: give it data=FILE, data=FOLDER or data=module:function.")
    return partitioned_dataset(settings.data).only(int(row))
