"""config.json: what a run is, what it ran on, and how it is read back."""

import hashlib
import inspect
import json
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

import fedrema
from fedrema.base.digests import Digests, file_digest, module_digests
from fedrema.config.settings import Settings, as_arguments, parse_settings
from fedrema.core import Method
from fedrema.data import Federation
from fedrema.engine import REVISIONS, choose_device
from fedrema.engine.backends import parallel_clients
from fedrema.errors import BadInput
from fedrema.methods import registry
from fedrema.runs.directory import FEDERATION_FILE, RunDirectory
from fedrema.simulation.simulator import Simulator

GIVEN = "(given in Python)"
"""Stands for a network that has no name to import it by."""

# Where things lie, how long it goes on, and how fast it is computed are no part of what a run is.
CIRCUMSTANCES = {
    *("out", "overwrite", "checkpoint-every", "seeds", "config", "paper", "tuned", "quiet", "open", "track"),
    *("data-dir", "federation", "partition-file", "device", "backend", "threads", "rounds", "chunk", "memory"),
    "scratch",
}

Inputs = dict[str, Digests]
"""Digests of the files that a user supplied, by what they are for: method, net, federation, partition-file."""
CANNOT_GO_ON = "{} cannot go on: {} since it began; restore what was there or start a new run."
CODE = ("method", "net")
"""Inputs that decide a result; of data its content does, whichever file holds it."""


def describe(
    settings: Settings, simulator: Simulator, own_module: bool, saves_federation: bool = False
) -> dict[str, Any]:
    """Return config.json: everything needed to run it again, and what it ran on."""
    federation = simulator.federation
    return {
        "method": method_name(settings.method),
        "title": settings.method.called(),
        "settings": settings.described() | ({"net": GIVEN} if own_module else {}),
        "identity": identity_of(settings, federation, own_module),
        "revisions": revisions_of(settings.method, simulator.device.type),
        "inputs": inputs_of(settings, own_module, saves_federation),
        "federation": {
            "fingerprint": federation.fingerprint,
            "names": list(federation.names),
            "classes": federation.classes,
            "class_names": list(federation.class_names),
            "sample_shape": list(federation.sample_shape),
            "train_counts": simulator.train.counts.tolist(),
            "test_counts": simulator.test.counts.tolist(),
            "info": federation.info,
            "saved": saves_federation,
        },
        "ran_on": ran_on(simulator),
        "reports": reports_of(settings.method),
    }


def reports_of(method: Method) -> dict[str, Any]:
    """Return what a method declares about its reports, for config.json: showing a run needs no method class."""
    return dict(msgspec.to_builtins(method.reports))


def ran_on(simulator: Simulator) -> dict[str, Any]:
    """Return the part of config.json that says where and how a run is computed."""
    return {
        "device": torch.cuda.get_device_name(simulator.device) if simulator.device.type == "cuda" else "cpu",
        "backend": simulator.engine.name,
        "dtype": str(simulator.dtype).removeprefix("torch."),
        "products": simulator.products,
        "threads": torch.get_num_threads(),
        "threads_per_operation": simulator.threads,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "versions": {"fedrema": fedrema.__version__, "torch": torch.__version__, "numpy": np.__version__},
        "commit": _commit(),
    }


def method_name(method: Method) -> str:
    """Return how a method is called on the command line."""
    kind = type(method)
    return f"{kind.__module__}:{kind.__qualname__}" if _foreign(method) else kind.name


def _foreign(method: Method) -> bool:
    return not type(method).__module__.startswith("fedrema.methods.")


def identity_of(settings: Settings, federation: Federation, own_module: bool) -> str:
    """Return a digest of what determines the result."""
    what = {name: value for name, value in settings.flat().items() if name not in CIRCUMSTANCES}
    if own_module:
        what["net"] = GIVEN
    content: list[Any] = [settings.method.name, sorted(what.items()), federation.fingerprint]
    code = {name: digests for name, digests in inputs_of(settings, own_module).items() if name in CODE}
    # Appended only where there is something to say: runs that were begun before these were recorded stay the same.
    content += [code] if code else []
    content += [settings.method.revision] if settings.method.revision > 1 else []
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def inputs_of(settings: Settings, own_module: bool = False, own_federation: bool = False) -> Inputs:
    """Return digests of the files that the user supplied; empty where everything comes with fedrema.

    `own_module` and `own_federation` say that the network or the data was given in Python instead of by a file.
    """
    network, data = settings.network.net, settings.data
    inputs = {
        "method": _class_digests(type(settings.method)) if _foreign(settings.method) else {},
        "net": module_digests(network.partition(":")[0]) if ":" in network and not own_module else {},
        "federation": {} if data.federation is None or own_federation else _data_digests(data.federation),
        "partition-file": _data_digests(str(data.partition_file)) if data.partition_file is not None else {},
    }
    return {name: digests for name, digests in inputs.items() if digests}


def _class_digests(kind: type[Method]) -> Digests:
    if kind.__module__ != "__main__":
        return module_digests(kind.__module__)
    try:  # a script or notebook also holds what the method does not depend on
        return {kind.__qualname__: hashlib.sha256(inspect.getsource(kind).encode()).hexdigest()}
    except (OSError, TypeError):
        return {}


def _data_digests(source: str) -> Digests:
    """Return the digests of a file, of the `.npz` files of a folder, or of the sources of module:function."""
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            return {file.name: file_digest(file) for file in sorted(path.glob("*.npz"))}
        if path.is_file():
            return {path.name: file_digest(path)}
    except OSError:  # reading the data says why
        return {}
    return module_digests(source.partition(":")[0]) if ":" in source else {}


def revisions_of(method: Method, device: str) -> dict[str, int]:
    """Return the revisions of a method and of the engine on a kind of device."""
    return {"method": method.revision, device: REVISIONS[device]}


def is_outdated(method: str, revisions: Mapping[str, int]) -> bool:
    """Tell whether a result comes from an older revision of its method or of the engine than the present ones.

    What a user's own method was is told by the digests of its files.
    """
    kind = registry().get(method)
    now = {**REVISIONS, "method": revisions.get("method", 1) if kind is None else kind.revision}
    return any(number < now[name] for name, number in revisions.items())


def recorded_revisions(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the revisions that config.json, or the file of a cell, names; 1 where it is older than they are."""
    found = config.get("revisions")
    if isinstance(found, dict) and all(isinstance(number, int) for number in found.values()):
        return {name: number for name, number in found.items() if name == "method" or name in REVISIONS}
    device = config.get("ran_on", {}).get("device")
    return {"method": 1, **({} if device is None else {"cpu" if device == "cpu" else "cuda": 1})}


def check_unchanged(where: Path, config: Mapping[str, Any], settings: Settings, own_module: bool = False) -> None:
    """Refuse to go on with what another revision, or another version of the user's files, has begun."""
    now = {**REVISIONS, "method": settings.method.revision}
    for name, number in recorded_revisions(config).items():
        if number != now[name]:
            what = settings.method.title if name == "method" else f"the engine on {name.upper()} devices"
            raise BadInput(
                f"{where} was begun with revision {number} of {what}; this version of fedrema has revision {now[name]}:"
                " start it again."
            )
    recorded, present = config.get("inputs"), inputs_of(settings, own_module)
    if recorded is not None and not _are_inputs(recorded):
        raise BadInput(f"{where} cannot go on: the 'inputs' that it records are not what fedrema writes there.")
    for name in CODE:
        if recorded is None and name in present:
            raise BadInput(
                f"{where} was begun by an older version of fedrema, which did not record the content of "
                f"{', '.join(present[name])}: start it again."
            )
        if recorded is not None and (changed := changed_files(recorded.get(name, {}), present.get(name, {}))):
            raise BadInput(CANNOT_GO_ON.format(where, changed))


def _are_inputs(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(digests, dict) for digests in value.values())


def changed_files(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Say which files differ; empty where none does."""
    files = [name for name in dict.fromkeys((*before, *now)) if before.get(name) != now.get(name)]
    return f"{', '.join(files)} {'has' if len(files) == 1 else 'have'} changed" if files else ""


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
    if config["federation"].get("saved"):
        saved["federation"] = str(directory.path / FEDERATION_FILE)
    return parse_settings(method, [*as_arguments(saved), *arguments], "fedrema resume")


def computed_as_before(settings: Settings, config: Mapping[str, Any]) -> Settings:
    """Return settings with the backend and the threads per operation that a run on a CPU was begun with.

    Both change how sums are rounded, and this machine, or this version, might choose others. What the settings name is
    kept, and what ran on a GPU is left to the machine.
    """
    chosen, ran_on = settings.simulation, config.get("ran_on", {})
    if ran_on.get("device") != "cpu" or choose_device(chosen.device).type != "cpu":
        return settings
    backend, threads, total = (ran_on.get(name) for name in ("backend", "threads_per_operation", "threads"))
    if threads is None and isinstance(total, int) and total > 0:  # begun before it was recorded
        clients = len(config["federation"]["names"])
        threads = total // parallel_clients(total, clients) if backend == "loop" else total
    if chosen.backend == "auto" and backend in ("loop", "stacked"):
        chosen = replace(chosen, backend=backend)
    if not chosen.threads and isinstance(threads, int) and threads > 0:
        chosen = replace(chosen, threads=threads)
    return replace(settings, simulation=chosen)


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
