"""The plan that a node's owner approves: everything that determines what the node computes and what leaves it.

`plan.toml` in a node's folder contains the settings of the federation. `fedrema deploy approve` adds the version of
fedrema, the digests of the owner's own files and the settings of the node, and stores all of it as `approved.json`. A
node uses these values only; what the server sends is compared with them, and refused if it differs.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

import fedrema
from fedrema.base.digests import Digests, module_digests
from fedrema.base.files import write_text
from fedrema.base.options import Purpose
from fedrema.config.settings import Settings, read_toml
from fedrema.deploy.agreement import Needs
from fedrema.deploy.answered_rounds import AnsweredRounds
from fedrema.deploy.audit_service import record_approval
from fedrema.deploy.folder import NodeFolder
from fedrema.deploy.refusals import Refusal, Refused
from fedrema.deploy.run_config import NO_FOLDER, Plan, RunConfig, Value, plan_names, read_run_config
from fedrema.deploy.tls import fingerprint, read_public_key
from fedrema.errors import BadInput
from fedrema.runs.manifest import read_object

FORMAT = 1
"""Version of approved.json."""
ROUNDS = "rounds"
OF_THE_SERVER = plan_names(Purpose.PLACE, Purpose.OPERATION)
"""Names in a run configuration that have no effect on a node."""
APPROVE_AGAIN = "check the plan and run fedrema deploy approve again"


@dataclass(frozen=True)
class NodePlan:
    """What a node computes, and with which code."""

    fedrema: str
    """Version of fedrema."""
    config: RunConfig
    """Method and settings, by their names on the command line."""
    files: dict[str, Digests]
    """SHA-256 of the owner's own files: those of the method, the network and the data."""
    node: dict[str, Value]
    """The settings of node.toml that determine what leaves the node."""
    format: int = FORMAT

    @property
    def digest(self) -> str:
        """SHA-256 of the plan."""
        return hashlib.sha256(json.dumps(msgspec.to_builtins(self), sort_keys=True).encode()).hexdigest()

    def settings(self) -> tuple[Settings, Plan]:
        """Return the settings and the federation's plan."""
        return read_run_config(self.run_config())

    def run_config(self) -> RunConfig:
        """Return the run configuration with which the node trains."""
        return {**self.config, "folder": NO_FOLDER}

    def check_config(self, received: Mapping[str, Value]) -> None:
        """Refuse the run configuration of a server that differs from the approved one; a node may do fewer rounds."""
        theirs = affecting_nodes(received)
        for name in sorted({*theirs, *self.config} - {ROUNDS}):
            if name not in theirs:
                raise Refused(Refusal.SETTING_MISSING, name=name)
            if name not in self.config:
                raise Refused(Refusal.SETTING_UNKNOWN, name=name)
            if not _same(theirs[name], self.config[name]):
                raise Refused(Refusal.SETTING, name=name, value=repr(theirs[name]))
        rounds = theirs.get(ROUNDS)
        if type(rounds) is not int or rounds > self.rounds:
            raise Refused(Refusal.ROUNDS, approved=self.rounds, rounds=repr(rounds))

    def check_round(self, number: object, train: bool = True) -> None:
        """Refuse a round that is not approved; the result of the last one is scored in the round after it."""
        if type(number) is not int or not 1 <= number <= self.rounds + (0 if train else 1):
            raise Refused(Refusal.ROUND, approved=self.rounds, number=repr(number))

    @property
    def run(self) -> str:
        """SHA-256 of what identifies the run: all settings except the number of rounds, which the owner can raise."""
        fixed = sorted((name, value) for name, value in self.config.items() if name != ROUNDS)
        return hashlib.sha256(json.dumps(fixed).encode()).hexdigest()

    @property
    def is_secure(self) -> bool:
        """Whether shared parameters leave the node only under masks."""
        return self.config.get("secure-aggregation") is True

    @property
    def rounds(self) -> int:
        """The number of approved rounds."""
        return int(self.config[ROUNDS])

    def lines(self) -> list[str]:
        """Return the plan for the node's owner to read."""
        settings, plan = self.settings()
        needs = Needs.of(settings, plan)
        sent = "statistics of the training samples" if needs else "no statistics"
        return [
            f"fedrema {self.fedrema}, method {self.config['method']}, at most {self.rounds} rounds",
            f"before round 1, the node sends {sent}" + (" (docs/deploy.md lists them)" if needs else ""),
            f"shared parameters leave the node only under masks, for sums over at least {plan.secure_least} nodes"
            if self.is_secure
            else "shared parameters leave the node without masks (no secure aggregation)",
            "",
            "settings of the federation:",
            *(f"  {name} = {json.dumps(value)}" for name, value in sorted(self.config.items())),
            "settings of this node:",
            *(f"  {name} = {json.dumps(value)}" for name, value in sorted(self.node.items())),
            "your own code:" if self.files else "your own code: none",
            *(
                f"  {kind}: {name} (SHA-256 {digest})"
                for kind, digests in self.files.items()
                for name, digest in digests.items()
            ),
            "",
            f"digest of the plan: {self.digest}",
        ]


def affecting_nodes(config: Mapping[str, Value]) -> RunConfig:
    """Return the part of a run configuration that has an effect on nodes."""
    return {name: value for name, value in config.items() if name not in OF_THE_SERVER}


def proposed_plan(folder: NodeFolder, file: Path | None = None) -> NodePlan:
    """Return the plan in a node's plan.toml, or in another file such as the server's app/pyproject.toml."""
    file = folder.plan_file if file is None else file
    if not file.is_file():
        raise BadInput(
            f"{file} does not exist: ask the server's operator for app/pyproject.toml, and name it with --plan."
        )
    table: Any = read_toml(file, "the plan")
    try:
        config = table["tool"]["flwr"]["app"]["config"] if "tool" in table else table
        plan = _present(folder, affecting_nodes(config))
        rounds = config[ROUNDS]
    except (KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{file} is not a plan: it has no method and rounds.") from error
    if type(rounds) is not int:
        raise BadInput(f"{file}: rounds must be a whole number, got {rounds!r}.")
    plan.settings()  # refuses invalid settings
    for kind, source in own_sources(folder, plan.config).items():
        if not plan.files.get(kind):
            raise BadInput(
                f"{folder.path} has no module {source.partition(':')[0]!r}, which {kind} = {source!r} needs."
            )
    return plan


def approve(folder: NodeFolder, plan: NodePlan, repeat_from: int = 0) -> None:
    """Store a plan as the one that the node's owner has approved.

    With `repeat_from`, the server may repeat this round and later ones with other models than before.
    """
    if repeat_from and not 1 <= repeat_from <= plan.rounds + 1:
        raise BadInput(f"--repeat-from must be a round from 1 to {plan.rounds + 1}, got {repeat_from}.")
    content = {**msgspec.to_builtins(plan), "digest": plan.digest}
    write_text(folder.approval_file, f"{json.dumps(content, indent=1)}\n")
    if repeat_from:
        AnsweredRounds(folder.kept).permit_from(repeat_from)
    record_approval(folder.path, folder.name, plan.config, plan.digest, repeat_from)


def approved_plan(folder: NodeFolder) -> NodePlan:
    """Return the plan that the owner has approved; refuses if anything of the node has changed since then."""
    file = folder.approval_file
    if not file.is_file():
        raise BadInput(f"{folder.path} has no approved plan: run fedrema deploy approve {folder.path}.")
    content = read_object(file, "cannot be read")
    digest = content.pop("digest", None)
    try:
        plan = msgspec.convert(content, NodePlan)
    except msgspec.ValidationError as error:
        raise BadInput(f"{file} was altered or damaged: {APPROVE_AGAIN}.") from error
    if plan.format != FORMAT or digest != plan.digest:
        raise BadInput(f"{file} was altered or damaged: {APPROVE_AGAIN}.")
    present = _present(folder, plan.config)
    if present.fedrema != plan.fedrema:
        raise BadInput(
            f"{folder.path}: the plan was approved for fedrema {plan.fedrema}, and this is {present.fedrema}:"
            f" {APPROVE_AGAIN}."
        )
    for what, now, then in (("file", present.files, plan.files), ("setting", present.node, plan.node)):
        if changed := [name for name in {**now, **then} if now.get(name) != then.get(name)]:
            raise BadInput(
                f"{folder.path}: the {what} for {changed[0]!r} has changed since the plan was approved:"
                f" {APPROVE_AGAIN}."
            )
    return plan


def peer_keys(folder: NodeFolder) -> dict[str, bytes]:
    """Return the public keys of the other nodes, by name."""
    return {file.stem: read_public_key(file) for file in sorted(folder.peers.glob("*.pub"))}


def _peers(folder: NodeFolder) -> str:
    """Return the other nodes that the owner approves: their names and the fingerprints of their keys."""
    keys = peer_keys(folder)
    return (
        ", ".join(f"{name} {fingerprint(key)}" for name, key in keys.items()) or "none: the node contributes to no sum"
    )


def own_sources(folder: NodeFolder, config: Mapping[str, Value]) -> dict[str, str]:
    """Return the owner's own modules, as module:name, by what they are for."""
    sources = {"method": str(config["method"]), "net": str(config.get("net", "")), "data": folder.config.data}
    return {kind: source for kind, source in sources.items() if ":" in source}


def _present(folder: NodeFolder, config: RunConfig) -> NodePlan:
    """Return a plan with the version, files and settings that the node has now; imports none of the files."""
    files = {kind: module_digests(source.partition(":")[0]) for kind, source in own_sources(folder, config).items()}
    node: dict[str, Value] = {"data": folder.config.data, **folder.privacy.values()}
    plan = NodePlan(fedrema.__version__, config, files, node)
    return replace(plan, node={**node, "peers": _peers(folder)}) if plan.is_secure else plan


def _same(one: Value, other: Value) -> bool:
    return type(one) is type(other) and one == other
