"""Stores what simple models of single clients predict, for comparison with the models of a run on own data."""

from fedrema.base.terminal import safe_logger
from fedrema.runs.directory import RunDirectory
from fedrema.simulation.final_predictions import FinalPredictions
from fedrema.simulation.simple_models import LINEAR, simple_models
from fedrema.simulation.simulator import Simulator

log = safe_logger("fedrema")
_last: dict[tuple[str, str, bool], dict[str, FinalPredictions]] = {}
"""Those of the last data: the runs of a comparison have the same."""


def write_simple_models(directory: RunDirectory, simulator: Simulator) -> None:
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
    directory.write_simple_models(_last[key])
