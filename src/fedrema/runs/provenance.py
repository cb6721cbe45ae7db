"""What determines a run's result: its identity, the user's own files, and the revisions of method and engine."""

import hashlib
import inspect
import json
import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedrema
from fedrema.base.digests import Digests, file_digest, module_digests
from fedrema.base.options import Purpose
from fedrema.config.settings import Settings
from fedrema.core import Method, Simulation
from fedrema.data import Federation
from fedrema.engine import REVISIONS
from fedrema.errors import BadInput
from fedrema.methods import registry
from fedrema.runs.manifest import FederationFacts, Inputs, Manifest, RanOn
from fedrema.runs.trust import changed_files, marks_of, named_code
from fedrema.simulation.simulator import Simulator

GIVEN = "(given in Python)"
"""Replaces the name of a network that cannot be imported by name."""
DEFINING = (Purpose.RESULT, Purpose.SEED, Purpose.RECORD)
"""Purposes of the settings that are part of a run's identity."""
CODE = ("method", "net")
"""Inputs whose files determine a result; data is identified by its content instead."""
ABSENCES = ("participation", "dropout", "late")
"""Settings on which it depends whether clients miss rounds or join late."""
DATA_SUFFIXES = (".npz", ".csv", ".csv.gz", ".parquet", ".json")
CANNOT_CONTINUE = "{} cannot be continued: {} since it was started; restore the earlier version or start a new run."


def describe(settings: Settings, simulator: Simulator, own_module: bool, saves_federation: bool = False) -> Manifest:
    """Return the manifest of a new run: everything needed to run it again, and the machine it runs on."""
    federation = simulator.federation
    facts = FederationFacts(
        federation.fingerprint,
        list(federation.names),
        federation.classes,
        list(federation.class_names),
        tuple(federation.sample_shape),
        simulator.train.counts.tolist(),
        simulator.test.counts.tolist(),
        json.loads(json.dumps(federation.info)),  # plain types only
        saves_federation,
        own_task=None if federation.task.rare and not simulator.task.rare else federation.own_task,
        preprocessing=federation.preprocessing,
    )
    method, identity = method_name(settings.method), identity_of(settings, federation, own_module)
    described = settings.described() | ({"net": GIVEN} if own_module else {})
    return Manifest(
        method,
        described,
        identity,
        revisions_of(settings, simulator.device.type),
        inputs_of(settings, own_module, saves_federation),
        facts,
        ran_on(simulator),
        settings.method.reports,
        settings.method.called(),
        marks_of(identity, named_code(method, described)),
    )


def ran_on(simulator: Simulator) -> RanOn:
    """Return where and how a run is computed."""
    return RanOn(
        device=torch.cuda.get_device_name(simulator.device) if simulator.device.type == "cuda" else "cpu",
        backend=simulator.engine.name,
        dtype=str(simulator.dtype).removeprefix("torch."),
        products=simulator.products,
        threads=torch.get_num_threads(),
        threads_per_operation=simulator.threads,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        python=platform.python_version(),
        versions={"fedrema": fedrema.__version__, "torch": str(torch.__version__), "numpy": np.__version__},
        commit=_commit(),
        parallel_clients=simulator.engine.parallel,
    )


def method_name(method: Method) -> str:
    """Return how a method is named on the command line."""
    kind = type(method)
    return f"{kind.__module__}:{kind.__qualname__}" if _is_own(method) else kind.name


def _is_own(method: Method) -> bool:
    return not type(method).__module__.startswith("fedrema.methods.")


def identity_of(settings: Settings, federation: Federation, own_module: bool) -> str:
    """Return a digest of what determines the result."""
    what = settings.identifying(*DEFINING)
    if own_module:
        what["net"] = GIVEN
    content: list[Any] = [settings.method.name, sorted(what.items()), federation.fingerprint]
    code = {name: digests for name, digests in inputs_of(settings, own_module).items() if name in CODE}
    # Appended only where there is something to add: identities of runs without own files stay the same.
    content += [code] if code else []
    revision = method_revision(type(settings.method), settings.simulation)
    content += [revision] if revision > 1 else []
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def inputs_of(settings: Settings, own_module: bool = False, own_federation: bool = False) -> Inputs:
    """Return digests of the files that the user supplied; empty where everything comes with fedrema.

    `own_module` and `own_federation` say that the network or the data was given in Python instead of by a file.
    """
    network, data = settings.network.net, settings.data
    inputs = {
        "method": _class_digests(type(settings.method)) if _is_own(settings.method) else {},
        "net": module_digests(network.partition(":")[0]) if ":" in network and not own_module else {},
        "federation": {} if data.federation is None or own_federation else _data_digests(data.federation),
        "partition-file": _data_digests(str(data.partition_file)) if data.partition_file is not None else {},
    }
    return {name: digests for name, digests in inputs.items() if digests}


def _class_digests(kind: type[Method]) -> Digests:
    if kind.__module__ != "__main__":
        return module_digests(kind.__module__)
    try:  # a script or notebook also holds code that the method does not depend on
        return {kind.__qualname__: hashlib.sha256(inspect.getsource(kind).encode()).hexdigest()}
    except (OSError, TypeError):
        return {}


def _data_digests(source: str) -> Digests:
    """Return the digests of a file, of the arrays and tables in a folder, or of the sources of module:function.

    Image files have none: there may be many, and the data is identified by its content anyway.
    """
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            files = [file for file in sorted(path.rglob("*")) if file.name.endswith(DATA_SUFFIXES)]
            return {str(file.relative_to(path)): file_digest(file) for file in files}
        if path.is_file():
            return {path.name: file_digest(path)}
    except OSError:  # reading the data reports the reason
        return {}
    return module_digests(source.partition(":")[0]) if ":" in source else {}


def method_revision(method: type[Method], simulation: Simulation) -> int:
    """Return the revision of a method for runs with these settings."""
    return max(method.revision, method.absence_revision if simulation.has_absences else 1)


def revisions_of(settings: Settings, device: str) -> dict[str, int]:
    """Return the revisions of the method and of the engine on a kind of device."""
    return {"method": method_revision(type(settings.method), settings.simulation), device: REVISIONS[device]}


def is_outdated(method: str, revisions: Mapping[str, int], settings: Mapping[str, Any]) -> bool:
    """Return whether a result comes from an older revision of its method or of the engine than the present ones.

    Changes of a user's own method show in the digests of its files instead.
    """
    kind = registry().get(method)
    simulation = Simulation(**{name: settings[name] for name in ABSENCES if name in settings})
    now = {
        **REVISIONS,
        "method": revisions.get("method", 1) if kind is None else method_revision(kind, simulation),
    }
    return any(number < now[name] for name, number in revisions.items())


def check_unchanged(
    where: Path, revisions: Mapping[str, int], inputs: Inputs, settings: Settings, own_module: bool = False
) -> None:
    """Refuse to continue a run that another revision, or another version of the user's files, has started."""
    now = {**REVISIONS, "method": method_revision(type(settings.method), settings.simulation)}
    for name, number in revisions.items():
        if number != now.get(name):
            what = settings.method.title if name == "method" else f"the engine on {name.upper()} devices"
            raise BadInput(
                f"{where} was started with revision {number} of {what}; this version of fedrema has revision"
                f" {now.get(name)}: start it again."
            )
    present = inputs_of(settings, own_module)
    for name in CODE:
        if changed := changed_files(inputs.get(name, {}), present.get(name, {})):
            raise BadInput(CANNOT_CONTINUE.format(where, changed))


def check_same_data(where: Path, manifest: Manifest, settings: Settings, federation: Federation) -> None:
    """Refuse to continue a run on other data than it was started with."""
    if manifest.federation.fingerprint == federation.fingerprint:
        return
    present = inputs_of(settings)
    differing = [
        text
        for name in ("federation", "partition-file")
        if manifest.inputs.get(name) and (text := changed_files(manifest.inputs[name], present.get(name, {})))
    ]
    raise BadInput(CANNOT_CONTINUE.format(where, differing[0] if differing else "its data has changed"))


def _commit() -> str | None:
    here = Path(fedrema.__file__).parent
    if not any((folder / ".git").exists() for folder in here.parents):
        return None
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return found.stdout.strip() if found.returncode == 0 else None
