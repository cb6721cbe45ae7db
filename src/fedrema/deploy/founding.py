"""Writes everything that a federation on the network needs: app, certificates, keys, scripts, units."""

import json
import secrets
import shutil
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from string import Template

import fedrema
from fedrema.config.settings import Settings
from fedrema.data import Federation, build_federation
from fedrema.deploy.keys import make_authority, make_node_key, make_server_certificate, public_half, write_secret
from fedrema.deploy.places import ServerPlace, check_name
from fedrema.deploy.plan import Plan, run_config
from fedrema.errors import BadInput

LICENSE = "The Apache License 2.0, as fedrema itself: https://www.apache.org/licenses/LICENSE-2.0\n"
UNKNOWN = "/unknown"
"""Stands for the run's folder in the app's settings; the server puts its own in when it starts."""


@dataclass(frozen=True)
class Founding:
    """Who takes part, and where the server is."""

    names: tuple[str, ...]
    hosts: tuple[str, ...]
    port: int = 9092
    dealt: bool = False

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        for name in self.names:
            check_name(name)
        if len(set(self.names)) < len(self.names) or not self.names:
            raise BadInput(f"--nodes must name each node once, got {','.join(self.names)!r}.")
        if not 1 <= self.port <= 65534:
            raise BadInput(f"--port must be from 1 to 65534, got {self.port}.")


def found(folder: Path, founding: Founding, settings: Settings, plan: Plan) -> None:
    """Write a federation's folder, whole or not at all."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise BadInput(f"{folder} already exists: choose another folder.")
    made = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
    try:
        _write(made, founding, settings, plan)
        if folder.exists():
            folder.rmdir()
        made.replace(folder)
    except OSError as error:
        raise BadInput(f"cannot write {folder}: {error.strerror}.") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _write(folder: Path, founding: Founding, settings: Settings, plan: Plan) -> None:
    server, authority = folder / "server", folder / "authority"
    for made in (server / "keys", server / "app" / "fedrema_app", authority):
        made.mkdir(parents=True)
    authority.chmod(0o700)
    make_authority(authority, f"fedrema {folder.name.strip('.')} authority")
    make_server_certificate(authority, server, founding.hosts)
    write_secret(server / "superexec.secret", secrets.token_bytes(32))
    (server / "server.toml").write_text(
        f"# Nodes come to this port; only what a node needs is answered there.\nport = {founding.port}\n"
        f'listen = "0.0.0.0"\n# Commands on this machine use this one, which no other machine can reach.\n'
        f"control-port = {founding.port + 1}\n"
    )
    _script(server / "start.sh", "server.sh")
    _unit(server, "fedrema-server.service", "server", "server", "the server of a federation")
    _app(server / "app", settings, plan)
    dealt = _dealt(founding, settings)
    for row, name in enumerate(founding.names):
        add_node(folder, name, f"{founding.hosts[0]}:{founding.port}", None if dealt is None else dealt.only(row))
    told = {"port": founding.port, "server": f"{founding.hosts[0]}:{founding.port}"}
    told |= {"count": len(founding.names), "title": settings.method.called(), "version": fedrema.__version__}
    nodes = "".join(_filled("compose-node.yaml", name=name, port=founding.port) for name in founding.names)
    for file in ("README.md", "Dockerfile", "compose.yaml"):
        (folder / file).write_text(_filled(file, **told, nodes=nodes.rstrip()))


def add_node(folder: Path, name: str, server: str, samples: Federation | None = None) -> Path:
    """Write a node's folder, and let the server know its key."""
    node = folder / "nodes" / check_name(name)
    if node.exists():
        raise BadInput(f"{node} already exists: choose another name, or rotate its key with fedrema deploy key.")
    node.mkdir(parents=True)
    node.chmod(0o700)
    (node / "node.toml").write_text(
        f'name = "{name}"\nserver = "{server}"\n# Its samples: a .npz with x and y (beside this file, or an absolute'
        " path), a folder of\n# .npz files, or module:function, with the module in this folder or installed.\n"
        'data = "data.npz"\n# What leaves the node can be clipped and blurred; docs/deploy.md explains these.\n'
        "# privacy-clip = 1.0\n# privacy-noise = 1.0\n# privacy-delta = 1e-5\n# privacy-budget = 8.0\n"
    )
    shutil.copy(folder / "server" / "ca.crt", node / "ca.crt")
    (folder / "server" / "keys" / f"{name}.pub").write_bytes(new_key(node))
    _script(node / "start.sh", "node.sh")
    _unit(node, f"fedrema-{name}.service", "client", name, f"node {name} of a federation")
    if samples is not None:
        samples.save(node / "data.npz")
    return node


def new_key(node: Path) -> bytes:
    """Make a node's key anew; returns the public half."""
    make_node_key(node / "node.key")
    public = public_half(node / "node.key")
    (node / "node.pub").write_bytes(public)
    return public


def renew(folder: Path, hosts: tuple[str, ...]) -> None:
    """Make the server's certificate anew, by the same authority: nodes need nothing new."""
    place = ServerPlace.open(folder)
    make_server_certificate(folder / "authority", place.path, hosts)


def _dealt(founding: Founding, settings: Settings) -> Federation | None:
    if not founding.dealt:
        return None
    federation = build_federation(settings.data)
    if len(federation) != len(founding.names):
        raise BadInput(
            f"--deal: the data is of {len(federation)} clients, but --nodes names {len(founding.names)}; --clients"
            f" {len(founding.names)} would fit."
        )
    return federation


def _app(folder: Path, settings: Settings, plan: Plan) -> None:
    config = run_config(settings, replace(plan, folder=plan.folder or UNKNOWN))
    lines = "\n".join(f"{name} = {json.dumps(value)}" for name, value in config.items())
    told = {"title": settings.method.called(), "flwr": version("flwr"), "config": lines}
    (folder / "pyproject.toml").write_text(_filled("app.toml", **told))
    (folder / "README.md").write_text(f"# {settings.method.called()}\n\nA Flower app made by fedrema.\n")
    (folder / "LICENSE").write_text(LICENSE)
    package = folder / "fedrema_app"
    (package / "__init__.py").write_text('"""The app is a part of fedrema, which is installed."""\n')
    for side in ("client", "server"):
        (package / f"{side}_app.py").write_text(
            f'"""The {side}\'s app."""\n\nfrom fedrema.deploy.{side}_app import app\n\n__all__ = ["app"]\n'
        )


def _script(file: Path, template: str) -> None:
    file.write_text(_template(template))
    file.chmod(0o755)


def _unit(folder: Path, unit: str, command: str, name: str, what: str) -> None:
    (folder / unit).write_text(_filled("unit.service", unit=unit, command=command, name=name, what=what))


def _filled(template: str, **values: object) -> str:
    return Template(_template(template)).substitute(values)


def _template(name: str) -> str:
    return (files("fedrema.deploy") / "templates" / name).read_text(encoding="utf-8")
