"""The environment variables of Flower's processes."""

import os
import sys
from pathlib import Path


def environment(home: Path, modules: Path) -> dict[str, str]:
    """Return the environment of Flower's processes: no telemetry, no update check, no installation of packages."""
    switches = {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "FLWR_HOME": str(home),
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
    }
    paths = {
        "PATH": [
            str(Path(sys.executable).parent),
            os.environ.get("PATH", ""),
        ],  # Flower starts programs by name
        "PYTHONPATH": [str(modules), os.environ.get("PYTHONPATH", "")],
    }
    joined = {name: os.pathsep.join(part for part in parts if part) for name, parts in paths.items()}
    # Flower's dependencies emit warnings: with warnings as errors it would not start.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONWARNINGS"}
    return {**inherited, **switches, **joined}
