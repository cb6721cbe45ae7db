"""The service behind `fedrema deploy client`, which supervises a node's processes and reports its connection.

It does not import Flower, so that a node says within seconds why it cannot connect.
"""

import os
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fedrema.base.files import make_private
from fedrema.base.processes import LogTail, StopRequested, SupervisedProcess, free_port, stopped_on_exit
from fedrema.deploy.approval import approved_plan
from fedrema.deploy.audit_service import audited_service
from fedrema.deploy.folder import NodeFolder
from fedrema.deploy.node_connection import NodeConnection
from fedrema.deploy.tls import write_secret
from fedrema.errors import BadInput

SECONDS_BETWEEN_CHECKS = 1.0
NODE_LOG = "node.log"


def flower_environment(home: Path, modules: Path) -> dict[str, str]:
    """Return the environment of Flower's processes: no telemetry, no update check, no installation of packages."""
    variables = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "FLWR_HOME": str(home),
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
    }
    paths = {
        "PATH": [str(Path(sys.executable).parent), os.environ.get("PATH", "")],  # Flower starts programs by name
        "PYTHONPATH": [str(modules), os.environ.get("PYTHONPATH", "")],
    }
    joined = {name: os.pathsep.join(part for part in parts if part) for name, parts in paths.items()}
    # Flower's dependencies emit warnings: with warnings as errors it would not start.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    return {**inherited, **variables, **joined}


def run_node(folder: NodeFolder, report: Callable[[str], None], reported: str = "") -> int:
    """Run a node until the process is stopped; `report` is called with each line for the node's owner.

    `reported` is what was already said about the connection.
    Refuses to start if the node's owner has not approved a plan, or if the node has changed since then.
    """
    path = folder.path
    for name in ("ca.crt", "node.key"):
        if not (path / name).is_file():
            raise BadInput(f"{path} has no {name}: copy the whole folder that fedrema deploy init created.")
    connection = NodeConnection(folder, reported)  # refuses a damaged key or certificate
    folder.node_config()  # refuses missing samples
    plan = approved_plan(folder)
    folder.kept.mkdir(exist_ok=True)
    make_private(path)
    supernode, executor = node_processes(folder)
    log, approved_at = LogTail(path / NODE_LOG), _changed_at(folder.approval_file)
    trusted_at = _changed_at(path / "ca.crt")
    report(f"node {folder.name} connects to {folder.config.server}; approved plan: {plan.digest[:16]}")
    try:
        with audited_service(connection.audit), stopped_on_exit(supernode, executor):
            while True:
                if approved_at != (approved_at := _changed_at(folder.approval_file)):
                    report("the approved plan has changed; the node uses the new one from now on")
                    executor.stop()
                if trusted_at != (trusted_at := _changed_at(path / "ca.crt")):
                    report("ca.crt has changed; the node connects again and trusts the authorities in it")
                    supernode.stop()
                if message := supernode.supervise():
                    report(connection.watch.exit_message(message))
                if message := executor.supervise():
                    report(message)
                for line in (*connection.news(), *log.lines()):
                    report(line)
                time.sleep(SECONDS_BETWEEN_CHECKS)
    except StopRequested:
        report("the node was stopped; the same command starts it again")
        return 130


def node_processes(folder: NodeFolder) -> tuple[SupervisedProcess, SupervisedProcess]:
    """Return a node's processes: Flower's SuperNode, which exchanges messages with the server, and the executor.

    The executor proves by a secret that it may take messages from the SuperNode.
    """
    path, port = folder.path, free_port()
    secret = folder.state / "executor.secret"
    folder.state.mkdir(exist_ok=True)
    write_secret(secret, secrets.token_bytes(32))
    environment = flower_environment(folder.state / "flower", path)
    supernode = SupervisedProcess(
        "Flower's SuperNode",
        [
            *(sys.executable, "-m", "fedrema.deploy.flower_supernode", "--superlink", folder.config.server),
            *("--root-certificates", str(path / "ca.crt")),
            *("--auth-supernode-private-key", str(path / "node.key")),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--isolation", "process", "--superexec-auth-secret-file", str(secret)),
        ],
        environment,
        folder.state / "supernode.log",
    )
    executor = SupervisedProcess(
        "The node's executor",
        [sys.executable, "-m", "fedrema.deploy.flower_executor", str(path), f"127.0.0.1:{port}", str(secret)],
        environment,
        folder.executor_log,
    )
    return supernode, executor


def _changed_at(file: Path) -> int:
    """Return when a file was last changed; 0 if it does not exist."""
    return file.stat().st_mtime_ns if file.is_file() else 0
