"""Control of the SuperLink by commands on the same machine: the keys of the nodes, and the runs."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from flwr.cli.build import build_fab_from_disk
from flwr.common.constant import HEARTBEAT_PATIENCE
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    UnregisterNodeRequest,
)
from flwr.proto.node_pb2 import NodeInfo
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab

from fedrema.deploy.tls import fingerprint, read_public_key
from fedrema.errors import BadInput, FedremaError


@dataclass(frozen=True)
class KeyChange:
    """A key that was registered, or is no longer."""

    name: str
    fingerprint: str
    admitted: bool

    def __str__(self) -> str:
        if self.admitted:
            return f"node {self.name} may participate"
        return f"node {self.name} can no longer participate with its previous key"


class NotResponding(FedremaError):
    """The SuperLink does not respond."""


class Control:
    """A connection to the SuperLink on this machine, over TLS."""

    def __init__(self, client: ControlHttpClient) -> None:
        self.client = client

    def nodes(self) -> list[NodeInfo]:
        """Return all nodes with registered keys."""
        nodes = self.client.ListNodes(ListNodesRequest()).nodes_info
        return [node for node in nodes if node.status != "unregistered"]

    def admit(self, key_files: Mapping[str, Path]) -> list[KeyChange]:
        """Register the keys of exactly these nodes, by name; return the changes."""
        names = {read_public_key(file): name for name, file in key_files.items()}
        changes = []
        registered = {node.public_key: node for node in self.nodes()}
        for key, node in registered.items():
            if names.get(key) != node.name:
                self.client.UnregisterNode(UnregisterNodeRequest(node_id=node.node_id))
                changes.append(KeyChange(node.name, fingerprint(node.public_key), admitted=False))
        for key, name in names.items():
            if key not in registered or registered[key].name != name:
                self.client.RegisterNode(RegisterNodeRequest(public_key=key, name=name))
                changes.append(KeyChange(name, fingerprint(key), admitted=True))
        return changes

    def start(self, app: Path, config: Mapping[str, str]) -> int:
        """Start the app as a run; return the run's number."""
        try:
            content = build_fab_from_disk(app)
        except ValueError as error:
            raise BadInput(f"{app / 'pyproject.toml'} cannot be used: {' '.join(str(error).split())}") from error
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        request = StartRunRequest(fab=fab_to_proto(fab), override_config=user_config_to_proto(dict(config)))
        return int(self.client.StartRun(request).run_id)

    def stop_all(self) -> None:
        """Stop all runs, such as one that a killed server left unfinished."""
        for number, run in self.client.ListRuns(ListRunsRequest()).run_dict.items():
            if run.status.status != "finished":
                self.client.StopRun(StopRunRequest(run_id=number))


def last_heartbeat(node: NodeInfo) -> float | None:
    """Return when a node last told the SuperLink that it is there, in seconds since 1970; None if it never did."""
    seconds = float(node.online_until) - HEARTBEAT_PATIENCE * float(node.heartbeat_interval)
    return seconds if seconds > 0 else None


@contextmanager
def connected_control(address: str, authority: Path) -> Iterator[Control]:
    """Connect to the SuperLink at an address of this machine."""
    client = ControlHttpClient.from_server_address(
        server_address=address, insecure=False, root_certificates=authority.read_bytes(), interceptors=()
    )
    try:
        yield Control(client)
    except (httpx.TransportError, OSError) as error:
        raise NotResponding(f"The SuperLink does not respond at {address}: {error}.") from error
    except httpx.HTTPStatusError as error:
        raise FedremaError(f"The SuperLink refuses {error.request.url.path}: {error.response.text[:200]}.") from error
    finally:
        client.close()
