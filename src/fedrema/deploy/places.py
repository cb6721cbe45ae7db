"""The folders of a federation on the network: the server's, and one for each node."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedrema.errors import BadInput
from fedrema.settings import read_toml

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""What a node may be called: it becomes the name of a folder and of a service."""

PRIVACY = ("privacy-clip", "privacy-noise", "privacy-delta", "privacy-budget")


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
        return cls(found.resolve(), **_read(found / "server.toml", {"port": int, "control-port": int, "listen": str}))

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


@dataclass(frozen=True)
class NodePlace:
    """What a node's machine holds."""

    path: Path
    name: str
    server: str
    data: str
    privacy_clip: float = 0.0
    """Length to which a round's change is cut before it leaves; 0: none of this."""
    privacy_noise: float = 0.0
    """Gaussian noise on what leaves, as a multiple of the length."""
    privacy_delta: float = 1e-5
    """The δ at which the privacy budget is told."""
    privacy_budget: float = 0.0
    """Largest ε that may be spent; the node then takes no further part. 0: no limit."""

    @classmethod
    def open(cls, path: Path) -> "NodePlace":
        """Read a node's folder."""
        kinds = {"name": str, "server": str, "data": str, **dict.fromkeys(PRIVACY, float)}
        return cls(path.resolve(), **_read(path / "node.toml", kinds))

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
        return told | {name: float(getattr(self, name.replace("-", "_"))) for name in PRIVACY}


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
    return {name.replace("-", "_"): value for name, value in found.items()}


def _called(kind: type) -> str:
    return {int: "a whole number", float: "a number", str: "a text"}[kind]
