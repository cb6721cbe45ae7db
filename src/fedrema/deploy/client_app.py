"""The Flower app of a client: trains on its own samples when a letter comes, and says who it is when asked."""

import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import cast

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedrema.base.terminal import safe
from fedrema.config.settings import Settings
from fedrema.data import DataSettings, Federation, build_federation, load_user_data
from fedrema.data.npz import read_npz
from fedrema.deploy.carried import FACTS, read_letter, reply_record
from fedrema.deploy.letters import Reply
from fedrema.deploy.model import keep_model
from fedrema.deploy.node import Node
from fedrema.deploy.plan import HELD_BY_NODES, Plan, read_run_config
from fedrema.deploy.privacy import Guard
from fedrema.deploy.protection import Protection
from fedrema.errors import BadInput, FedremaError

app = ClientApp()
KEPT = "kept"


@app.query()
def who(message: Message, context: Context) -> Message:
    """Say what this client is called, where the server does not know it by its key."""
    name = str(context.node_config.get("name") or context.node_config.get("partition-id", ""))
    return Message(RecordDict({FACTS: ConfigRecord({"name": name})}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train for a round, or only score what came."""
    letter, name = read_letter(message.content)
    settings, plan = read_run_config(context.run_config)
    with kept_in(context) as folder, noted(context.node_config.get("folder"), letter.round) as note:
        samples = plan.fitted(samples_of_node(settings, plan, context, name))
        node = Node(settings, samples, folder)
        guard = guard_of(context, folder)
        if guard is not None and letter.train:
            guard.check()
        reply = node.answer(letter)
        if context.node_config.get("folder"):  # without one, nobody could ask for it
            keep_model(folder, settings, node, letter.round - 1, reply)
        note(reply)
        if guard is not None:
            reply = guard.cover(reply, node.begins_with(letter))
    return Message(reply_record(reply), reply_to=message)


@contextmanager
def kept_in(context: Context) -> Iterator[Path]:
    """Give the folder in which this node keeps what never leaves it; without one, Flower keeps it while it lives."""
    if folder := context.node_config.get("folder"):
        yield Path(str(folder))
        return
    kept = Path(_scratch().name) / str(context.node_id)
    kept.mkdir(exist_ok=True)
    for name, content in context.state.config_records.get(KEPT, ConfigRecord({})).items():
        (kept / name).write_bytes(cast(bytes, content))
    yield kept
    files = list(kept.iterdir())
    context.state[KEPT] = ConfigRecord({file.name: file.read_bytes() for file in files})
    for file in files:  # the next message may come to another process
        file.unlink()


@functools.cache
def _scratch() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory()


@contextmanager
def noted(folder: object, number: int) -> Iterator[Callable[[Reply], None]]:
    """Write what happens in a round to node.log, beside the folder of what the node keeps: for its owner alone."""
    lines: list[str] = []
    try:
        yield lambda reply: lines.append(_told(reply))
    except FedremaError as error:
        lines.append(safe(error))
        raise
    finally:
        if folder:
            with (Path(str(folder)).parent / "node.log").open("a", encoding="utf-8") as log:
                log.writelines(f"{datetime.now():%Y-%m-%d %H:%M:%S} round {number}: {line}\n" for line in lines)


def _told(reply: Reply) -> str:
    parts = []
    for score, when in ((reply.received, "as it came"), (reply.trained, "after training")):
        if score is not None:
            parts.append(f"accuracy {sum(score.correct) / sum(score.asked):.1%} {when}")
    if reply.loss is not None:
        parts.append(f"loss {reply.loss:.4f}")
    return ", ".join([f"{reply.count} samples", *parts])


def guard_of(context: Context, folder: Path) -> Guard | None:
    """Return what covers this node's replies, if its owner has asked for that."""
    protection = Protection.of(context.node_config)
    return Guard(protection, folder / "privacy.json") if protection.privacy_clip else None


def samples_of_node(settings: Settings, plan: Plan, context: Context, name: str) -> Federation:
    """Return this node's samples: its own data, or its part of a dataset that is dealt out for trying."""
    data = context.node_config.get("data")
    if data is None:
        row = context.node_config.get("partition-id")
        if row is None or settings.data.federation == HELD_BY_NODES:
            raise BadInput("The node has no data: give it data=FILE, data=FOLDER or data=module:function.")
        return dealt(settings.data).only(int(row))
    federation = own_samples(str(data), settings, name, plan.names)
    if len(federation) > 1:
        if name not in federation.names:
            raise BadInput(f"data={data} holds {len(federation)} clients, and none is called {name!r}.")
        federation = federation.only(federation.names.index(name))
    return federation


@functools.lru_cache(maxsize=1)  # Flower's simulation engine plays many nodes in one process
def dealt(data: DataSettings) -> Federation:
    """Return the dataset that is dealt out for trying."""
    return build_federation(data)


def own_samples(data: str, settings: Settings, name: str, class_names: Sequence[str]) -> Federation:
    """Read a user's data, whose labels are those of the federation; a single file need not say whose it is."""
    share, seed = settings.data.test_share, settings.data.data_seed
    file = Path(data)
    if file.suffix == ".npz" and file.is_file():
        arrays = read_npz(file, required=("x", "y"), optional=("split", "client", "meta"))
        if "client" not in arrays:
            whose = np.full(len(arrays["y"]), name)
            return Federation.from_arrays(
                arrays["x"], arrays["y"], whose, arrays.get("split"), None, None, seed, share, class_names=class_names
            )
    return load_user_data(data, seed, share, class_names)
