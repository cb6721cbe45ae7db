"""fedrema deploy: its commands, and those that run a federation: server, client, status, model."""

import dataclasses
import importlib
import importlib.util
import json
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Column, Table

from fedrema.base.files import private_files
from fedrema.base.terminal import Console, print_safe, safe
from fedrema.cli.arguments import asks_for_help, parse_arguments, positional
from fedrema.errors import BadInput, unknown

if TYPE_CHECKING:
    from fedrema.deploy.status import FederationStatus

HEALTHY = ("starting", "running", "finished")
"""States of a federation that need no attention."""
COMMANDS = {
    "init": ("deploy_setup", "create a federation: app, certificates, keys, start scripts"),
    "server": ("deploy", "run the server, or resume it after the last completed round"),
    "approve": ("deploy", "show the plan of a node and approve it, on the node"),
    "client": ("deploy", "run a node"),
    "status": ("deploy", "show the round, the nodes, and why a node does not participate"),
    "check": ("deploy_check", "test ports, certificates, clock, versions and data before a start"),
    "audit": ("deploy_check", "verify the audit log of a server or a node, and print it"),
    "model": ("deploy", "write a node's complete personal model as safetensors, on the node"),
    "add": ("deploy_setup", "add a node, also while the federation is running"),
    "key": ("deploy_setup", "replace a node's key, on the node"),
    "renew": ("deploy_setup", "renew the server's certificate"),
    "forget": ("deploy_setup", "delete what the server holds about a node that has left"),
    "demo": ("deploy_setup", "run a server and three nodes on this machine for a few rounds"),
}


def deploy(arguments: list[str]) -> int:
    """Run one of the commands."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0
    command, *rest = arguments
    if command not in COMMANDS:
        raise unknown("fedrema deploy", command, COMMANDS)
    if importlib.util.find_spec("flwr") is None and not asks_for_help(rest):
        raise BadInput("fedrema deploy needs Flower: pip install 'fedrema[deploy]'.")
    if not asks_for_help(rest):
        from fedrema.deploy.connection import exempt_local_addresses

        exempt_local_addresses()
    with private_files():
        return int(getattr(importlib.import_module(f"fedrema.cli.{COMMANDS[command][0]}"), command)(rest))


@dataclasses.dataclass(frozen=True)
class Server:
    """Run the server of a federation until all rounds are completed; after a stop, resume from the last checkpoint."""

    dir: Path = positional()
    """The federation's folder, or its subfolder server."""


def server(arguments: list[str]) -> int:
    """Run the server until all rounds are completed."""
    args = parse_arguments(Server, arguments, "fedrema deploy server")
    from fedrema.deploy.folder import ServerFolder
    from fedrema.deploy.services import ServerService

    return ServerService(ServerFolder.open(args.dir), say).serve()


@dataclasses.dataclass(frozen=True)
class Approve:
    """Show the plan of a node and approve it: method, settings, and the digests of your own code.

    Run it on the node, once. The node trains with this plan only, and refuses every request of the server that differs
    from it. Nothing that the server sends is ever executed.
    """

    dir: Path = positional()
    """The node's folder, such as hospitals/nodes/north."""
    plan: Path | None = None
    """File with the plan: the server's app/pyproject.toml. Default: plan.toml in the node's folder."""
    show: bool = False
    """Only show the plan, and approve nothing."""
    repeat_from: int = 0
    """Permit the server to repeat this round and later ones with other models, after it was restored from a backup; 1
    also permits another agreement on tables. 0: permit no repetition."""


def approve(arguments: list[str]) -> int:
    """Show a node's plan, and store it as approved."""
    args = parse_arguments(Approve, arguments, "fedrema deploy approve")
    from fedrema.deploy import approval
    from fedrema.deploy.folder import NodeFolder

    folder = NodeFolder.open(args.dir)
    sys.path.insert(0, str(folder.path))  # it may contain the owner's own method, network or data module
    plan = approval.proposed_plan(folder, args.plan)
    for line in plan.lines():
        print_safe(line)
    if args.show:
        return 0
    approval.approve(folder, plan, args.repeat_from)
    print_safe(f"Approved: {folder.approval_file}")
    if args.repeat_from:
        print_safe(f"The server may repeat round {args.repeat_from} and later ones once.")
    return 0


@dataclasses.dataclass(frozen=True)
class Client:
    """Run a node until it is stopped."""

    dir: Path = positional()
    """The node's folder, such as hospitals/nodes/north."""
    server: str | None = None
    """Address of the server as host:port, instead of the one in node.toml."""


def client(arguments: list[str]) -> int:
    """Run a node."""
    args = parse_arguments(Client, arguments, "fedrema deploy client")
    from fedrema.deploy.first_connection import first_problem

    if problem := first_problem(args.dir, args.server):
        say(problem)
    from fedrema.deploy.folder import NodeFolder
    from fedrema.deploy.node_service import run_node

    folder = NodeFolder.open(args.dir)
    return run_node(folder if args.server is None else folder.with_server(args.server), say, problem)


@dataclasses.dataclass(frozen=True)
class Model:
    """Write a node's complete personal model as safetensors, with a README that shows how to load it in plain PyTorch.

    Run it on the node. The model has the parameters that the server sent last and the node's private parameters; after
    the last round, it is the final model.
    """

    dir: Path = positional()
    """The node's folder, such as hospitals/nodes/north."""
    out: Path | None = None
    """Folder for the model. Default: model in the node's folder."""
    overwrite: bool = False
    """Replace a model that was written before."""


def model(arguments: list[str]) -> int:
    """Write a node's model."""
    args = parse_arguments(Model, arguments, "fedrema deploy model")
    from fedrema.deploy.audit_service import record_export
    from fedrema.deploy.folder import NodeFolder
    from fedrema.deploy.node_model import export_model

    folder = NodeFolder.open(args.dir)
    sys.path.insert(0, str(folder.path))  # it may contain the module of the user's network
    file = export_model(folder, args.out, args.overwrite)
    record_export(folder.path, folder.name, file, f"to {file}")
    print_safe(f"Model of {folder.name}: {file} (its README.md shows how to load it)")
    return 0


@dataclasses.dataclass(frozen=True)
class Status:
    """Show the status of a federation, running or not, on the server's machine."""

    dir: Path = positional()
    """The federation's folder, or its subfolder server."""
    json: bool = False
    """Print JSON, for monitoring tools."""
    healthy: bool = False
    """Exit with code 1 unless the server runs or has completed all rounds, for health checks."""


def status(arguments: list[str]) -> int:
    """Print the status of a federation."""
    args = parse_arguments(Status, arguments, "fedrema deploy status")
    from fedrema.deploy.folder import ServerFolder
    from fedrema.deploy.status import read_status

    federation = read_status(ServerFolder.open(args.dir))
    if args.json:
        print(json.dumps(dataclasses.asdict(federation), indent=2))
    else:
        show(federation)
    return 1 if args.healthy and federation.state not in HEALTHY else 0


def _usage() -> str:
    lines = [f"  {name:8}{what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: fedrema deploy COMMAND [OPTIONS]",
            "",
            "Train with the same methods on a real network of machines.",
            "",
            *lines,
        ]
    )


def say(sentence: str) -> None:
    """Print a sentence with the time, unless it begins with one."""
    stamped = sentence if sentence[:4].isdigit() else f"{datetime.now():%Y-%m-%d %H:%M:%S} {sentence}"
    print_safe(stamped, flush=True)


def show(federation: "FederationStatus") -> None:
    """Print the status of a federation as a table."""
    from fedrema.deploy.scores import shown
    from fedrema.tasks import find_metric

    console = Console()
    metric = find_metric(federation.metric or "accuracy")
    value = "" if federation.value is None else f", {metric.title} {shown(metric, federation.value)}"
    progress = f"round {federation.round} of {federation.rounds}"
    console.print(f"{federation.method}: {safe(federation.state)}; {progress}{value}", highlight=False)
    if federation.checkpoint_age is not None:
        saved = f"last checkpoint saved {federation.checkpoint_age:.0f} s ago"
        console.print(f"{saved}; certificate valid for {federation.certificate_days} days")
    private = any(member.epsilon is not None for member in federation.members)
    node = Column("node", no_wrap=True)
    table = Table(node, "state", "last used", metric.title, *(["ε spent"] if private else []), "problem", box=None)
    for member in federation.members:
        spent = ["–" if member.epsilon is None else f"{member.epsilon:.2f}"] if private else []
        table.add_row(
            *(safe(member.name), member.state, str(member.last_round or "–")),
            *("–" if member.value is None else shown(metric, member.value), *spent, safe(member.problem)),
        )
    console.print(table)
    for key in federation.rejected_keys:
        whose = f" of node {key.name}" if key.name else ""
        console.print(f"rejected key{whose} {key.fingerprint}: {key.reason} ({key.attempts} attempts, last {key.last})")
