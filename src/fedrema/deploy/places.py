"""The folders of a federation on the network: the server's, and one for each node."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrema.config.settings import read_toml
from fedrema.deploy.protection import PRIVACY, Protection
from fedrema.errors import BadInput
from fedrema.runs.directory import RunDirectory

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""What a node may be called: it becomes the name of a folder and of a service."""


def check_name(name: str) -> str:
    """Refuse a name that could not be a folder's."""
    if not NAME.fullmatch(name):
        raise BadInput(f"--nodes: {name!r} is no name; letters, digits, '.', '_' and '-' are valid, 64 at most.")
    return name


@dataclass(frozen=True)
class ServerPlace:
    """What the server's machine holds."""

    path: Path
    port: int
    control_port: int
    listen: str = "0.0.0.0"  # nodes come from other machines; only what a node needs is answered there

    @classmethod
    def open(cls, path: Path) -> "ServerPlace":
        """Read the folder that `fedrema deploy init` made; its parent is understood, too."""
        found = path / "server" if (path / "server" / "server.toml").is_file() else path
        told = _read(found / "server.toml", {"port": int, "control-port": int, "listen": str})
        return cls(found.resolve(), **{name.replace("-", "_"): value for name, value in told.items()})

    @property
    def control(self) -> str:
        """Where the server's own commands reach it: never from another machine."""
        return f"127.0.0.1:{self.control_port}"

    @property
    def app(self) -> Path:
        """The Flower app."""
        return self.path / "app"

    @property
    def keys(self) -> Path:
        """Public keys of the nodes that may take part, NAME.pub."""
        return self.path / "keys"

    @property
    def state(self) -> Path:
        """What Flower keeps."""
        return self.path / "state"

    @property
    def run(self) -> Path:
        """The folder of the run, as `fedrema run` would write it."""
        return self.path / "run"

    def config(self) -> dict[str, Any]:
        """Return the app's settings."""
        file = self.app / "pyproject.toml"
        try:
            found = dict(read_toml(file, "the app")["tool"]["flwr"]["app"]["config"])
            rounds = found["rounds"]
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"{file} has no [tool.flwr.app.config] with rounds in it.") from error
        if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 1:
            raise BadInput(f"{file}: rounds must be a whole number of at least 1, got {rounds!r}.")
        return found

    def finished(self) -> bool:
        """Tell whether all rounds of the app's settings have been trained; more of them may be asked for later."""
        directory = RunDirectory(self.run)
        if not directory.summary_file.is_file():
            return False
        records = directory.rounds()
        return bool(records) and records[-1].round >= int(self.config()["rounds"])


@dataclass(frozen=True)
class NodePlace:
    """What a node's machine holds."""

    path: Path
    name: str
    server: str
    data: str
    protection: Protection

    @classmethod
    def open(cls, path: Path) -> "NodePlace":
        """Read a node's folder."""
        file = path / "node.toml"
        needed: dict[str, type] = {"name": str, "server": str, "data": str}
        found = _read(file, needed | dict.fromkeys(PRIVACY, float))
        if missing := [name for name in needed if name not in found]:
            raise BadInput(f"{file}: {missing[0]} is missing; {', '.join(needed)} must be there.")
        try:
            protection = Protection.of(found)
        except BadInput as error:
            raise BadInput(f"{file}: {error}") from None
        return cls(path.resolve(), found["name"], found["server"], found["data"], protection)

    @property
    def kept(self) -> Path:
        """What never leaves the node."""
        return self.path / "kept"

    def config(self) -> dict[str, str | float]:
        """Return what the client app has to know."""
        data = self.data
        if ":" not in data:
            data = str(self.path / data)
            if not Path(data).exists():
                raise BadInput(f"{self.path / 'node.toml'}: data = {self.data!r} is not there.")
        told: dict[str, str | float] = {"name": self.name, "data": data, "folder": str(self.kept)}
        return told | self.protection.config()


def _read(file: Path, kinds: dict[str, type]) -> dict[str, Any]:
    """Read a folder's settings; everything in it must be known and of its kind."""
    if not file.is_file():
        raise BadInput(f"{file.parent} has no {file.name}: name a folder that fedrema deploy init made.")
    found = read_toml(file, "the file")
    for name, value in found.items():
        if name not in kinds:
            raise BadInput(f"{file}: {name} is unknown; valid are {', '.join(kinds)}.")
        if not isinstance(value, (int, float) if kinds[name] is float else kinds[name]) or isinstance(value, bool):
            raise BadInput(f"{file}: {name} must be {_called(kinds[name])}, got {value!r}.")
    return found


def _called(kind: type) -> str:
    return {int: "a whole number", float: "a number", str: "a text"}[kind]
