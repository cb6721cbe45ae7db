"""Removes what the server holds about a node that has left: `fedrema deploy forget`.

The node's row stays, because records and other nodes' rows refer to rows by number; its name is replaced, and its
parameters become those of a row that was never used. Every file is replaced completely or not at all, and every
combination of old and new files can be read. `forgetting.json` exists from the first change to the last one: the server
does not start meanwhile, and the same command continues after a crash.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import Tensor

from fedrema.base.files import atomic_file, sync, write_text
from fedrema.deploy.agreement import Agreement, Needs
from fedrema.deploy.audit import SERVER, AuditLog, Entry, Event
from fedrema.deploy.flower_control import NotResponding, connected_control
from fedrema.deploy.folder import NAME, ServerFolder
from fedrema.deploy.run_config import identity_values, read_run_config
from fedrema.deploy.run_state import RunState, attempts_file, digest, log_file, saved_agreement, stop_reason_file
from fedrema.deploy.server import CentralServer
from fedrema.errors import BadInput
from fedrema.runs.directory import MODELS, RunDirectory, exported_files
from fedrema.runs.lock import RunLock
from fedrema.runs.trained_clients import dummy_federation
from fedrema.simulation.records import MetricRecord, RoundRecord, TraceValue
from fedrema.simulation.state import SimulationState

REASON = "its parameters, scores and records were deleted; its influence on the shared parameters remains"


def forget(folder: ServerFolder, name: str, remove_key: bool, report: Callable[[str], None]) -> None:
    """Remove a node's key, personal parameters, scores and records; `report` is called with what was done.

    Refuses while the server runs, and while the node's key is registered unless it may be removed.
    """
    _check_stopped(folder)
    with RunLock(folder.run) as lock:
        row = _check_known(folder, name)
        key = folder.keys / f"{name}.pub"
        if key.is_file() and not remove_key:
            raise BadInput(f"Node {name} may still participate: add --remove-key, or delete {key} first.")
        # Not a valid name of a node.
        placeholder = "(forgotten)" if row is None else f"(forgotten {row})"
        write_text(folder.forgetting, json.dumps({"name": name, "row": row}) + "\n")
        key.unlink(missing_ok=True)
        sync(folder.keys)
        if row is not None:
            _forget_row(folder, lock, name, row, placeholder)
            report(f"deleted its parameters, scores and norms (row {row} is now called {placeholder})")
        for sentence in (*_delete_copies(folder), *_redact_logs(folder, name, placeholder)):
            report(sentence)
        AuditLog(folder.path, SERVER).append(Entry(Event.NODE_FORGOTTEN, name, decision=REASON))
        folder.forgetting.unlink()
        sync(folder.path)


def _journal(folder: ServerFolder) -> dict[str, object]:
    if not folder.forgetting.is_file():
        return {}
    try:
        content = json.loads(folder.forgetting.read_text(encoding="utf-8"))
        assert NAME.fullmatch(content["name"])
        assert content["row"] is None or isinstance(content["row"], int)
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise BadInput(f"{folder.forgetting} is damaged: delete it, and repeat fedrema deploy forget.") from error
    return dict(content)


def _check_stopped(folder: ServerFolder) -> None:
    try:
        with connected_control(folder.control_address, folder.path / "ca.crt") as control:
            control.nodes()
    except NotResponding:
        return
    raise BadInput(f"The server in {folder.path} is running: stop it first, and start it again afterwards.")


def _check_known(folder: ServerFolder, name: str) -> int | None:
    """Return the node's row; None if it never took part. Refuses a name that is not known."""
    journal = _journal(folder)
    if journal and journal["name"] != name:
        raise BadInput(f"The removal of node {journal['name']} was interrupted: repeat it first.")
    directory = RunDirectory(folder.run)
    names: list[str] = directory.manifest().federation.names if directory.config_file.is_file() else []
    if name in names:
        return names.index(name)
    if journal:
        row = journal["row"]
        return row if isinstance(row, int) else None
    if not (folder.keys / f"{name}.pub").is_file():
        known = sorted(
            {*(each for each in names if NAME.fullmatch(each)), *(f.stem for f in folder.keys.glob("*.pub"))}
        )
        raise BadInput(f"There is no node {name!r}; known are {', '.join(known) or 'none'}.")
    return None


def _forget_row(folder: ServerFolder, lock: RunLock, name: str, row: int, placeholder: str) -> None:
    """Remove a node from the checkpoint, the records and the manifest."""
    directory = RunDirectory(folder.run)
    directory.remove_unfinished_files()
    if not directory.checkpoint_file.is_file():  # no round was completed
        return
    run, initial = _opened(folder)
    run.open(lock)
    central = run.central
    _reset_row(central, initial, row)
    registry = central.registry
    registry.names[row] = placeholder
    for owner in (registry, registry.norms):
        for each in fields(owner):
            if isinstance(value := getattr(owner, each.name), dict):  # by node, or by group of tensors
                value.pop(name, None)
    run.rewrite(lambda record: without_client(record, name, row))


def _opened(folder: ServerFolder) -> tuple[RunState, SimulationState]:
    """Return the run of a federation, not yet opened, and the state before its first round."""
    settings, plan = read_run_config({**folder.run_config(), "folder": str(folder.run)})
    agreement = Agreement()
    if Needs.of(settings, plan):
        agreement = saved_agreement(folder.run, digest(identity_values(settings, plan))) or agreement
    plan = agreement.applied(plan)
    dummy = dummy_federation(plan.shape, plan.predicted, plan.counts, agreement.preprocessing)
    central = CentralServer(settings, dummy, plan.most_clients, plan.most_samples, plan.most_noise)
    return RunState(folder.run, settings, plan, central, agreement), central.state


def _reset_row(central: CentralServer, initial: SimulationState, row: int) -> None:
    """Give a row the values of one that was never used."""
    state = central.state
    for name, value in state.params.own.items():
        value[row] = initial.params.own[name][row].to(value)
    for value in state.inbox.own.values():
        value[row] = 0
    # What a method keeps per client grows with the number of clients.
    larger = central.method.server(central.net, central.capacity + 1)
    for name, value in ((name, value) for name, value in state.server.items() if isinstance(value, Tensor)):
        before, other = initial.server.get(name), larger.get(name)
        if isinstance(before, Tensor) and isinstance(other, Tensor):
            axes = [axis for axis, size in enumerate(before.shape) if other.shape[axis] != size]
        else:
            axes = [axis for axis, size in enumerate(value.shape) if size == central.capacity]
        for axis in axes:
            start = before.select(axis, row).to(value) if isinstance(before, Tensor) else 0
            value.select(axis, row).copy_(torch.as_tensor(start))


def without_client(record: RoundRecord, name: str, row: int) -> RoundRecord:
    """Return a record without the scores of a client and what it says about it; sums over all clients remain."""
    participants = record.participants

    def scores(metric: MetricRecord) -> MetricRecord:
        return replace(metric, clients=[None if at == row else value for at, value in enumerate(metric.clients)])

    def traced(value: TraceValue) -> TraceValue:
        if not isinstance(value, list) or len(value) != len(participants):
            return value
        return [None if client == row else one for client, one in zip(participants, value, strict=True)]

    nodes = record.nodes
    if nodes is not None:
        by_name = {each.name: getattr(nodes, each.name) for each in fields(nodes) if each.name != "attempts"}
        nodes = replace(
            nodes,
            **{
                field: {each: value for each, value in found.items() if each != name}
                for field, found in by_name.items()
            },
            attempts=[{each: why for each, why in attempt.items() if each != name} for attempt in nodes.attempts],
        )
    return replace(
        record,
        metrics={each: scores(metric) for each, metric in record.metrics.items()},
        trace={each: traced(value) for each, value in record.trace.items()},
        nodes=nodes,
    )


def _delete_copies(folder: ServerFolder) -> list[str]:
    """Delete files that contain copies of the node's parameters or scores, and can be made again."""
    files = [*exported_files(folder.run / MODELS), folder.run / "report.html", folder.run / "curves.png"]
    attempts_file(folder.run).unlink(missing_ok=True)
    deleted = [file for file in files if file.is_file()]
    for file in deleted:
        file.unlink()
    found = [f"deleted {file.relative_to(folder.path)}" for file in deleted if file.parent == folder.run]
    if any(file.parent != folder.run for file in deleted):
        found.append("deleted the exported models; fedrema export writes those of the other nodes again")
    if folder.state.is_dir():  # Flower's database holds messages and keys; the server creates it again
        shutil.rmtree(folder.state)
        found.append("deleted Flower's database and logs; the nodes connect again")
    return found


def _redact_logs(folder: ServerFolder, name: str, placeholder: str) -> list[str]:
    """Replace the node's name in the logs of the run."""
    word = re.compile(rf"(?<![A-Za-z0-9._-]){re.escape(name)}(?![A-Za-z0-9_-]|\.[A-Za-z0-9])")
    found = []
    for file in (log_file(folder.run), stop_reason_file(folder.run)):
        if not file.is_file():
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        redacted = word.sub(placeholder, text)
        if redacted != text:
            with atomic_file(file) as temporary:
                temporary.write_text(redacted, encoding="utf-8")
            found.append(f"replaced its name in {file.name}")
    return found


def kept_about(folder: Path, name: str) -> list[str]:
    """Return sentences about what is not removed."""
    found = [
        "The shared parameters and the other nodes' parameters keep what they have learned from it.",
        "The audit log keeps its lines: name, key fingerprint, times, sizes and digests of messages.",
        "Backups and copies on other machines are not changed.",
    ]
    local = folder / "nodes" / name
    if local.is_dir():
        found.append(f"{local} still exists: delete it if it is only the operator's copy.")
    return found
