"""config.json: what a run is, what it ran on, and how it is read back."""

import hashlib
import json
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedrema
from fedrema.core import Method
from fedrema.data import Federation
from fedrema.errors import BadInput
from fedrema.runs.directory import RunDirectory
from fedrema.settings import Settings, as_arguments, parse_settings
from fedrema.simulate import Simulator

GIVEN = "(given in Python)"
"""Stands for a network that has no name to import it by."""
FEDERATION_FILE = "federation.npz"
"""Where a federation that was given in Python is kept, beside config.json."""

# Where things lie, how long it goes on, and how fast it is computed are no part of what a run is.
CIRCUMSTANCES = {
    *("out", "overwrite", "checkpoint-every", "seeds", "config", "paper", "tuned", "quiet", "open", "track"),
    *("data-dir", "federation", "partition-file", "device", "backend", "rounds", "chunk", "memory", "scratch"),
}


def describe(settings: Settings, simulator: Simulator, own_module: bool) -> dict[str, Any]:
    """Return config.json: everything needed to run it again, and what it ran on."""
    federation = simulator.federation
    return {
        "method": method_name(settings.method),
        "settings": settings.flat() | ({"net": GIVEN} if own_module else {}),
        "identity": identity_of(settings, federation, own_module),
        "federation": {
            "fingerprint": federation.fingerprint,
            "names": list(federation.names),
            "classes": federation.classes,
            "sample_shape": list(federation.sample_shape),
            "train_counts": simulator.train.counts.tolist(),
            "test_counts": simulator.test.counts.tolist(),
            "info": federation.info,
        },
        "ran_on": ran_on(simulator),
    }


def ran_on(simulator: Simulator) -> dict[str, Any]:
    """Return the part of config.json that says where and how a run is computed."""
    return {
        "device": torch.cuda.get_device_name(simulator.device) if simulator.device.type == "cuda" else "cpu",
        "backend": simulator.engine.name,
        "dtype": str(simulator.dtype).removeprefix("torch."),
        "products": simulator.products,
        "threads": torch.get_num_threads(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {"fedrema": fedrema.__version__, "torch": torch.__version__, "numpy": np.__version__},
        "commit": _commit(),
    }


def method_name(method: Method) -> str:
    """Return how a method is called on the command line."""
    kind = type(method)
    foreign = not kind.__module__.startswith("fedrema.methods.")
    return f"{kind.__module__}:{kind.__qualname__}" if foreign else kind.name


def identity_of(settings: Settings, federation: Federation, own_module: bool) -> str:
    """Return a digest of what determines the result."""
    what = {name: value for name, value in settings.flat().items() if name not in CIRCUMSTANCES}
    if own_module:
        what["net"] = GIVEN
    content = [settings.method.name, sorted(what.items()), federation.fingerprint]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def saved_settings(directory: RunDirectory, arguments: tuple[str, ...], own_module: bool) -> Settings:
    """Return the settings of an existing run, with some given anew."""
    config = directory.config()
    try:
        saved, method = dict(config["settings"]), str(config["method"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadInput(f"{directory.config_file} does not describe a run: {error} is missing.") from error
    if saved.get("net") == GIVEN:
        if not own_module:
            raise BadInput(
                f"{directory.path} was run with a network given in Python: use fedrema.resume(…, net=…) there."
            )
        saved["net"] = "auto"
    saved |= {"out": str(directory.path), "config": None, "paper": None, "tuned": None}
    if (directory.path / FEDERATION_FILE).is_file():
        saved["federation"] = str(directory.path / FEDERATION_FILE)
    return parse_settings(method, [*as_arguments(saved), *arguments], "fedrema resume")


def default_folder(settings: Settings, what: str | None = None) -> Path:
    """Return a new folder under runs/, named after the method (or `what`), the data and the time."""
    own = settings.data.federation
    data = Path(own.replace(":", "-")).stem if own else settings.data.dataset
    name = f"{what or settings.method.name}-{data}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"
    folder, number = Path("runs") / name, 1
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    return folder


def _commit() -> str | None:
    here = Path(fedrema.__file__).parent
    if not any((folder / ".git").exists() for folder in here.parents):
        return None
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else None
