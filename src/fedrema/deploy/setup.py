"""Creates the folders of a federation: app, certificates, keys, start scripts and service units."""

import ipaddress
import json
import re
import secrets
import shutil
import sys
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template

import fedrema
from fedrema.base.terminal import safe
from fedrema.config.settings import Settings
from fedrema.data import Federation, build_federation
from fedrema.deploy.approval import affecting_nodes
from fedrema.deploy.folder import FORMAT, LONGEST_SHOWN, ServerFolder, check_name
from fedrema.deploy.run_config import NO_FOLDER, Plan, RunConfig, run_config
from fedrema.deploy.tls import (
    make_authority,
    make_node_key,
    make_server_certificate,
    read_certificate,
    write_secret,
)
from fedrema.errors import BadInput

LICENSE = "The Apache License 2.0, like fedrema itself: https://www.apache.org/licenses/LICENSE-2.0\n"


LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?"
HOST = re.compile(rf"(?=.{{1,253}}$){LABEL}(\.{LABEL})*")
"""Valid host names: they become part of certificates, configuration files and addresses."""


def check_hosts(text: str) -> tuple[str, ...]:
    """Return host names and addresses that are separated by commas; refuses any other text."""
    hosts = tuple(host.strip() for host in text.split(",") if host.strip())
    if not hosts:
        raise BadInput("--host must name the server, got an empty value.")
    for host in hosts:
        try:
            ipaddress.ip_address(host)
        except ValueError:
            if not HOST.fullmatch(host):
                shown = safe(host if len(host) <= LONGEST_SHOWN else f"{host[:LONGEST_SHOWN]}…")
                raise BadInput(
                    f"--host: {shown!r} is not a host name or an IP address: use letters, digits, '-' and '.', and "
                    "punycode (xn--…) for other characters."
                ) from None
    return hosts


@dataclass(frozen=True)
class Members:
    """The nodes of a federation, and the addresses of its server."""

    names: tuple[str, ...]
    hosts: tuple[str, ...]
    """Names and addresses of the server; nodes use the first."""
    port: int = 9092

    def __post_init__(self) -> None:
        """Validate names and port."""
        for name in self.names:
            check_name(name)
        if len(set(self.names)) < len(self.names) or not self.names:
            raise BadInput(f"--nodes must name each node once, got {','.join(self.names)!r}.")
        if not 1 <= self.port <= 65534:
            raise BadInput(f"--port must be from 1 to 65534, got {self.port}.")

    @property
    def server(self) -> str:
        """The address by which nodes reach the server."""
        host = self.hosts[0]
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


def create_federation(folder: Path, members: Members, settings: Settings, plan: Plan, partition: bool = False) -> None:
    """Write a federation's folder; if that fails, no folder is left behind.

    With `partition`, the dataset in the settings is partitioned among the nodes, for a trial.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder} already exists: choose another folder.")
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    try:
        _write(temporary, members, settings, plan, _partition(members, settings) if partition else None)
        if folder.exists():
            folder.rmdir()
        temporary.replace(folder)
    except OSError as error:
        raise BadInput(f"cannot write {folder}: {error.strerror}.") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(folder: Path, members: Members, settings: Settings, plan: Plan, samples: Federation | None) -> None:
    server, authority = folder / "server", folder / "authority"
    for subfolder in (server / "keys", server / "app" / "fedrema_app", authority):
        subfolder.mkdir(parents=True)
    make_authority(authority, f"fedrema {folder.name.strip('.')} authority")
    make_server_certificate(authority, server, members.hosts)
    write_secret(server / "superexec.secret", secrets.token_bytes(32))
    ports = {"port": members.port, "control_port": members.port + 1}
    (server / "server.toml").write_text(_filled("server.toml", format=FORMAT, **ports))
    _script(server / "start.sh", "server.sh")
    _unit(server, "fedrema-server.service", "server", "server", "the server of a federation")
    _app(server / "app", settings, plan)
    for row, name in enumerate(members.names):
        add_node(folder, name, members.server, None if samples is None else samples.only(row))
    values = {"port": members.port, "server": members.server, "count": len(members.names)}
    values |= {"title": settings.method.called(), "version": fedrema.__version__}
    nodes = "".join(_filled("compose-node.yaml", name=name, port=members.port) for name in members.names)
    (folder / ".dockerignore").write_text(_template("dockerignore"))
    for file in ("README.md", "Dockerfile", "compose.yaml"):
        (folder / file).write_text(_filled(file, **values, nodes=nodes.rstrip()))


def add_node(folder: Path, name: str, server: str, samples: Federation | None = None) -> Path:
    """Write a node's folder, and add its key to the server's folder."""
    node = folder / "nodes" / check_name(name)
    if node.exists():
        raise BadInput(f"{node} already exists: choose another name, or replace its key with fedrema deploy key.")
    node.mkdir(parents=True)
    (node / "node.toml").write_text(_filled("node.toml", format=FORMAT, name=name, server=server))
    shutil.copy(folder / "server" / "ca.crt", node / "ca.crt")
    (folder / "server" / "keys" / f"{name}.pub").write_bytes(new_key(node))
    config = affecting_nodes(ServerFolder.open(folder).run_config())
    (node / "plan.toml").write_text(_filled("plan.toml", config=_lines(config)))
    if config.get("secure-aggregation"):
        _exchange_keys(folder, name)
    _script(node / "start.sh", "node.sh")
    _unit(node, f"fedrema-{name}.service", "client", name, f"node {name} of a federation")
    if samples is not None:
        samples.save(node / "data.npz")
    return node


def _exchange_keys(folder: Path, name: str) -> None:
    """Place the key of a new node in the folders of the others, and theirs in its own: for secure aggregation."""
    keys, nodes = folder / "server" / "keys", folder / "nodes"
    for other in sorted(each.name for each in nodes.iterdir() if each.name != name):
        for owner, peer in ((name, other), (other, name)):
            (nodes / owner / "peers").mkdir(exist_ok=True)
            shutil.copy(keys / f"{peer}.pub", nodes / owner / "peers" / f"{peer}.pub")


def new_key(node: Path) -> bytes:
    """Replace a node's key; return the new public key."""
    public = make_node_key(node / "node.key")
    (node / "node.pub").write_bytes(public)
    return public


def renew(folder: Path, hosts: tuple[str, ...]) -> None:
    """Renew the server's certificate, signed by the current authority; nothing changes for the nodes."""
    server = ServerFolder.open(folder).path
    following = folder / "authority" / "next"
    # Between the steps of a renewal of the authority, the current one is the one that signed last.
    switched = following.is_dir() and (
        read_certificate(server / "server.crt").issuer == read_certificate(following / "ca.crt").subject
    )
    make_server_certificate(following if switched else folder / "authority", server, hosts)


def _partition(members: Members, settings: Settings) -> Federation:
    """Return the dataset in the settings, partitioned among the nodes."""
    federation = build_federation(settings.data)
    if len(federation) != len(members.names):
        raise BadInput(
            f"--deal: the data has {len(federation)} clients, but --nodes names {len(members.names)}: use --clients"
            f" {len(members.names)}."
        )
    return federation


def _app(folder: Path, settings: Settings, plan: Plan) -> None:
    config = run_config(settings, replace(plan, folder=plan.folder or NO_FOLDER))
    values = {"title": settings.method.called(), "flwr": version("flwr"), "config": _lines(config)}
    (folder / "pyproject.toml").write_text(_filled("app.toml", **values))
    (folder / "README.md").write_text(f"# {settings.method.called()}\n\nA Flower app created by fedrema.\n")
    (folder / "LICENSE").write_text(LICENSE)
    package = folder / "fedrema_app"
    (package / "__init__.py").write_text('"""The app is a part of fedrema, which is installed on all machines."""\n')
    for side in ("client", "server"):
        (package / f"{side}_app.py").write_text(
            f'"""The {side}\'s app."""\n\nfrom fedrema.deploy.{side}_app import app\n\n__all__ = ["app"]\n'
        )


def _lines(config: RunConfig) -> str:
    return "\n".join(f"{name} = {json.dumps(value)}" for name, value in config.items())


def _script(file: Path, template: str) -> None:
    file.write_text(_template(template))
    file.chmod(0o700)


def _unit(folder: Path, unit: str, command: str, name: str, description: str) -> None:
    python = _systemd_word(sys.executable)
    in_home = Path(sys.executable).is_relative_to("/home") or Path(sys.executable).is_relative_to("/root")
    values = {"unit": unit, "command": command, "name": name, "description": description, "python": python}
    (folder / unit).write_text(_filled("unit.service", **values, home="read-only" if in_home else "true"))


def _systemd_word(text: str) -> str:
    """Return one word of a command line in a systemd unit."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"'


def _filled(template: str, **values: object) -> str:
    return Template(_template(template)).substitute(values)


def _template(name: str) -> str:
    return (files("fedrema.deploy") / "templates" / name).read_text(encoding="utf-8")
