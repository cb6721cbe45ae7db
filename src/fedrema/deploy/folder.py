"""The folders of a federation: the server's with server.toml, and one with node.toml for each node."""

import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from fedrema.base.tables import read_table
from fedrema.base.terminal import safe
from fedrema.config.settings import read_toml
from fedrema.deploy.privacy import PrivacySettings
from fedrema.deploy.run_config import RunConfig
from fedrema.errors import BadInput
from fedrema.runs.checkpoint import read_checkpoint
from fedrema.runs.directory import RunDirectory

FORMAT = 1
"""Version of server.toml and node.toml."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Valid names of nodes: a name becomes part of the names of a folder and of a service."""
FORGOTTEN = re.compile(r"\(forgotten( \d+)?\)")
"""What `fedrema deploy forget` calls a node that was forgotten."""


LONGEST_SHOWN = 80
"""How many characters of an invalid name an error message contains."""


def check_name(name: str) -> str:
    """Return a node's name; refuses one that cannot be the name of a folder."""
    if not NAME.fullmatch(name):
        shown = safe(name if len(name) <= LONGEST_SHOWN else f"{name[:LONGEST_SHOWN]}…")
        raise BadInput(f"--nodes: {shown!r} is not a valid name: use up to 64 letters, digits, '.', '_' and '-'.")
    return name


@dataclass(frozen=True)
class ServerConfig:
    """The content of server.toml."""

    port: int
    """Port for nodes, which reach only the interface for nodes there."""
    control_port: int
    """Port for commands on the same machine."""
    listen: str = "0.0.0.0"
    """Address at which the server listens for nodes."""
    format: int = FORMAT

    def __post_init__(self) -> None:
        """Validate the values."""
        _check_format(self.format)
        for name, port in (("port", self.port), ("control-port", self.control_port)):
            if not 1 <= port <= 65535:
                raise BadInput(f"{name} must be from 1 to 65535, got {port}.")


@dataclass(frozen=True)
class NodeConfig:
    """The content of node.toml, without the privacy settings."""

    name: str
    server: str
    """Address of the server, host:port."""
    data: str
    """The node's samples: a file, a folder or module:function."""
    kept_rounds: int = 10
    """After how many rounds the node keeps its state, so that the server can be restored from an older checkpoint."""
    accept_lost_state: bool = False
    """Continue from the nearest state if the state that the server names is lost."""
    format: int = FORMAT

    def __post_init__(self) -> None:
        """Validate the values."""
        _check_format(self.format)
        if not NAME.fullmatch(self.name):
            shown = safe(self.name[:LONGEST_SHOWN])
            raise BadInput(f"name must be up to 64 letters, digits, '.', '_' and '-', got {shown!r}.")
        if self.kept_rounds < 1:
            raise BadInput(f"kept-rounds must be at least 1, got {self.kept_rounds}.")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the values in node.toml."""
        return tuple(each.name.replace("_", "-") for each in fields(cls))


@dataclass(frozen=True)
class ServerFolder:
    """The folder on the server's machine."""

    path: Path
    config: ServerConfig

    @classmethod
    def open(cls, path: Path) -> "ServerFolder":
        """Read the server's folder; `path` may also be the federation's folder, of which it is the subfolder server."""
        folder = path / "server" if (path / "server" / "server.toml").is_file() else path
        expected = "the folder that fedrema deploy init created, or its subfolder server"
        return cls(folder.resolve(), read_table(ServerConfig, *_read(folder / "server.toml", expected)))

    @property
    def control_address(self) -> str:
        """The address of the server for commands on the same machine."""
        return f"127.0.0.1:{self.config.control_port}"

    @property
    def app(self) -> Path:
        """The Flower app."""
        return self.path / "app"

    @property
    def keys(self) -> Path:
        """Public keys of the nodes that may participate, NAME.pub."""
        return self.path / "keys"

    @property
    def state(self) -> Path:
        """State and logs of Flower's processes."""
        return self.path / "state"

    @property
    def run(self) -> Path:
        """The folder of the run, as `fedrema run` would write it."""
        return self.path / "run"

    @property
    def forgetting(self) -> Path:
        """Exists while a node is being removed (`fedrema deploy forget`)."""
        return self.path / "forgetting.json"

    def run_config(self) -> RunConfig:
        """Return the run configuration in the app's pyproject.toml."""
        file = self.app / "pyproject.toml"
        try:
            config: RunConfig = dict(read_toml(file, "the app")["tool"]["flwr"]["app"]["config"])
            rounds = config["rounds"]
        except (KeyError, TypeError, ValueError) as error:
            raise BadInput(f"{file} has no [tool.flwr.app.config] with rounds in it.") from error
        if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 1:
            raise BadInput(f"{file}: rounds must be a whole number of at least 1, got {rounds!r}.")
        return config

    def rounds(self) -> int:
        """Return the number of rounds in the run configuration."""
        return int(self.run_config()["rounds"])

    def is_finished(self) -> bool:
        """Whether all rounds of the run configuration are completed.

        The operator can raise their number later, or put back an older checkpoint.
        """
        directory = RunDirectory(self.run)
        if not directory.summary_file.is_file():
            return False
        records = directory.rounds()
        completed = records[-1].round if records else 0
        if directory.checkpoint_file.is_file():
            completed = min(completed, int(read_checkpoint(directory.checkpoint_file, wanted=())[0]["round"]))
        return 0 < self.rounds() <= completed


@dataclass(frozen=True)
class NodeFolder:
    """The folder on a node's machine."""

    path: Path
    config: NodeConfig
    privacy: PrivacySettings = field(default_factory=PrivacySettings)

    @classmethod
    def open(cls, path: Path) -> "NodeFolder":
        """Read a node's folder, which `fedrema deploy init` or `fedrema deploy add` created."""
        table, where = _read(path / "node.toml", "a node's folder, such as hospitals/nodes/north")
        privacy = {name: value for name, value in table.items() if name in PrivacySettings.names()}
        known = (*NodeConfig.names(), *PrivacySettings.names())
        if unknown := [name for name in table if name not in known]:
            valid = ", ".join(name for name in known if name != "format")
            raise BadInput(f"{where}: {unknown[0]} is unknown; valid are {valid}.")
        config = {name: value for name, value in table.items() if name not in privacy}
        return cls(path.resolve(), read_table(NodeConfig, config, where), read_table(PrivacySettings, privacy, where))

    def with_server(self, address: str) -> "NodeFolder":
        """Return this folder with another address of the server."""
        return replace(self, config=replace(self.config, server=address))

    @property
    def name(self) -> str:
        """The node's name."""
        return self.config.name

    @property
    def kept(self) -> Path:
        """Folder of the node's own state, which never leaves it."""
        return self.path / "kept"

    @property
    def peers(self) -> Path:
        """Folder with the public keys of the other nodes, NAME.pub; for secure aggregation."""
        return self.path / "peers"

    @property
    def plan_file(self) -> Path:
        """The plan that the server's operator proposes."""
        return self.path / "plan.toml"

    @property
    def approval_file(self) -> Path:
        """The plan that the node's owner has approved."""
        return self.path / "approved.json"

    @property
    def state(self) -> Path:
        """State and logs of Flower's processes."""
        return self.path / "state"

    @property
    def executor_log(self) -> Path:
        """The output of the process that trains."""
        return self.state / "executor.log"

    def node_config(self) -> dict[str, str | float]:
        """Return the configuration of Flower's client app on this node."""
        data = self.config.data
        if ":" not in data:
            data = str(self.path / data)
            if not Path(data).exists():
                raise BadInput(f"{self.path / 'node.toml'}: data = {self.config.data!r} does not exist.")
        return {
            "name": self.name,
            "data": data,
            "folder": str(self.kept),
            "kept-rounds": self.config.kept_rounds,
            "accept-lost-state": self.config.accept_lost_state,
            **self.privacy.values(),
        }


def _check_format(number: int) -> None:
    if number != FORMAT:
        raise BadInput(f"format must be {FORMAT}, which this version of fedrema reads, got {number}.")


def _read(file: Path, expected: str) -> tuple[dict[str, object], str]:
    """Return the content of a configuration file, and its name for error messages; `expected` describes its folder."""
    if not file.is_file():
        raise BadInput(f"{file.parent} has no {file.name}: name {expected}.")
    return read_toml(file, "the file"), str(file)
