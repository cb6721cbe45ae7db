"""The settings of an existing run, read back from its folder, and the default folder of a new one."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from fedrema.config.settings import Settings, make_settings
from fedrema.engine import choose_device
from fedrema.errors import BadInput
from fedrema.runs.directory import FEDERATION_FILE, RunDirectory
from fedrema.runs.manifest import Manifest
from fedrema.runs.provenance import CANNOT_CONTINUE, GIVEN
from fedrema.runs.trust import KINDS, Trust, check_code, named_code

Changes = Mapping[str, Any]
"""Settings that replace saved ones when a run is resumed, by name: rounds, data_dir, device."""
NOT_SAVED = ("out", "config", "paper", "tuned")
"""Settings of the command that started a run: their values are already among the others."""


def saved_settings(
    directory: RunDirectory,
    changes: Changes | None = None,
    own_module: bool = False,
    trust: Trust = False,
    kinds: Sequence[str] = KINDS,
    resuming: bool = False,
) -> Settings:
    """Return the settings of an existing run, with some changed; its method is imported.

    Parameters
    ----------
    directory
        The run.
    changes
        Settings that replace saved ones.
    own_module
        Whether its network is given in Python.
    trust
        Which code may be imported without a mark of this user.
    kinds
        Which settings name the code that the caller imports.
    resuming
        Whether the run is continued, which requires that the code has not changed.
    """
    manifest = directory.manifest()
    check_code_of_run(directory, manifest, trust, kinds, resuming)
    saved: dict[str, object] = {name: value for name, value in manifest.settings.items() if name not in NOT_SAVED}
    if saved.get("net") == GIVEN:
        if not own_module:
            raise BadInput(
                f"{directory.path} was run with a network given in Python: use fedrema.resume(…, net=…) there."
            )
        saved["net"] = "auto"
    if manifest.federation.saved:
        saved["federation"] = str(directory.path / FEDERATION_FILE)
    return changed_settings(manifest.method, saved, changes).placed(directory.path)


def check_code_of_run(
    directory: RunDirectory, manifest: Manifest, trust: Trust, kinds: Sequence[str] = KINDS, resuming: bool = False
) -> None:
    """Raise `Untrusted` if a run names code of these kinds that must not be imported."""
    code = named_code(manifest.method, manifest.settings)
    if manifest.federation.saved:
        code.pop("federation", None)
    sentence = {"changed": CANNOT_CONTINUE.replace("{}", "{0}", 1).replace("{}", "{2}")} if resuming else {}
    check_code(directory.path, manifest.identity, code, manifest.marks, manifest.inputs, trust, kinds, **sentence)


def changed_settings(method: str, saved: Mapping[str, Any], changes: Changes | None) -> Settings:
    """Return settings that a file holds, with some changed."""
    given = {name.replace("_", "-"): value for name, value in (changes or {}).items() if value is not None}
    return make_settings(method, {**saved, **given}, "fedrema resume")


def computed_as_before(settings: Settings, manifest: Manifest) -> Settings:
    """Return settings with the backend and the threads per operation that a run on a CPU was started with.

    Both change how sums are rounded, and this machine, or this version, might choose others. Explicit settings are
    kept, and the settings of a run that was started on a GPU are not changed.
    """
    chosen, before = settings.simulation, manifest.ran_on
    if before.device != "cpu" or choose_device(chosen.device).type != "cpu":
        return settings
    if chosen.backend == "auto" and before.backend in ("loop", "stacked"):
        chosen = replace(chosen, backend=before.backend)  # type: ignore[arg-type]  # one of the two literals
    if not chosen.threads and before.threads_per_operation:
        chosen = replace(chosen, threads=before.threads_per_operation)
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
