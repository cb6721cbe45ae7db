"""fedrema deploy init, demo, add, key, renew, forget: create a federation, or change its nodes and certificates."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from fedrema.cli.arguments import (
    asks_for_help,
    fill,
    parse_arguments,
    parse_options,
    positional,
    run_options,
)
from fedrema.cli.deploy import say, show
from fedrema.cli.option_help import options_of
from fedrema.config.presets import Values
from fedrema.config.settings import Settings, make_settings
from fedrema.data import Federation, build_federation
from fedrema.data.roles import TaskChoice
from fedrema.errors import BadInput, describe

DEMO_ROUNDS = 5
MOST_NODES = 1000


@dataclasses.dataclass(frozen=True)
class Init:
    """Create a federation: app, certificates, keys, start scripts, systemd units and a compose file.

    All options of fedrema run METHOD are accepted as well.
    """

    dir: Path = positional()
    """The folder to create."""
    method: str = positional("fedrema")
    """The method; your own as module:Class."""
    nodes: str = "3"
    """Names of the nodes, separated by commas; or their number, for node-1, node-2, …"""
    host: str = "localhost"
    """Host names or addresses of the server, separated by commas; nodes connect to the first."""
    port: int = 9092
    """Port for the nodes; the next one is used by commands on the server's machine."""
    deal: bool = False
    """For a trial: partition --dataset among the nodes, as data.npz in each node's folder."""
    sample_shape: str = ""
    """Shape of a sample in the nodes' own data, such as 3x32x32; not needed with --deal, and for tables."""
    classes: int = 0
    """Number of classes, levels or labels in the nodes' own data, numbered from 0; not needed with --deal, for tables,
    and for quantities and counts."""
    class_names: str = ""
    """Classes in the nodes' own data, separated by commas, instead of --classes: sick,healthy."""
    example: Path | None = None
    """For tables: a table with the columns of the nodes' tables, instead of --columns, --target and --task."""
    least_clients: int = 2
    """A round needs usable replies from at least this many nodes."""
    most_clients: int = 100
    """Largest number of nodes, including those that join later."""
    rare_classes: bool = False
    """A class has less than 10 % of the samples: nodes draw test splits that are stratified by class, and log loss is
    the primary metric. Default: with --example or --deal, as in their samples."""
    most_samples: int = 0
    """Reject a node that reports more samples than this; 0: more than ten times the median."""
    most_noise: float = 0.0
    """Largest standard deviation of noise that nodes with a privacy budget may add to their updates; 0: none."""
    secure_threshold: float = 0.67
    """With --secure-aggregation: more than this share of a node and its neighbours must complete a round."""
    secure_neighbours: int = 0
    """With --secure-aggregation: with how many nodes each exchanges shares, an even number; 0: all, at most 32."""
    secure_least: int = 3
    """With --secure-aggregation: nodes contribute only to sums over at least this many nodes."""
    wait_seconds: float = 600.0
    """Stop if fewer than --least-clients nodes are connected, or send usable replies, for this many seconds."""
    round_seconds: float = 300.0
    """End a round after this many seconds; later replies are rejected."""


def init(arguments: list[str]) -> int:
    """Create a federation's folder."""
    args, settings = _parse(Init, arguments, "fedrema deploy init")
    from fedrema.deploy.setup import Members, check_hosts, create_federation

    members = Members(_names(args.nodes), check_hosts(args.host), args.port)
    settings = _for_tables(args, settings)
    create_federation(args.dir, members, settings, _plan(args, settings), partition=args.deal)
    local = settings.local
    batch = f"--batch {local.batch}" if local.batch else "a batch that each node chooses from its number of samples"
    print(f"Training: --lr {local.lr:g}, {batch}, --epochs {local.epochs}, {settings.simulation.rounds} rounds.")
    print(f"Created {args.dir}; {args.dir / 'README.md'} explains its folders.")
    print(f"Server:  fedrema deploy server {args.dir / 'server'}")
    node = args.dir / "nodes" / _names(args.nodes)[0]
    print(f"Node:    fedrema deploy approve {node}, then fedrema deploy client {node}")
    return 0


@dataclasses.dataclass(frozen=True)
class Demo(Init):
    """Run a federation on this machine for a few rounds: a server and three nodes, each in its own process.

    All options of fedrema run METHOD are accepted as well.
    """

    rounds: int = DEMO_ROUNDS
    """Number of rounds."""


def demo(arguments: list[str]) -> int:
    """Create a federation of a few nodes on this machine, and run it."""
    args, settings = _parse(Demo, arguments, "fedrema deploy demo", {"deal": True, "rounds": DEMO_ROUNDS})
    from fedrema.deploy.demo import run_demo
    from fedrema.deploy.folder import ServerFolder
    from fedrema.deploy.status import read_status

    settings = _for_tables(args, settings)
    plan = dataclasses.replace(_plan(args, settings), least_clients=len(_names(args.nodes)))
    code = run_demo(args.dir, _names(args.nodes), settings, plan, say)
    if code == 0:
        show(read_status(ServerFolder.open(args.dir)))
        print(f"Run: {args.dir / 'server' / 'run'}  (for fedrema compare, export and report)")
        print(f"A node's personal model: fedrema deploy model {args.dir / 'nodes' / _names(args.nodes)[0]}")
    return code


@dataclasses.dataclass(frozen=True)
class Add:
    """Add a node; a running server accepts it within seconds."""

    dir: Path = positional()
    """The federation's folder."""
    name: str = positional()
    """The name of the node."""


def add(arguments: list[str]) -> int:
    """Add a node to a federation."""
    args = parse_arguments(Add, arguments, "fedrema deploy add")
    from fedrema.deploy.folder import NodeFolder
    from fedrema.deploy.setup import add_node

    others = sorted((args.dir / "nodes").glob("*/node.toml"))
    if not others:
        raise BadInput(f"{args.dir} holds no nodes: name the folder that fedrema deploy init created.")
    node = add_node(args.dir, args.name, NodeFolder.open(others[0].parent).config.server)
    print(f"Created {node}: copy it to the node, and approve its plan there (fedrema deploy approve).")
    print(f"{args.name} can connect once {args.dir / 'server'} has its key.")
    return 0


@dataclasses.dataclass(frozen=True)
class Key:
    """Replace a node's key; run it on the node."""

    dir: Path = positional()
    """The node's folder, such as hospitals/nodes/north."""


def key(arguments: list[str]) -> int:
    """Replace a node's key."""
    args = parse_arguments(Key, arguments, "fedrema deploy key")
    from fedrema.deploy.audit import AuditLog, Entry, Event
    from fedrema.deploy.folder import NodeFolder
    from fedrema.deploy.setup import new_key
    from fedrema.deploy.tls import fingerprint, public_half

    folder = NodeFolder.open(args.dir)
    new_key(folder.path)
    key = fingerprint(public_half(folder.path / "node.key"))
    AuditLog(folder.path, folder.name).append(Entry(Event.KEY_REPLACED, folder.name, key))
    print(f"Copy {folder.path / 'node.pub'} to the server as keys/{folder.name}.pub, then restart the node.")
    return 0


@dataclasses.dataclass(frozen=True)
class Renew:
    """Renew the server's certificate with the same certificate authority; nothing changes for the nodes.

    A running server uses the new certificate for new connections within seconds, and no node is disconnected. With
    --authority, the authority itself is renewed, in three steps.
    """

    dir: Path = positional()
    """The federation's folder, with authority/ and server/."""
    host: str = "localhost"
    """Host names or addresses of the server, separated by commas."""
    authority: Literal["none", "prepare", "switch", "retire"] = "none"
    """Step of a renewal of the authority; after each, copy server/ca.crt to the nodes."""


def renew(arguments: list[str]) -> int:
    """Renew the server's certificate, or the authority."""
    args = parse_arguments(Renew, arguments, "fedrema deploy renew")
    from fedrema.deploy import setup
    from fedrema.deploy.audit import SERVER, AuditLog, Entry, Event
    from fedrema.deploy.authority import renew_authority
    from fedrema.deploy.folder import ServerFolder

    hosts, server = setup.check_hosts(args.host), ServerFolder.open(args.dir).path
    if args.authority != "none":
        renew_authority(args.dir, args.authority, hosts)
        done = f"authority: {args.authority}"
    else:
        setup.renew(args.dir, hosts)
        done = f"for {', '.join(hosts)}"
    AuditLog(server, SERVER).append(Entry(Event.CERTIFICATE_RENEWED, decision=done))
    if args.authority != "retire":
        print(f"Wrote {server / 'server.crt' if args.authority != 'prepare' else server / 'ca.crt'}.")
    if args.authority != "prepare":
        print("If this is the server's machine, new connections use it within seconds; else copy server.crt and")
        print("server.key to the server's folder.")
    if args.authority != "none":
        print(f"Copy {server / 'ca.crt'} to every node as ca.crt; a running node uses it within seconds.")
    if args.authority == "prepare":
        print("Then restart the server once, and continue with --authority switch when all nodes have the file.")
    return 0


@dataclasses.dataclass(frozen=True)
class Forget:
    """Delete what the server holds about a node that has left: its key, personal parameters, scores and records.

    Run it on the server's machine, while the server is stopped. What other parameters have learned from the node cannot
    be removed, and the audit log keeps its lines.
    """

    dir: Path = positional()
    """The federation's folder, or its subfolder server."""
    name: str = positional()
    """The name of the node."""
    remove_key: bool = False
    """Also remove the node's key, if it is still registered."""


def forget(arguments: list[str]) -> int:
    """Remove a node from the server's folder."""
    args = parse_arguments(Forget, arguments, "fedrema deploy forget")
    from fedrema.base.terminal import print_safe
    from fedrema.deploy.folder import ServerFolder, check_name
    from fedrema.deploy.forget import forget, kept_about

    folder = ServerFolder.open(args.dir)
    sys.path.insert(0, str(folder.path))  # it may contain the module of the user's method or network
    check_name(args.name)
    forget(folder, args.name, args.remove_key, lambda sentence: print_safe(f"{args.name}: {sentence}"))
    print_safe(f"{args.name} is forgotten. What remains:")
    for sentence in kept_about(folder.path.parent, args.name):
        print_safe(f"- {sentence}")
    return 0


Command = TypeVar("Command", bound=Init)


def _parse(
    kind: type[Command], arguments: list[str], prog: str, defaults: Values | None = None
) -> tuple[Command, Settings]:
    """Return the options of the federation and the settings of the run, from DIR [METHOD] [OPTIONS of both]."""
    if asks_for_help(arguments):
        parse_arguments(kind, arguments, prog)
    has_method = len(arguments) > 1 and not arguments[1].startswith("-")
    method = arguments[1] if has_method else Init.method
    own = options_of(kind)
    shared = [option for option in run_options([method]) if option.name not in {each.name for each in own}]
    given = {**(defaults or {}), **parse_options([*own, *shared], arguments, prog)}
    args = fill(kind, given, prog)
    of_the_run = {option.name.replace("-", "_") for option in run_options([method])}
    values = {name: value for name, value in given.items() if name in of_the_run}
    if args.deal:
        values = {"clients": len(_names(args.nodes)), **values}
    else:
        from fedrema.deploy.run_config import HELD_BY_NODES

        values["federation"] = HELD_BY_NODES
    settings = make_settings(method, values, prog, deployed=True).fitted(None)
    for name in ("dp", "attack", "defence"):
        if (chosen := getattr(settings.simulation, name)) != "none":
            raise BadInput(
                f"--{name} {chosen} is for simulations only; in a deployment, privacy-clip and privacy-noise in"
                " node.toml protect a node, and the server always bounds the norms of updates."
            )
    if settings.simulation.secure_aggregation:
        from fedrema.runs.secure_coverage import dummy_coverage

        dummy_coverage(settings.method)[0].check(settings.method)
    return args, settings


def _names(nodes: str) -> tuple[str, ...]:
    if nodes.isdecimal():
        if len(nodes) > 4 or int(nodes) > MOST_NODES:
            raise BadInput(f"--nodes must be names, or a number from 1 to {MOST_NODES}, got {describe(nodes)}.")
        return tuple(f"node-{number}" for number in range(1, int(nodes) + 1))
    return tuple(name.strip() for name in nodes.split(","))


def _for_tables(args: Init, settings: Settings) -> Settings:
    """Return the settings with the columns, the target and the task of the example, if there is one."""
    if args.deal and settings.data.categories == "embed":
        return settings.for_columns(build_federation(settings.data))
    if args.example is None or args.deal:
        return settings
    from fedrema.data import read_user_table
    from fedrema.data.table_targets import infer_task

    data = settings.data
    table = read_user_table(str(args.example), data.table_options, client="example")
    for name in (*table.inputs, *table.targets):
        if "," in name:
            raise BadInput(f"--example {args.example}: column {name!r} has a comma in its name: rename it.")
    task: str = data.task
    if task == "auto" and len(table.targets) > 1:
        task = "multilabel"
    elif task == "auto":
        inferred = infer_task(next(iter(table.targets.values())))
        task = "multiclass" if inferred == "binary" else inferred  # the nodes may have more classes
    columns, target = ",".join(table.inputs), ",".join(table.targets)
    found = dataclasses.replace(data, columns=columns, target=target, task=cast(TaskChoice, task))
    return dataclasses.replace(settings, data=found)


def _plan(args: Init, settings: Settings) -> Any:
    from fedrema.deploy.run_config import NO_FOLDER, Plan

    names = tuple(name.strip() for name in args.class_names.split(",")) if args.class_names else ()
    if args.classes and names:
        raise BadInput("--classes and --class-names exclude each other: give one of them.")
    if len(set(names)) < len(names) or "" in names:
        raise BadInput(f"--class-names must name each class once, got {args.class_names!r}.")
    if args.deal:
        values = _plan_of(build_federation(settings.data), settings)
    elif settings.data.columns:
        values = _plan_for_tables(args, settings, names)
    else:
        values = _plan_for_arrays(args, settings, names)
    values["rare_classes"] = values.get("rare_classes") or args.rare_classes or _is_rare(args, settings)
    limited = ("least_clients", "most_clients", "most_samples", "most_noise", "wait_seconds", "round_seconds")
    secure = ("secure_threshold", "secure_neighbours", "secure_least")
    if not settings.simulation.secure_aggregation:
        for name in secure:
            if getattr(args, name) != getattr(Plan, name):
                raise BadInput(f"--{name.replace('_', '-')} has no effect without --secure-aggregation.")
    elif len(_names(args.nodes)) < args.secure_least:
        raise BadInput(
            f"--secure-least {args.secure_least} needs at least as many nodes, but --nodes names"
            f" {len(_names(args.nodes))}: add nodes, or allow smaller sums with --secure-least."
        )
    return Plan(NO_FOLDER, **values, **{name: getattr(args, name) for name in (*limited, *secure)})


def _is_rare(args: Init, settings: Settings) -> bool:
    """Return whether a class is rare in the table of --example."""
    if args.example is None or args.deal or settings.data.task not in ("binary", "multiclass"):
        return False
    import numpy as np

    from fedrema.data import read_user_table
    from fedrema.data.rare_classes import has_rare_class
    from fedrema.data.table_targets import target_codes

    table = read_user_table(str(args.example), settings.data.table_options, client="example")
    return has_rare_class(np.bincount(target_codes(table)))


def _plan_of(federation: Federation, settings: Settings) -> dict[str, Any]:
    """Return the values of the plan that describe a federation that is known completely."""
    task, names = federation.task, federation.own_class_names
    values: dict[str, Any] = {
        "sample_shape": "x".join(map(str, federation.sample_shape)),
        "classes": federation.classes,
        "class_names": json.dumps(names) if names else "",
        "rare_classes": task.rare,
    }
    if not task.has_softmax:
        values["task"] = task.name
    if not task.has_classes:
        values |= {"target_centre": task.centre, "target_scale": task.scale}
    elif settings.local.class_weights == "balanced":
        values["class_counts"] = json.dumps(federation.label_counts("train").sum(axis=0).tolist())
    return values


def _plan_for_tables(args: Init, settings: Settings, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the values of the plan for nodes whose data are tables."""
    from fedrema.deploy.agreement import listed
    from fedrema.deploy.run_config import COLUMNS

    if args.sample_shape:
        raise BadInput("--sample-shape is for arrays, --columns and --example are for tables: give one of them.")
    task, targets = settings.data.task, listed(settings.data.target)
    if not targets:
        raise BadInput("--target must name the column to predict in the nodes' tables.")
    if task == "auto" and len(targets) > 1:
        task = "multilabel"
    if task == "auto" and not names and not args.classes:
        raise BadInput("--task must say what the nodes predict, unless --class-names or --example does.")
    if task == "multilabel":
        names = targets
    elif len(targets) > 1:
        raise BadInput(f"--task {task} needs one --target, got {settings.data.target}.")
    quantity = task in ("regression", "count")
    if quantity and (names or args.classes):
        raise BadInput(f"--task {task} has no classes: leave --classes and --class-names out.")
    return {
        "sample_shape": COLUMNS,
        "classes": 1 if quantity else len(names) or args.classes,
        "class_names": json.dumps(names) if names else "",
        "task": "" if task in ("auto", "multiclass") else task,
    }


def _plan_for_arrays(args: Init, settings: Settings, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the values of the plan for nodes whose data are arrays."""
    task = settings.data.task
    quantity = task in ("regression", "count")
    if not args.sample_shape or not (args.classes or names or quantity):
        raise BadInput(
            "--sample-shape and --classes must describe the nodes' own data (or --class-names, or --task regression;"
            " for tables, --columns or --example); for a trial, --deal partitions a dataset instead."
        )
    if quantity and (names or args.classes):
        raise BadInput(f"--task {task} has no classes: leave --classes and --class-names out.")
    return {
        "sample_shape": args.sample_shape,
        "classes": 1 if quantity else len(names) or args.classes,
        "class_names": json.dumps(names) if names else "",
        "task": "" if task in ("auto", "multiclass", "binary") else task,
    }
