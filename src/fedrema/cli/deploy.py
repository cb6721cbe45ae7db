"""fedrema deploy: its commands, and those that a running federation needs: server, client, status."""

import dataclasses
import importlib
import importlib.util
import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated

import tyro
from rich.table import Table

from fedrema.base.terminal import Console, print_safe, safe
from fedrema.config.settings import parse_arguments
from fedrema.errors import BadInput

Folder = Annotated[Path, tyro.conf.Positional]
COMMANDS = {
    "init": ("founding", "write a ready federation: app, certificates, keys, start scripts, units, compose file"),
    "server": ("deploy", "conduct the federation; given again, it goes on where it stopped"),
    "client": ("deploy", "take part as a node"),
    "status": ("deploy", "how it stands: round, nodes, who does not count and why"),
    "model": ("deploy", "write a node's own complete model as safetensors, on the node"),
    "add": ("founding", "add a node, also to a federation that is going on"),
    "key": ("founding", "make a node's key anew, on the node"),
    "renew": ("founding", "make the server's certificate anew"),
    "demo": ("founding", "a server and three nodes on this machine; ends by itself"),
}


def deploy(arguments: list[str]) -> int:
    """Call one of the commands."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0
    command, *rest = arguments
    if command not in COMMANDS:
        raise BadInput(f"fedrema deploy {command!r} is unknown; valid are {', '.join(COMMANDS)}.")
    if importlib.util.find_spec("flwr") is None:
        raise BadInput("fedrema deploy needs Flower: pip install 'fedrema[deploy]'.")
    return int(getattr(importlib.import_module(f"fedrema.cli.{COMMANDS[command][0]}"), command)(rest))


@dataclasses.dataclass(frozen=True)
class Place:
    """A folder that fedrema deploy init made."""

    dir: Folder
    """The folder."""


def server(arguments: list[str]) -> int:
    """Serve until all rounds have been played."""
    asked: Place = parse_arguments(
        Place, arguments, "fedrema deploy server", "Conduct a federation; goes on after a stop."
    )
    from fedrema.deploy.folder import ServerFolder
    from fedrema.deploy.services import ServerService

    return ServerService(ServerFolder.open(asked.dir), say).serve()


@dataclasses.dataclass(frozen=True)
class Client(Place):
    """Take part as a node, until stopped."""

    server: str | None = None
    """Address of the server, host:port, instead of the one in node.toml."""


def client(arguments: list[str]) -> int:
    """Take part as a node."""
    asked: Client = parse_arguments(Client, arguments, "fedrema deploy client")
    from fedrema.deploy.folder import NodeFolder
    from fedrema.deploy.services import run_node

    folder = NodeFolder.open(asked.dir)
    return run_node(folder if asked.server is None else folder.with_server(asked.server), say)


@dataclasses.dataclass(frozen=True)
class Model:
    """Write a node's own complete model as safetensors, with three lines of plain PyTorch that load it: on the node.

    It is the model of the last message from the server; after the last round that is the final one.
    """

    dir: Folder
    """The node's folder."""
    out: Path | None = None
    """Folder for the model; default: model in the node's folder."""
    overwrite: bool = False
    """Replace a model that was written before."""


def model(arguments: list[str]) -> int:
    """Write a node's model."""
    asked: Model = parse_arguments(Model, arguments, "fedrema deploy model")
    from fedrema.deploy.folder import NodeFolder
    from fedrema.deploy.node_model import export_model

    folder = NodeFolder.open(asked.dir)
    sys.path.insert(0, str(folder.path))  # a network of one's own may lie there
    file = export_model(folder, asked.out, asked.overwrite)
    print_safe(f"Model of {folder.name}: {file} (README.md there tells how to load it)")
    return 0


@dataclasses.dataclass(frozen=True)
class Status:
    """How a federation stands: on the server's machine, while it goes on or after."""

    dir: Folder
    """The server's folder."""
    json: bool = False
    """As JSON, for a monitor."""


def status(arguments: list[str]) -> int:
    """Tell how a federation stands."""
    asked: Status = parse_arguments(Status, arguments, "fedrema deploy status")
    if asked.json:
        from fedrema.deploy.folder import ServerFolder
        from fedrema.deploy.status import read_status

        print(json.dumps(dataclasses.asdict(read_status(ServerFolder.open(asked.dir))), indent=2))
    else:
        show(asked.dir)
    return 0


def _usage() -> str:
    lines = [f"  {name:8}{what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(
        ["usage: fedrema deploy COMMAND [OPTIONS]", "", "The same methods over a real network, on Flower.", "", *lines]
    )


def say(sentence: str) -> None:
    """Print a sentence with the time, unless it brings its own."""
    stamped = sentence if sentence[:4].isdigit() else f"{datetime.now():%Y-%m-%d %H:%M:%S} {sentence}"
    print_safe(stamped, flush=True)


def show(folder: Path) -> None:
    """Print how a federation stands."""
    from fedrema.deploy.folder import ServerFolder
    from fedrema.deploy.status import read_status

    now = read_status(ServerFolder.open(folder))
    console = Console()
    accuracy = "" if now.accuracy is None else f", accuracy {now.accuracy:.1%}"
    console.print(f"{now.method}: {safe(now.state)}; round {now.round} of {now.rounds}{accuracy}", highlight=False)
    if now.checkpoint_age is not None:
        console.print(f"saved {now.checkpoint_age:.0f} s ago; certificate valid for {now.certificate_days} days")
    private = any(member.epsilon is not None for member in now.members)
    table = Table("node", "state", "last counted", "accuracy", *(["ε spent"] if private else []), "trouble", box=None)
    for member in now.members:
        spent = ["–" if member.epsilon is None else f"{member.epsilon:.2f}"] if private else []
        table.add_row(
            *(safe(member.name), member.state, str(member.last_round or "–")),
            *("–" if member.accuracy is None else f"{member.accuracy:.1%}", *spent, safe(member.trouble)),
        )
    console.print(table)
