"""simple-models.npz: what simple models of single clients predict, to compare with the models of a run on own data."""

from typing import TYPE_CHECKING

import numpy as np

from fedrema.base.terminal import safe_logger
from fedrema.errors import BadInput
from fedrema.runs.arrays import read_arrays, write_arrays
from fedrema.runs.directory import RunDirectory
from fedrema.simulation.final_predictions import FinalPredictions
from fedrema.simulation.simple_models import LINEAR, simple_models

if TYPE_CHECKING:
    from fedrema.simulation.simulator import Simulator

OUTPUTS = "outputs_"
"""Before the name of a kind of model: its array in the file. The other arrays are those of predictions.npz."""

log = safe_logger("fedrema")
_last: dict[tuple[str, str, bool], dict[str, FinalPredictions]] = {}
"""Those of the last data: the runs of a comparison have the same."""


def write_simple_models(directory: RunDirectory, simulator: "Simulator") -> None:
    """Fit the simple models of all clients and write their predictions, unless fedrema partitioned the data."""
    federation, task, embeds = simulator.federation, simulator.task, simulator.net.integers
    if federation.is_partitioned or not federation.test.any():
        return
    key = (federation.fingerprint, task.loss_name, embeds)
    if key not in _last:
        _last.clear()
        _last[key] = simple_models(federation, task, embeds)
        if LINEAR not in _last[key] and not embeds:
            log.warning("Note: no linear models are fitted for comparison, because that takes long for so many inputs.")
    arrays: dict[str, np.ndarray] = {}
    for kind, found in _last[key].items():
        arrays |= found.as_arrays()
        arrays[f"{OUTPUTS}{kind}"] = arrays.pop("outputs")
    write_arrays(directory.simple_models_file, arrays, directory.identity())


def read_simple_models(directory: RunDirectory) -> dict[str, FinalPredictions]:
    """Return the predictions by the name of the kind of model; empty if there is no file."""
    file = directory.simple_models_file
    if not file.exists():
        return {}
    remedy = f"fedrema resume {directory.path} writes it again"
    arrays = read_arrays(file, directory.identity(), remedy)
    if not {"rows", "offsets", "targets"} <= arrays.keys():
        raise BadInput(f"{file} lacks some of its arrays: {remedy}.")
    task = directory.manifest().federation.task
    return {
        name.removeprefix(OUTPUTS): FinalPredictions.from_arrays(task, {**arrays, "outputs": outputs})
        for name, outputs in arrays.items()
        if name.startswith(OUTPUTS)
    }
