"""fedrema deploy init, demo, add, key, renew: what makes a federation, or changes who takes part in it."""

import dataclasses
import json
from typing import Annotated, Any

import tyro

from fedrema.cli.deploy import Folder, Place, say, show
from fedrema.config.settings import Settings, parse_arguments, parse_settings
from fedrema.errors import BadInput


@dataclasses.dataclass(frozen=True)
class Init:
    """Write a ready federation: app, certificates, keys, start scripts, systemd units and a compose file.

    Beside these options: METHOD after DIR, and every setting of fedrema run METHOD.
    """

    dir: Folder
    """Folder to make."""
    nodes: str = "3"
    """Names of the nodes, separated by commas; or how many: node-1, node-2, …"""
    host: str = "localhost"
    """Name or address under which nodes reach the server; several, separated by commas: the first is told to nodes."""
    port: int = 9092
    """Port for nodes; the next one is for commands on the server's machine."""
    deal: bool = False
    """To try it: deal --dataset out to the nodes, a data.npz in each one's folder."""
    sample_shape: str = ""
    """Shape of a sample of the nodes' own data, such as 3x32x32; not needed with --deal."""
    classes: int = 0
    """Number of classes in the nodes' own data, whose labels are then 0, 1, 2, …; not needed with --deal."""
    class_names: str = ""
    """Labels in the nodes' own data, separated by commas, instead of --classes: sick,healthy."""
    least_clients: int = 2
    """A round needs usable replies of at least this many nodes."""
    most_clients: int = 100
    """Room for this many nodes in all, with those that join later."""
    most_samples: int = 0
    """Reject a node that says it has more samples; 0: more than ten times the median node's."""
    most_noise: float = 0.0
    """Allow nodes with a privacy budget this standard deviation of noise, beyond what is usual; 0: none."""
    wait_seconds: float = 600.0
    """Give up when fewer than --least-clients are there, or send usable replies, for so long."""
    round_seconds: float = 300.0
    """End a round after so long; replies that come later do not count."""


def init(arguments: list[str]) -> int:
    """Make a federation's folder."""
    asked, settings = _founding(Init, arguments, "fedrema deploy init")
    from fedrema.deploy.setup import Members, create_federation

    hosts = tuple(host.strip() for host in asked.host.split(",") if host.strip())
    if not hosts:
        raise BadInput("--host must name the server, got nothing.")
    members = Members(_names(asked.nodes), hosts, asked.port)
    create_federation(asked.dir, members, settings, _plan(asked, settings), partition=asked.deal)
    local = settings.local
    batch = f"--batch {local.batch}" if local.batch else "a batch that each node chooses from its number of samples"
    print(f"Training: --lr {local.lr:g}, {batch}, --epochs {local.epochs}, {settings.simulation.rounds} rounds.")
    print(f"Made {asked.dir}; {asked.dir / 'README.md'} says what goes where.")
    print(f"Server:  fedrema deploy server {asked.dir / 'server'}")
    print(f"Node:    fedrema deploy client {asked.dir / 'nodes' / _names(asked.nodes)[0]}")
    return 0


@dataclasses.dataclass(frozen=True)
class Demo(Init):
    """A whole federation on this machine that ends by itself: a server and three nodes, each its own process.

    Beside these options: METHOD after DIR, and every setting of fedrema run METHOD.
    """

    rounds: int = 5
    """How many rounds to play."""


def demo(arguments: list[str]) -> int:
    """Make a federation of a few nodes on this machine, and play it."""
    asked, settings = _founding(Demo, arguments, "fedrema deploy demo", "--deal")
    settings = dataclasses.replace(settings, simulation=dataclasses.replace(settings.simulation, rounds=asked.rounds))
    from fedrema.deploy.demo import run_demo

    plan = dataclasses.replace(_plan(asked, settings), least_clients=len(_names(asked.nodes)))
    code = run_demo(asked.dir, _names(asked.nodes), settings, plan, say)
    if code == 0:
        show(asked.dir)
        print(f"The run is in {asked.dir / 'server' / 'run'}: fedrema compare and fedrema export read it.")
        print(f"A node's own model: fedrema deploy model {asked.dir / 'nodes' / _names(asked.nodes)[0]}")
    return code


@dataclasses.dataclass(frozen=True)
class Add:
    """Add a node; a server that is going on lets it in within seconds."""

    dir: Folder
    """The federation's folder."""
    name: Annotated[str, tyro.conf.Positional]
    """What the node is to be called."""


def add(arguments: list[str]) -> int:
    """Add a node to a federation."""
    asked: Add = parse_arguments(Add, arguments, "fedrema deploy add")
    from fedrema.deploy.folder import NodeFolder
    from fedrema.deploy.setup import add_node

    others = sorted((asked.dir / "nodes").glob("*/node.toml"))
    if not others:
        raise BadInput(f"{asked.dir} holds no nodes: name a folder that fedrema deploy init made.")
    node = add_node(asked.dir, asked.name, NodeFolder.open(others[0].parent).config.server)
    print(
        f"Made {node}: take it to the node. {asked.name} may take part as soon as {asked.dir / 'server'} knows its key."
    )
    return 0


def key(arguments: list[str]) -> int:
    """Make a node's key anew."""
    asked: Place = parse_arguments(
        Place, arguments, "fedrema deploy key", "Make a node's key anew, on the node itself."
    )
    from fedrema.deploy.folder import NodeFolder
    from fedrema.deploy.setup import new_key

    folder = NodeFolder.open(asked.dir)
    new_key(folder.path)
    print(f"Give {folder.path / 'node.pub'} to the server as keys/{folder.name}.pub, then start the node again.")
    return 0


@dataclasses.dataclass(frozen=True)
class Renew:
    """Make the server's certificate anew, by the same authority; nodes need nothing new."""

    dir: Folder
    """The federation's folder, with authority/ and server/."""
    host: str = "localhost"
    """Names and addresses under which nodes reach the server, separated by commas."""


def renew(arguments: list[str]) -> int:
    """Renew the server's certificate."""
    asked: Renew = parse_arguments(Renew, arguments, "fedrema deploy renew")
    from fedrema.deploy.setup import renew as renew_certificate

    renew_certificate(asked.dir, tuple(asked.host.split(",")))
    print(f"Made {asked.dir / 'server' / 'server.crt'} anew: start the server again.")
    return 0


def _founding(kind: type[Init], arguments: list[str], prog: str, *more: str) -> tuple[Any, Settings]:
    """Take apart what is for the federation and what is for the method: DIR [METHOD] [OPTIONS of both]."""
    places = 2 if len(arguments) > 1 and not arguments[1].startswith("-") else 1
    own, rest = _apart(kind, arguments[places:])
    asked = parse_arguments(kind, [*arguments[:1], *own, *more], prog)
    if asked.deal:
        rest = ["--clients", str(len(_names(asked.nodes))), *rest]
    else:
        from fedrema.deploy.run_config import HELD_BY_NODES

        rest = [*rest, "--federation", HELD_BY_NODES]
    return asked, parse_settings(arguments[1] if places == 2 else "fedrema", rest, prog).fitted(None)


def _apart(kind: type[Init], arguments: list[str]) -> tuple[list[str], list[str]]:
    stands_alone = {"--deal": True, "--no-deal": True, "--help": True, "-h": True}
    flags = {f"--{field.name.replace('_', '-')}": False for field in dataclasses.fields(kind)} | stands_alone
    own: list[str] = []
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        option = word.partition("=")[0]
        (own if option in flags else rest).append(word)
        if option in flags and not flags[option] and "=" not in word:
            own += [value for value in (next(words, None),) if value is not None]
    return own, rest


def _names(nodes: str) -> tuple[str, ...]:
    if nodes.isdigit():
        return tuple(f"node-{number}" for number in range(1, int(nodes) + 1))
    return tuple(name.strip() for name in nodes.split(","))


def _plan(asked: Init, settings: Settings) -> Any:
    from fedrema.data import build_federation
    from fedrema.deploy.run_config import Plan
    from fedrema.deploy.setup import NO_FOLDER

    shape, classes = asked.sample_shape, asked.classes
    names = tuple(name.strip() for name in asked.class_names.split(",")) if asked.class_names else ()
    if asked.deal:
        federation = build_federation(settings.data)
        shape, classes = "x".join(map(str, federation.sample_shape)), federation.classes
        names = federation.own_class_names
    elif not shape or not (classes or names):
        raise BadInput(
            "--sample-shape and --classes must say what the nodes' own data is like (or --class-names); or --deal, to"
            " try it."
        )
    elif classes and names:
        raise BadInput("--classes and --class-names exclude each other: give one of them.")
    elif len(set(names)) < len(names) or "" in names:
        raise BadInput(f"--class-names must name each class once, got {asked.class_names!r}.")
    named = json.dumps(names) if names else ""
    limited = ("least_clients", "most_clients", "most_samples", "most_noise", "wait_seconds", "round_seconds")
    limits = {name: getattr(asked, name) for name in limited}
    return Plan(NO_FOLDER, shape, len(names) or classes, named, **limits)
